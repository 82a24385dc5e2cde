"""The kernels that a policy's program may use on a GPU, by the names of `dsl/torch_kernels.py`."""

from __future__ import annotations

from collections.abc import Callable

TRITON: dict[str, Callable] = {}
