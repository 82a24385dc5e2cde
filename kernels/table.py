"""The kernels that a policy's program may use on a GPU, by the names of `dsl/torch_kernels.py`."""

from __future__ import annotations

from collections.abc import Callable

from kvpolicy.kernels import select_triton, split_triton

TRITON: dict[str, Callable] = {
    "top": select_triton.top,
    "split": split_triton.split,
}
