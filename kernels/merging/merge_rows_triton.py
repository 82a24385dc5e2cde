"""Merging by receivers: each walks its own list of links, so that no sum depends on timing.

Sums are made in float64, which an H200 adds at half the speed of float32 and which the memory that
is read hides. Receivers without links cost two reads of an offset; eight of them share a program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from kvpolicy.kernels.launch import tuned
from kvpolicy.kernels.merging.merge_rows import check_mass, check_rows


def merge_rows(
    x: torch.Tensor,
    sources: torch.Tensor,
    weights: torch.Tensor,
    offsets: torch.Tensor,
    own: torch.Tensor,
    divide: torch.Tensor,
    *,
    receivers: int | None = None,
    links: int | None = None,
) -> torch.Tensor:
    """Keys or values of a layer after a merge.

    As `merge_rows.merge_rows`, without reading a number on the host; links of one receiver are
    added in tiles, in an order that only their number decides.

    Args:
        x: [G, n, D] any float dtype; the last axis contiguous, or it is copied.
        sources, weights, offsets, own, divide: as there.
        receivers: of a program. None: as measured for the GPU (see `tuned`), else 8.
        links: of a tile, a power of two. None: as measured, else 16.

    Returns:
        [G, n, D] float64.

    Raises:
        ValueError: names the argument, the expected and the actual shape.
        TunedError: as `tuned.load`.
    """
    check_rows(x, sources, weights, offsets, own, divide)
    heads, tokens, size = x.shape
    result = x.to(torch.float64, copy=True, memory_format=torch.contiguous_format)
    if not result.numel() or not sources.numel():
        return result
    if x.stride(2) != 1:
        x = x.contiguous()
    measured = tuned.choice("merge_rows", x.device, x.dtype, size, tokens)
    receivers = receivers or measured.get("receivers", 8)
    links = links or measured.get("links", 16)
    _rows[(triton.cdiv(tokens, receivers), heads)](
        x, sources.contiguous(), weights.contiguous(), offsets.contiguous(), own.contiguous(),
        divide.contiguous(), result, x.stride(0), x.stride(1), tokens, sources.shape[1],
        D=size, RECEIVERS=receivers, LINKS=links, BLOCK_D=triton.next_power_of_2(size), num_warps=4,
    )  # fmt: skip
    return result


def merge_mass(
    weights: torch.Tensor,
    offsets: torch.Tensor,
    own: torch.Tensor,
    *,
    receivers: int = 8,
    links: int = 128,
) -> torch.Tensor:
    """Own weight and the weights of its links, of each receiver.

    As `merge_rows.merge_mass`, without reading a number on the host.

    Args:
        weights, offsets, own: as there.
        receivers, links: as of `merge_rows` here.

    Returns:
        [G, n] float64.

    Raises:
        ValueError: names the argument, the expected and the actual shape.
    """
    check_mass(weights, offsets, own)
    heads, tokens = own.shape
    total = own.clone(memory_format=torch.contiguous_format)
    if total.numel() and weights.numel():
        _mass[(triton.cdiv(tokens, receivers), heads)](
            weights.contiguous(), offsets.contiguous(), total, tokens, weights.shape[1],
            RECEIVERS=receivers, LINKS=links, num_warps=1,
        )  # fmt: skip
    return total


@triton.jit
def _links(offsets, head, row, tokens):
    """Where the links of a receiver begin and end; nowhere beyond the last one."""
    at = offsets + head * (tokens + 1) + row
    inside = row < tokens
    begin = tl.load(at, mask=inside, other=0)
    return begin, tl.load(at + 1, mask=inside, other=0)


@triton.jit
def _double(rows):
    # The interpreter takes bfloat16 to float32 only; on a GPU this costs nothing.
    if rows.dtype != tl.float64:
        rows = rows.to(tl.float32)
    return rows.to(tl.float64)


@triton.jit
def _rows(
    x, sources, weights, offsets, own, divide, result, stride_head, stride, tokens, width,
    D: tl.constexpr, RECEIVERS: tl.constexpr, LINKS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    valid = column < D
    x += head * stride_head
    for turn in range(RECEIVERS):
        row = tl.program_id(0).to(tl.int64) * RECEIVERS + turn
        begin, end = _links(offsets, head, row, tokens)
        if end > begin:
            total = tl.zeros([BLOCK_D], tl.float64)
            for start in range(begin, end, LINKS):
                link = start + tl.arange(0, LINKS)
                there = link < end
                source = tl.load(sources + head * width + link, mask=there, other=0)
                weight = tl.load(weights + head * width + link, mask=there, other=0.0)
                mask = there[:, None] & valid[None, :]
                rows = tl.load(x + source[:, None] * stride + column[None, :], mask=mask, other=0.0)
                total += tl.sum(weight[:, None] * _double(rows), axis=0)
            mine = _double(tl.load(x + row * stride + column, mask=valid, other=0.0))
            made = mine * tl.load(own + head * tokens + row) + total
            by = tl.load(divide + head * tokens + row)
            bad = tl.max((valid & ~(tl.abs(made) < float("inf"))).to(tl.int32), axis=0)
            if (bad == 0) & (by != 0) & (tl.abs(by) < float("inf")):
                to = result + (head * tokens + row) * D + column
                tl.store(to, made / by, mask=valid)


@triton.jit
def _mass(
    weights, offsets, total, tokens, width, RECEIVERS: tl.constexpr, LINKS: tl.constexpr
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    for turn in range(RECEIVERS):
        row = tl.program_id(0).to(tl.int64) * RECEIVERS + turn
        begin, end = _links(offsets, head, row, tokens)
        if end > begin:
            added = tl.zeros([LINKS], tl.float64)
            for start in range(begin, end, LINKS):
                link = start + tl.arange(0, LINKS)
                added += tl.load(weights + head * width + link, mask=link < end, other=0.0)
            at = total + head * tokens + row
            tl.store(at, tl.load(at) + tl.sum(added, axis=0))
