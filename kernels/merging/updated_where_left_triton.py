"""States of a merge, a number per list: one launch, a program per layer."""

from __future__ import annotations

import torch
import triton.language as tl
from kvpolicy.kernels.launch.kernel import kernel
from kvpolicy.kernels.merging.updated_where_left import check

LANES = 256  # entries that are read at a time


def updated_where_left(
    new: torch.Tensor, old: torch.Tensor, present: torch.Tensor, kv_heads: int
) -> torch.Tensor:
    """For each of R lists, the new number if an entry has left its layer, else the old one.

    As `updated_where_left.updated_where_left`.

    Returns:
        float64 [R].
    """
    check(new, old, present, kv_heads)
    lists, width = present.shape
    result = torch.empty(lists, dtype=torch.float64, device=present.device)
    if lists:
        _updated_where_left[(lists // kv_heads,)](
            new, new.stride(0), old, old.stride(0), present.contiguous().view(torch.uint8), result,
            width, KV_HEADS=kv_heads, LANES=LANES,
        )  # fmt: skip
    return result


@kernel()
def _updated_where_left(
    new, new_list, old, old_list, present, made, width, KV_HEADS: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """Update the lists of one layer."""
    first = tl.program_id(0).to(tl.int64) * KV_HEADS
    flags = tl.zeros([LANES], tl.int32)
    for start in range(0, KV_HEADS * width, LANES):  # its lists are contiguous
        index = start + tl.arange(0, LANES)
        inside = index < KV_HEADS * width
        flags |= tl.load(present + first * width + index, mask=inside, other=0).to(tl.int32)
    has_left = tl.max(flags) > 0
    for head in range(KV_HEADS):
        list_ = first + head
        if has_left:
            tl.store(made + list_, tl.load(new + list_ * new_list))
        else:
            tl.store(made + list_, tl.load(old + list_ * old_list))
