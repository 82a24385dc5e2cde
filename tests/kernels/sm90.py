"""Compiles kernels for an H200 (sm_90) on a machine without a GPU.

`compiled(call)` runs a wrapper on tensors with a shape, a dtype and the device "cuda" but no data,
and compiles every kernel that it would launch. A wrapper that waits for the device raises, as there
is no data to wait for; so does one with a grid that a GPU would refuse.
`asked(call, number)` compiles nothing and returns the kernels for which Triton would look; tensors
that are read hold `number`.
Triton must not be in its interpreter, so this runs in its own process: see test_sm90.py.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction, MockTensor, compute_cache_key

_H200 = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, L2_cache_size=60 << 20,
    total_memory=150 << 30, warp_size=32, regs_per_multiprocessor=1 << 16,
    shared_memory_per_multiprocessor=228 << 10, max_threads_per_multi_processor=2048,
)  # fmt: skip
_CAPABILITY = 90
_PROGRAMS = 65535  # most programs along the second or third axis of a grid


class _Driver:
    """The part of a driver that Triton needs to compile, for a capability such as 90."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return self._target.arch  # Triton caches compiled kernels by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


class _Device(TorchFunctionMode):
    """Makes tensors of the GPU torch's "meta" tensors, without data, that claim to be on "cuda".

    Args:
        number: content of every tensor whose values are read; None: reading is an error.
    """

    def __init__(self, number: int | None) -> None:
        super().__init__()
        self._number = number

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _PLAIN:
            return func(*args, **kwargs)
        if func == _DEVICE:
            return _CUDA if args[0].is_meta else func(args[0])
        if func == _IS_CUDA:
            return args[0].is_meta
        if func in _READS and args[0].is_meta:
            if self._number is None:
                raise RuntimeError(f"{func.__name__} waits for the device")
            x = torch.full(args[0].shape, self._number).to(args[0].dtype)
            return x if func in (Tensor.cpu, Tensor.numpy) else func(x)
        if func is Tensor.pin_memory:
            return args[0]
        if func not in _BETWEEN_DEVICES and len({x.is_meta for x in _sized(args)}) > 1:
            raise RuntimeError(f"{func.__name__} is given tensors of the host and of the device")
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _without_cuda(kwargs["device"])}
        if func is Tensor.to:
            args = tuple(map(_without_cuda, args))
        return _result(func, args, kwargs)


_META, _CUDA = torch.device("meta"), torch.device("cuda")
_DEVICE, _IS_CUDA = Tensor.device.__get__, Tensor.is_cuda.__get__  # type: ignore[attr-defined]
_READS = {
    Tensor.cpu, Tensor.numpy, Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__int__,
    Tensor.__float__, Tensor.__index__,
}  # fmt: skip
_BETWEEN_DEVICES = {Tensor.copy_, Tensor.__getitem__, Tensor.__setitem__}


def _sized(args: Any) -> list[Tensor]:
    """Tensors among arguments, without scalars, which may be on the host in any operation."""
    return [x for x in args if isinstance(x, Tensor) and x.dim()]


def _without_cuda(x: Any) -> Any:
    named = isinstance(x, str | torch.device) and str(x).startswith("cuda")
    return _META if named else x


class _Argument(int):
    """Number of the argument that an operation returns unchanged."""


_RESULTS: dict[tuple, Any] = {}
_NEITHER = object()  # marks a result that is no tensor of the device
_PLAIN: set[Callable[..., Any]] = set()  # operations that return sizes, types and the like
_NO_TENSORS = (int, float, torch.Size, torch.dtype, torch.device)


def _result(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Result of an operation on tensors without data, computed once per kind of arguments.

    torch finds shapes in Python, which takes most of the time here.
    """
    given: list[Tensor] = []
    try:
        key = (func, _kind(args, given), _kind(kwargs, given))
        known = _RESULTS.get(key, _NEITHER)
    except TypeError:  # an argument has no hash
        return func(*args, **kwargs)
    if known is not _NEITHER:
        return _again(known, given)
    result = func(*args, **kwargs)
    if all(x.is_meta for x in given) and (func, _kind(args, []), _kind(kwargs, [])) == key:
        known = _remembered(result, given)
        if isinstance(result, _NO_TENSORS) and func not in _READS:
            _PLAIN.add(func)
        elif known is not _NEITHER:
            _RESULTS[key] = known
    return result


def _kind(x: Any, given: list[Tensor]) -> Any:
    """A key of everything that a result's shape depends on; tensors are added to `given`."""
    if isinstance(x, Tensor):
        given.append(x)
        return x.is_meta, x.dtype, x.shape, x.stride(), x.storage_offset()
    if isinstance(x, tuple | list):
        return type(x), *(_kind(each, given) for each in x)
    if isinstance(x, dict):
        return tuple((name, _kind(each, given)) for name, each in x.items())
    if isinstance(x, slice):
        return slice, x.start, x.stop, x.step
    return type(x), x


def _remembered(result: Any, given: list[Tensor]) -> Any:
    """A result with arguments replaced by their number, or `_NEITHER`."""
    if isinstance(result, Tensor):
        same = [_Argument(at) for at, x in enumerate(given) if x is result]
        return same[0] if same else result if result.is_meta else _NEITHER
    if isinstance(result, tuple | list):
        parts = [_remembered(each, given) for each in result]
        return _NEITHER if any(x is _NEITHER for x in parts) else type(result)(parts)
    return None if result is None else _NEITHER


def _again(known: Any, given: list[Tensor]) -> Any:
    """A remembered result with new tensors."""
    if isinstance(known, _Argument):
        return given[known]
    if isinstance(known, Tensor):
        return known.detach()
    if known is None:
        return None
    return type(known)(_again(each, given) for each in known)


@dataclass(frozen=True)
class Compiled:
    """One compiled kernel.

    Attributes:
        warps: warps of a program.
        shared: bytes of shared memory.
        registers: registers per thread.
        spilled: bytes per thread spilled to local memory.
        tensor_cores: whether it multiplies matrices on tensor cores.
        counts: number of atomic additions.
        ordered: number of those that release and acquire, with a barrier before and after.
        seconds: processor seconds of compilation.
    """

    name: str
    warps: int
    shared: int
    registers: int
    spilled: int
    tensor_cores: bool
    counts: int
    ordered: int
    seconds: float


def compiled(call: Callable[[], Any]) -> list[Compiled]:
    """The kernels that a call launches; the call makes its own tensors, on the device "cuda"."""
    found: dict[str, Compiled] = {}
    with on_device(compiling(found)):
        call()
    return list(found.values())


def compiling(found: dict[str, Compiled]) -> Callable[..., Any]:
    """Replacement of a launch: compiles the kernel and notes it in `found` by its hash."""

    def run(self: JITFunction, *args: Any, **options: Any) -> Any:
        before = sum(os.times()[:4])
        kernel = launch(self, *args, **options)
        if kernel.hash not in found:
            found[kernel.hash] = _measured(kernel, sum(os.times()[:4]) - before)
        return kernel

    launch = JITFunction.run
    return run


def asked(call: Callable[[], Any], number: int) -> set[tuple[str, str]]:
    """(Name, Triton's cache key) of each kernel that a call launches.

    Args:
        number: content of every tensor that the call reads.
    """
    found: set[tuple[str, str]] = set()

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        _, keys, *_, bind = self.device_caches[_CAPABILITY]
        _, specialization, options = bind(*args, debug=False, **options)
        found.add((self.fn.__qualname__, compute_cache_key(keys, specialization, options)))

    with on_device(run, number):
        call()
    return found


@contextmanager
def on_device(
    run: Callable[..., Any], number: int | None = None, capability: int = _CAPABILITY
) -> Iterator[None]:
    """A block with a GPU whose tensors have no data, in which launches go to `run`.

    Args:
        number: as in `asked`; None: reading a tensor of the device raises.
        capability: the GPU's capability, 90 for an H200; its other properties are an H200's.
    """

    def launched(self: JITFunction, *args: Any, warmup: bool, grid: Any, **options: Any) -> Any:
        if max(grid[1:], default=1) > _PROGRAMS:
            raise RuntimeError(f"{self.fn.__qualname__} cannot be launched on a grid of {grid}")
        with torch._C.DisableTorchFunction():
            given = [_without_data(x) for x in args]
            options = {name: _without_data(x) for name, x in options.items()}
        return run(self, *given, warmup=True, grid=grid, **options)

    launch, properties = JITFunction.run, torch.cuda.get_device_properties
    current = torch.cuda.current_device
    triton.runtime.driver.set_active(_Driver(capability))
    triton.knobs.nvidia.dump_ptxas_log = True
    triton.knobs.runtime.add_stages_inspection_hook = _note_what_ptxas_says
    major, minor = divmod(capability, 10)
    device = SimpleNamespace(**{**vars(_H200), "major": major, "minor": minor})
    JITFunction.run, torch.cuda.get_device_properties = launched, lambda *_: device
    torch.cuda.current_device = lambda: 0
    try:
        with _Device(number):
            yield
    finally:
        JITFunction.run, torch.cuda.get_device_properties = launch, properties
        torch.cuda.current_device = current


class _Address(MockTensor):
    """A tensor without data; its address is its offset in an aligned allocation."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.dtype, list(tensor.shape))
        self._address = tensor.storage_offset() * tensor.element_size()

    def data_ptr(self) -> int:
        return self._address


def _without_data(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(map(_without_data, x))
    return _Address(x) if isinstance(x, torch.Tensor) else x


def _note_what_ptxas_says(
    backend: Any = None, stages: Any = None, *_: Any
) -> tuple[str, str] | None:
    """Makes Triton keep the assembler's output with each kernel, in the cache too."""
    if stages is None:
        return __name__, __name__  # part of the cache's key
    assemble = stages["cubin"]

    def cubin(source: str, metadata: dict[str, Any]) -> bytes:
        with redirect_stdout(io.StringIO()) as said:
            made = assemble(source, metadata)
        metadata["ptxas"] = said.getvalue()
        return made

    stages["cubin"] = cubin
    return None


def _measured(kernel: Any, seconds: float) -> Compiled:
    said = kernel.metadata.ptxas
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill stores", said)))
    registers = max(map(int, re.findall(r"Used (\d+) registers", said)))
    text = kernel.asm["ptx"]
    dots = bool(re.search(r"\b(wgmma|mma)\.", text))
    made, counts = kernel.metadata, _counts(text)
    given = (made.num_warps, made.shared, registers, spilled, dots)
    return Compiled(made.name, *given, *counts, seconds)


def _counts(text: str) -> tuple[int, int]:
    """Atomic additions of a kernel's PTX, and those that release and acquire between barriers."""
    relevant = r"\bbar\.sync|\batom\.\S+|\b(?:ld|st|red)\.global"
    found = re.findall(relevant, text)
    atoms = [at for at, each in enumerate(found) if each.startswith("atom")]
    between = [
        found[at] == "atom.global.gpu.acq_rel.add.u32"
        and found[at - 1] == "bar.sync"
        and found[at + 1] == "bar.sync"
        for at in atoms
    ]
    return len(atoms), sum(between)
