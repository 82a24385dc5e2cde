"""Finds, on a CPU, code that would make the host wait for a GPU.

Every tensor counts as the device's unless it was made on the host: by `torch.tensor`, `zeros` and
the like without `device` (or with `values.HOST`), or only from host tensors. Every operation that
needs values of a device tensor is noted: its numbers, lists and truth values, boolean indices,
lengths that depend on data, copies to the host, copies to the device without `non_blocking`, and
operations that mix host and device tensors, which a GPU refuses or waits for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from kvpolicy.dsl.execute.tensors.values import HOST
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Functions that always wait, for a tensor of any size.
_READS = {"tolist", "numpy", "cpu", "__array__"}
_LENGTHS = {
    "_local_scalar_dense", "nonzero", "masked_select", "equal", "unique_dim", "_unique2",
    "unique_consecutive", "bincount", "is_nonzero",
}  # fmt: skip
_INDEX = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
_MAKERS = {
    "tensor", "as_tensor", "zeros", "ones", "full", "empty", "arange", "from_numpy", "linspace",
}  # fmt: skip
_ON_HOST = "made_on_the_host"


def on_host(tensor: torch.Tensor) -> None:
    """Marks a tensor made elsewhere as the host's."""
    setattr(tensor, _ON_HOST, True)


class HostWaits(TorchFunctionMode):
    """Notes `file:function operation` of every wait while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._dispatch = _Dispatch(self)
        self.on_host = [False]  # stack of running operations: all their tensors are the host's

    def __enter__(self) -> HostWaits:
        self._dispatch.__enter__()
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        self._dispatch.__exit__(*args)

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        devices = [x for x in (*args, kwargs.get("device")) if isinstance(x, torch.device | str)]
        to_device = any(x is not HOST for x in devices)
        own = [getattr(x, _ON_HOST, False) for x in tensors]
        host = all(own) if tensors else name in _MAKERS and not to_device
        if not tensors and name in ("tensor", "as_tensor") and to_device:
            self.note(name)
        elif name in _READS and not host:
            self.note(name)
            host = True
        elif name == "to" and host and to_device:
            host = False
            if not kwargs.get("non_blocking"):
                self.note("to the device")
        elif name == "new_tensor" and not host:
            self.note(name)
        elif not all(own) and any(x.dim() for x, on in zip(tensors, own, strict=True) if on):
            self.note(f"{name} of both")
        self.on_host.append(all(own))
        try:
            made = func(*args, **kwargs)
        finally:
            self.on_host.pop()
        if not isinstance(made, torch.Tensor):
            for x in tree_leaves(made) if host else ():
                if isinstance(x, torch.Tensor):
                    setattr(x, _ON_HOST, True)
            return made
        if name in ("cpu", "to"):  # may return the same object, whose mark must not change
            made = made.view_as(made)
        if host:
            setattr(made, _ON_HOST, True)
        return made

    def note(self, operation: str) -> None:
        """Notes a wait, unless SGLang's own code or Triton's interpreter waits."""
        place = _place(sys._getframe(2))
        if place is not None:
            self.found.append(f"{place} {operation}")


class _Dispatch(TorchDispatchMode):
    """Finds the waits inside other operations."""

    def __init__(self, waits: HostWaits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, func.__name__.split(".")[0]
        waits = name in _LENGTHS
        if name in _INDEX:
            waits = any(x is not None and x.dtype == torch.bool for x in args[1])
        elif name == "repeat_interleave":
            waits = kwargs.get("output_size") is None
        if waits and not self._waits.on_host[-1]:
            self._waits.note(name)
        return func(*args, **kwargs)


def _frames(frame: Any) -> Iterator[tuple[str, str]]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_code.co_name
        frame = frame.f_back


def _place(frame: Any) -> str | None:
    """`file:function` of this project that computes; None if it is SGLang's or Triton's code."""
    frames = list(_frames(frame))
    if any("/triton/" in file for file, _ in frames):
        return None
    for file, function in frames:
        if file == __file__ or "/torch/" in file:
            continue
        return None if "/sglang/" in file else f"{file.rsplit('/', 1)[1]}:{function}"
    return None
