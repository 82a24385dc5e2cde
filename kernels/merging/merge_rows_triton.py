"""Merging by receiver: one program adds all links of a receiver, so no sum depends on timing.

Sums are float64, which an H200 adds at half the speed of float32; reading memory takes longer.
Receivers without links cost two reads of an offset; eight receivers share a program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from kvpolicy.kernels.entries.rounding import largest
from kvpolicy.kernels.entries.rounding_triton import doubled
from kvpolicy.kernels.launch import tuned
from kvpolicy.kernels.launch.kernel import kernel
from kvpolicy.kernels.merging.links import Links
from kvpolicy.kernels.merging.merge_rows import check_links, check_rows


def merge_rows(
    x: torch.Tensor,
    links: Links,
    own: torch.Tensor | None,
    divide: torch.Tensor | None,
    *,
    receivers: int | None = None,
    tile: int | None = None,
) -> torch.Tensor:
    """Keys or values of a layer after a merge.

    As `merge_rows.merge_rows`; the host does not wait for the device. Links of one receiver are
    added in tiles, in an order that depends on their number alone.

    Args:
        x: [G, n, D] any float dtype; the last axis contiguous, or it is copied.
        links, own, divide: as of the reference.
        receivers: receivers of a program. None: as measured for the GPU (see `tuned`), else 8.
        tile: links that are added at a time, a power of two. None: as measured, else 16.

    Returns:
        [G, n, D] float64.

    Raises:
        TunedError: as `tuned.load`.
    """
    check_rows(x, links, own, divide)
    heads, tokens, size = x.shape
    result = x.to(torch.float64, copy=True, memory_format=torch.contiguous_format)
    sources, weights, offsets = (tensor.contiguous() for tensor in links)
    if not result.numel() or not sources.numel():
        return result
    if x.stride(2) != 1:
        x = x.contiguous()
    measured = tuned.choice("merge_rows", x.device, x.dtype, size, tokens)
    receivers = receivers or measured.get("receivers", 8)
    tile = tile or measured.get("tile", 16)
    own, divide = (None if tensor is None else tensor.contiguous() for tensor in (own, divide))
    _rows[(triton.cdiv(tokens, receivers), heads)](
        x, sources, weights, offsets, own, divide, result, x.stride(0), x.stride(1), tokens,
        sources.shape[1],
        D=size, RECEIVERS=receivers, LINKS=tile, BLOCK_D=triton.next_power_of_2(size),
        LARGEST=largest(x.dtype), num_warps=4,
    )  # fmt: skip
    return result


def merge_mass(
    links: Links, own: torch.Tensor | None, *, receivers: int = 8, tile: int = 128
) -> torch.Tensor:
    """The sum of the own weight and the weights of the links, for each receiver.

    As `merge_rows.merge_mass`; the host does not wait for the device.

    Args:
        links, own: as of the reference.
        receivers: receivers of a program; tile: links that are added at a time, a power of two.

    Returns:
        [G, n] float64.
    """
    check_links(links, own)
    _, weights, offsets = links
    own = None if own is None else own.contiguous()
    total, tokens = _of_receivers(offsets)
    if total.numel():
        _mass[(triton.cdiv(tokens, receivers), len(total))](
            weights.contiguous(), offsets.contiguous(), own, total, tokens, weights.shape[1],
            RECEIVERS=receivers, LINKS=tile, num_warps=1,
        )  # fmt: skip
    return total


def members(links: Links, *, receivers: int = 256) -> torch.Tensor:
    """Number of entries merged in each receiver, itself included.

    As `merge_rows.members`.

    Args:
        links: as of the reference.
        receivers: receivers of a program, a power of two.

    Returns:
        [G, n] float64.
    """
    check_links(links, None)
    offsets = links[2].contiguous()
    total, tokens = _of_receivers(offsets)
    if total.numel():
        grid = (triton.cdiv(tokens, receivers), len(total))
        _members[grid](offsets, total, tokens, RECEIVERS=receivers, num_warps=2)
    return total


def _of_receivers(offsets: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Room for a number per receiver, float64 [G, n], and n."""
    heads, tokens = len(offsets), offsets.shape[1] - 1
    return torch.empty(heads, tokens, dtype=torch.float64, device=offsets.device), tokens


@triton.jit
def _links(offsets, head, row, tokens):
    """Where the links of one or more receivers begin and end; 0 and 0 beyond the last receiver."""
    address = offsets + head * (tokens + 1) + row
    inside = row < tokens
    begin = tl.load(address, mask=inside, other=0)
    return begin, tl.load(address + 1, mask=inside, other=0)


@triton.jit
def merged_row(
    x, stride, receiver, ids, sources, weights, begin, end, own_weight, divisor,
    D: tl.constexpr, LINKS: tl.constexpr, BLOCK_D: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """A receiver's row [BLOCK_D] float64 with the rows of its links, and whether it can be stored.

    Args:
        x, receiver: pointers to all rows, `stride` numbers apart, and to the receiver's.
        ids: pointer to the row of each entry; None: its index.
        sources, weights: pointers to the entry and the weight of each link of the list.
        begin, end: the receiver's links.
        own_weight, divisor: its numbers, float64; a divisor of None is the sum of all weights.
    """
    column = tl.arange(0, BLOCK_D)
    valid = column < D
    total = tl.zeros([BLOCK_D], tl.float64)
    mass = tl.full([], 0.0, tl.float64)
    for start in range(begin, end, LINKS):
        link = start + tl.arange(0, LINKS)
        exists = link < end
        row = tl.load(sources + link, mask=exists, other=0)
        if ids is not None:
            row = tl.load(ids + row, mask=exists, other=0)
        weight = tl.load(weights + link, mask=exists, other=0.0)
        mask = exists[:, None] & valid[None, :]
        rows = tl.load(x + row[:, None] * stride + column[None, :], mask=mask, other=0.0)
        total += tl.sum(weight[:, None] * doubled(rows), axis=0)
        mass += tl.sum(weight)
    numerator = doubled(tl.load(receiver + column, mask=valid, other=0.0)) * own_weight + total
    if divisor is None:
        divisor = own_weight + mass
    merged = numerator / divisor  # not a number, or infinite, where the divisor is 0
    bad = tl.max((valid & ~(tl.abs(merged) <= LARGEST)).to(tl.int32), axis=0)
    return merged, (bad == 0) & (tl.abs(divisor) < float("inf"))


@kernel(aligned=["x", "result", "stride_head", "stride"])
def _rows(
    x, sources, weights, offsets, own, divide, result, stride_head, stride, tokens, width,
    D: tl.constexpr, RECEIVERS: tl.constexpr, LINKS: tl.constexpr, BLOCK_D: tl.constexpr,
    LARGEST: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    valid = column < D
    x += head * stride_head
    for turn in range(RECEIVERS):
        row = tl.program_id(0).to(tl.int64) * RECEIVERS + turn
        begin, end = _links(offsets, head, row, tokens)
        if end > begin:
            own_weight = tl.full([], 1.0, tl.float64)
            if own is not None:
                own_weight = tl.load(own + head * tokens + row)
            divisor = None
            if divide is not None:
                divisor = tl.load(divide + head * tokens + row)
            merged, storable = merged_row(
                x, stride, x + row * stride, None, sources + head * width, weights + head * width,
                begin, end, own_weight, divisor, D, LINKS, BLOCK_D, LARGEST,
            )  # fmt: skip
            if storable:
                address = result + (head * tokens + row) * D + column
                tl.store(address, merged, mask=valid)


@kernel()
def _mass(
    weights, offsets, own, total, tokens, width, RECEIVERS: tl.constexpr, LINKS: tl.constexpr
):  # fmt: skip
    """Sum the weights of some receivers of one list."""
    head = tl.program_id(1).to(tl.int64)
    for turn in range(RECEIVERS):
        row = tl.program_id(0).to(tl.int64) * RECEIVERS + turn
        begin, end = _links(offsets, head, row, tokens)
        offset, inside = head * tokens + row, row < tokens
        own_weight = tl.full([], 1.0, tl.float64)
        if own is not None:
            own_weight = tl.load(own + offset, mask=inside, other=0.0)
        link_mass = tl.zeros([LINKS], tl.float64)
        for start in range(begin, end, LINKS):
            link = start + tl.arange(0, LINKS)
            link_mass += tl.load(weights + head * width + link, mask=link < end, other=0.0)
        tl.store(total + offset, own_weight + tl.sum(link_mass, axis=0), mask=inside)


@kernel()
def _members(offsets, total, tokens, RECEIVERS: tl.constexpr):
    """Count the entries of some receivers of one list."""
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * RECEIVERS + tl.arange(0, RECEIVERS)
    begin, end = _links(offsets, head, row, tokens)
    number = 1.0 + (end - begin).to(tl.float64)
    tl.store(total + head * tokens + row, number, mask=row < tokens)
