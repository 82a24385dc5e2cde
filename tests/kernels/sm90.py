"""Compiles kernels for an H200 (sm_90) on a machine without a GPU.

`compiled(call)` runs a wrapper on tensors that have a shape, a dtype and the device "cuda" but no
data, and compiles every kernel that it launches instead of launching it. A wrapper that waits for
the device raises, since there is no number to wait for: the check that it does not is part of it.
Triton must not be in its interpreter, so this runs in a process of its own: see test_sm90.py.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction, MockTensor

_H200 = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, L2_cache_size=60 << 20,
    total_memory=150 << 30, warp_size=32,
)  # fmt: skip


class _Driver:
    """What Triton asks of a driver when it compiles."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class _OnDevice(FakeTensorMode):
    """Tensors of the GPU have no data; those of the host are ordinary ones."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tree_leaves((args, kwargs))
        devices = [x for x in given if isinstance(x, torch.device) and x.type == "cuda"]
        if devices or any(isinstance(x, FakeTensor) for x in given):
            return super().__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **kwargs)


class _WithoutCuda(TorchFunctionMode):
    """What torch without CUDA lacks: `x[...]` of a tensor of that device, and pinned memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            return _item(*args)
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.__invert__:
            return torch.bitwise_not(*args)
        if func is torch.Tensor.contiguous:
            whole = args[0].is_contiguous()
            return args[0] if whole else args[0].clone(memory_format=torch.contiguous_format)
        return func(*args, **(kwargs or {}))


def _item(x: torch.Tensor, index: Any) -> torch.Tensor:
    index = index if isinstance(index, tuple) else (index,)
    named = sum(i is not None and i is not ... for i in index)
    at = index.index(...) if ... in [i if i is ... else None for i in index] else len(index)
    whole = [slice(None)] * (x.dim() - named)
    dim, tensors = 0, {}
    for each in (*index[:at], *whole, *index[at + 1 :]):
        if each is None:
            x = x.unsqueeze(dim)
        elif isinstance(each, int):
            x = x.select(dim, each)
            continue
        elif isinstance(each, torch.Tensor):
            tensors[dim] = each
        elif each != slice(None):
            start, stop, step = each.indices(x.shape[dim])
            x = torch.ops.aten.slice.Tensor(x, dim, start, stop, step)
        dim += 1
    if not tensors:
        return x
    return torch.ops.aten.index.Tensor(x, [tensors.get(i) for i in range(max(tensors) + 1)])


@dataclass(frozen=True)
class Compiled:
    """One kernel for sm_90.

    Attributes:
        shared: bytes of shared memory.
        registers: per thread.
        spilled: bytes per thread that went to local memory because registers were too few.
        tensor_cores: whether it multiplies matrices on tensor cores.
        counts: atomic additions to memory.
        ordered: of these, before which all threads have stored, and after which none has yet read.
    """

    name: str
    shared: int
    registers: int
    spilled: int
    tensor_cores: bool
    counts: int
    ordered: int


def compiled(call: Callable[[], Any]) -> list[Compiled]:
    """The kernels that a call launches; the call makes its own tensors, on the device "cuda"."""
    found: dict[str, Compiled] = {}

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = launch(
            self,
            *map(_without_data, args),
            grid=grid,
            warmup=True,
            **{name: _without_data(x) for name, x in options.items()},
        )
        found[kernel.hash] = _measured(kernel)
        return kernel

    launch, properties = JITFunction.run, torch.cuda.get_device_properties
    current = torch.cuda.current_device
    triton.runtime.driver.set_active(_Driver())
    triton.knobs.nvidia.dump_ptxas_log = True
    triton.knobs.runtime.add_stages_inspection_hook = _note_what_ptxas_says
    JITFunction.run, torch.cuda.get_device_properties = run, lambda *_: _H200
    torch.cuda.current_device = lambda: 0
    try:
        with _OnDevice(allow_non_fake_inputs=True), _WithoutCuda():
            call()
    finally:
        JITFunction.run, torch.cuda.get_device_properties = launch, properties
        torch.cuda.current_device = current
    return list(found.values())


def _without_data(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(map(_without_data, x))
    return MockTensor(x.dtype, list(x.shape)) if isinstance(x, torch.Tensor) else x


def _note_what_ptxas_says(
    backend: Any = None, stages: Any = None, *_: Any
) -> tuple[str, str] | None:
    """Has Triton keep with each kernel what its assembler prints of it; the cache does so too."""
    if stages is None:
        return __name__, __name__  # part of the cache's key
    assemble = stages["cubin"]

    def cubin(source: str, metadata: dict[str, Any]) -> bytes:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            made = assemble(source, metadata)
        metadata["ptxas"] = said.getvalue()
        return made

    stages["cubin"] = cubin
    return None


def _measured(kernel: Any) -> Compiled:
    said = kernel.metadata.ptxas
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill stores", said)))
    registers = max(map(int, re.findall(r"Used (\d+) registers", said)))
    text = kernel.asm["ptx"]
    dots = bool(re.search(r"\b(wgmma|mma)\.", text))
    shared = kernel.metadata.shared
    return Compiled(kernel.metadata.name, shared, registers, spilled, dots, *_counts(text))


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
