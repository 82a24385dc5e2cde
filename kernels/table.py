"""The kernels that a policy's program may use on a GPU, by the names of `dsl/torch_kernels.py`."""

from __future__ import annotations

from collections.abc import Callable

from kvpolicy.kernels import (
    generated,
    merge_rows_triton,
    nearest_triton,
    select_triton,
    share_triton,
    split_triton,
)

TRITON: dict[str, Callable] = {
    "generated": generated.generated,
    "top": select_triton.top,
    "split": split_triton.split,
    "nearest": nearest_triton.nearest,
    "merge_rows": merge_rows_triton.merge_rows,
    "merge_mass": merge_rows_triton.merge_mass,
    "gram": share_triton.gram,
    "blend": share_triton.blend,
}
