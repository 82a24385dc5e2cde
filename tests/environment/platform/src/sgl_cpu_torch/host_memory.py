"""Pinned host memory on a machine without a device: ordinary memory, never registered."""

from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._device import _device_constructors


def stand_in() -> None:
    """Makes pinning memory, and registering it with CUDA, do nothing."""
    torch.Tensor.pin_memory = lambda self, device=None: self
    _device_constructors()  # torch caches the functions that `with torch.device` changes
    for name in ("tensor", "zeros", "empty"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    runtime = SimpleNamespace(
        cudaHostRegister=lambda *_: 0,
        cudaHostUnregister=lambda *_: 0,
        cudaGetErrorString=lambda code: f"{code}",
    )
    torch.cuda.cudart = lambda: runtime


def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(make)
    def unpinned(*args: Any, **options: Any) -> torch.Tensor:
        options.pop("pin_memory", None)
        return make(*args, **options)

    return unpinned
