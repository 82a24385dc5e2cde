"""Merging in the pool: one program adds all links of a receiver, so no sum depends on timing.

Most entries receive nothing: a program ends at once if none of its entries has links.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from kvpolicy.kernels.entries.compact_in_place_triton import lanes_of, proceeds
from kvpolicy.kernels.entries.rounding import largest
from kvpolicy.kernels.entries.rounding_triton import rounded
from kvpolicy.kernels.launch.kernel import kernel
from kvpolicy.kernels.merging.links import Links
from kvpolicy.kernels.merging.merge_entries import check
from kvpolicy.kernels.merging.merge_rows_triton import merged_row


def merge_entries(
    pool: torch.Tensor,
    ids: torch.Tensor,
    links: Links,
    own: torch.Tensor | None,
    divide: torch.Tensor | None,
    proceed: torch.Tensor,
    *,
    receivers: int = 64,
    tile: int = 16,
) -> None:
    """Merge keys or values of R lists as `merge_rows` does, rounded once to the dtype of the pool.

    As `merge_entries.merge_entries`; the host does not wait for the device. Links of one receiver
    are added in tiles, in an order that depends on their number alone.

    Args:
        receivers: entries of a program; tile: links that are added at a time, a power of two.
    """
    check(pool, ids, links, own, divide, proceed)
    (lists, tokens), size = ids.shape, pool.shape[1]
    sources, weights, offsets = (tensor.contiguous() for tensor in links)
    if not ids.numel() or not sources.numel():
        return
    _merge[(triton.cdiv(tokens, receivers), lists)](
        pool, pool.stride(0), ids.contiguous(), sources, weights, offsets,
        own, *_strides(own), divide, *_strides(divide),
        proceed.contiguous().view(torch.uint8), tokens, sources.shape[1], lists // len(proceed),
        D=size, RECEIVERS=receivers, LINKS=tile, BLOCK_D=triton.next_power_of_2(size),
        LARGEST=largest(pool.dtype), FLAGS=proceed.shape[1], FLAGS_P=lanes_of(proceed.shape[1]),
        num_warps=4,
    )  # fmt: skip


def _strides(x: torch.Tensor | None) -> tuple[int, int]:
    return (0, 0) if x is None else (x.stride(0), x.stride(1))


@kernel(aligned=["pool", "stride"])
def _merge(
    pool, stride, ids, sources, weights, offsets,
    own, own_list, own_entry, divide, divide_list, divide_entry,
    proceed, tokens, width, share,
    D: tl.constexpr, RECEIVERS: tl.constexpr, LINKS: tl.constexpr, BLOCK_D: tl.constexpr,
    LARGEST: tl.constexpr, FLAGS: tl.constexpr, FLAGS_P: tl.constexpr,
):  # fmt: skip
    """Merge into some receivers of one list."""
    list_ = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * RECEIVERS
    last = tl.minimum(first + RECEIVERS, tokens)
    ids += list_ * tokens
    sources += list_ * width
    weights += list_ * width
    offsets += list_ * (tokens + 1)
    linked = tl.load(offsets + last) > tl.load(offsets + first)
    if linked & proceeds(proceed, tl.program_id(1) // share, FLAGS, FLAGS_P):
        column = tl.arange(0, BLOCK_D)
        valid = column < D
        for row in range(first, last):
            begin, end = tl.load(offsets + row), tl.load(offsets + row + 1)
            if end > begin:
                own_weight = tl.full([], 1.0, tl.float64)
                if own is not None:
                    own_weight = tl.load(own + list_ * own_list + row * own_entry)
                divisor = None
                if divide is not None:
                    divisor = tl.load(divide + list_ * divide_list + row * divide_entry)
                receiver = pool + tl.load(ids + row) * stride
                merged, storable = merged_row(
                    pool, stride, receiver, ids, sources, weights, begin, end, own_weight, divisor,
                    D, LINKS, BLOCK_D, LARGEST,
                )  # fmt: skip
                if storable:
                    tl.store(receiver + column, rounded(merged, pool.dtype.element_ty), mask=valid)
