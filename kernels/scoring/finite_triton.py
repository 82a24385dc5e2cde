"""Whether entries of a pool hold neither NaN nor infinity: one launch for all lists.

A program reads one list, a tile of entries at a time, and remembers only whether any number so far
was NaN or infinite.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from kvpolicy.kernels.entries.rounding_triton import widened
from kvpolicy.kernels.launch.kernel import kernel
from kvpolicy.kernels.launch.tiles import rows_of
from kvpolicy.kernels.scoring.finite import check


def finite(
    keys: torch.Tensor,
    values: torch.Tensor,
    ids: torch.Tensor,
    holds: torch.Tensor,
    *,
    tile: int | None = None,
) -> torch.Tensor:
    """Whether the keys and values of each of R lists are all finite.

    As `finite.finite`.

    Args:
        tile: entries that a program reads at a time, a power of two. None: as by `rows_of`.

    Returns:
        bool [R].
    """
    check(keys, values, ids, holds)
    (lists, width), size = ids.shape, keys.shape[1]
    result = torch.empty(lists, dtype=torch.bool, device=ids.device)
    if lists:
        block = triton.next_power_of_2(size)
        _finite[(lists,)](
            keys, keys.stride(0), values, values.stride(0), ids.contiguous(),
            holds.contiguous().view(torch.uint8), result.view(torch.uint8), width,
            SIZE=size, BLOCK_D=block, TILE=tile or rows_of(block, keys.element_size()),
        )  # fmt: skip
    return result


@triton.jit
def _wrong(x):
    """1 for NaN and infinity, else 0."""
    if x.dtype != tl.float64:
        x = widened(x)
    return (~(tl.abs(x) < float("inf"))).to(tl.int32)


@kernel(aligned=["keys", "key_stride", "values", "value_stride"])
def _finite(
    keys, key_stride, values, value_stride, ids, holds, made, width,
    SIZE: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Check one list."""
    list_ = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, BLOCK_D)[None, :]
    wrong = tl.zeros([TILE, BLOCK_D], tl.int32)
    for first in range(0, width, TILE):
        column = first + tl.arange(0, TILE)
        held = tl.load(holds + list_ * width + column, mask=column < width, other=0) > 0
        entry = tl.load(ids + list_ * width + column, mask=held, other=0)
        mask = held[:, None] & (dim < SIZE)
        x = tl.load(keys + entry[:, None] * key_stride + dim, mask=mask, other=0.0)
        wrong |= _wrong(x)
        x = tl.load(values + entry[:, None] * value_stride + dim, mask=mask, other=0.0)
        wrong |= _wrong(x)
    tl.store(made + list_, (tl.max(tl.max(wrong, 1), 0) == 0).to(tl.uint8))
