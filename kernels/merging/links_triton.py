"""Links listed by receiver: one launch, which counts and does not sort.

A program counts the links of one list by receiver, and sums of the counts say where the links of
each receiver begin. Then it places the links, a tile at a time: a link takes the next free place of
its receiver, after earlier links of the tile with the same receiver. So links stay in the order of
the entries, in whatever order the threads run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from kvpolicy.kernels.launch.kernel import kernel
from kvpolicy.kernels.merging.links import Links, check


def links(
    dropped: torch.Tensor,
    receivers: torch.Tensor,
    receivers_present: torch.Tensor,
    accepted: torch.Tensor,
    weights: torch.Tensor,
    tokens: int,
    *,
    block: int = 1024,
    tile: int | None = None,
) -> Links:
    """List the links of R lists by receiver, those of one receiver in the order of P, then S.

    As `links.links`; what follows the last link is not written.

    Args:
        block: receivers whose counts are added up at a time, a power of two.
        tile: links that are placed at a time, a power of two. None: 64, or 128 if K > 4096.

    Returns:
        Room for K = P * S links of each list.
    """
    check(dropped, receivers, receivers_present, accepted, weights)
    device, (lists, most, steps) = dropped.device, receivers.shape
    sources = torch.empty((lists, most * steps), dtype=torch.int64, device=device)
    link_weights = torch.empty((lists, most * steps), dtype=torch.float64, device=device)
    offsets = torch.empty((lists, tokens + 1), dtype=torch.int32, device=device)
    if lists:
        # Number of links of each receiver, later the place of its next one.
        upto = torch.empty((lists, tokens), dtype=torch.int32, device=device)
        tile = tile or (64 if most * steps <= 4096 else 128)
        _links[(lists,)](
            dropped.contiguous(), receivers.contiguous(),
            receivers_present.contiguous().view(torch.uint8),
            accepted.contiguous().view(torch.uint8), weights, *weights.stride(),
            sources, link_weights, offsets, upto, most * steps, most, steps, tokens,
            BLOCK=block, TILE=tile, num_warps=8 if tile > 64 else 4,
        )  # fmt: skip
    return sources, link_weights, offsets


@triton.jit
def _receivers(receivers, receivers_present, accepted, link, number, steps):
    """Receivers of some links, -1 for those that do not count, and which count."""
    inside = link < number
    counts = tl.load(receivers_present + link, mask=inside, other=0) > 0
    counts &= tl.load(accepted + link // steps, mask=inside, other=0) > 0
    return tl.load(receivers + link, mask=counts, other=-1).to(tl.int32), counts


@kernel()
def _links(
    dropped, receivers, receivers_present, accepted, weights, weight_list, weight_place,
    sources, own, offsets, upto, number, most, steps, tokens,
    BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """List the links of one list by receiver."""
    list_ = tl.program_id(0).to(tl.int64)
    dropped += list_ * most
    accepted += list_ * most
    weights += list_ * weight_list
    receivers += list_ * number
    receivers_present += list_ * number
    sources += list_ * number
    own += list_ * number
    offsets += list_ * (tokens + 1)
    upto += list_ * tokens
    for first in range(0, tokens, BLOCK):
        column = first + tl.arange(0, BLOCK)
        tl.store(upto + column, tl.zeros([BLOCK], tl.int32), mask=column < tokens)
    tl.debug_barrier()
    for first in range(0, number, BLOCK):
        receiver, counts = _receivers(
            receivers, receivers_present, accepted, first + tl.arange(0, BLOCK), number, steps
        )
        # Integers: the order of additions changes nothing.
        tl.atomic_add(upto + receiver, 1, mask=counts)
    tl.debug_barrier()
    total = 0
    for first in range(0, tokens, BLOCK):
        column = first + tl.arange(0, BLOCK)
        links = tl.load(upto + column, mask=column < tokens, other=0)
        begin = total + tl.cumsum(links) - links
        tl.store(offsets + column, begin, mask=column < tokens)
        tl.store(upto + column, begin, mask=column < tokens)
        total += tl.sum(links)
    tl.store(offsets + tokens, total)
    lane = tl.arange(0, TILE)
    for first in range(0, number, TILE):
        link = first + lane
        receiver, counts = _receivers(receivers, receivers_present, accepted, link, number, steps)
        tile_receiver, _ = _receivers(
            receivers, receivers_present, accepted, first + tl.arange(0, TILE), number, steps
        )
        # Links that do not count have receiver -1, which no other link has.
        same = (receiver[:, None] == tile_receiver[None, :]).to(tl.int32)
        # Low 16 bits: links of the tile with the same receiver; high 16 bits: those of them that
        # come before. One sum takes fewer registers than two.
        same_counts = tl.sum(tl.where(lane[None, :] < lane[:, None], same << 16, 0) + same, 1)
        earlier_count = same_counts >> 16
        is_last = (same_counts & 0xFFFF) == earlier_count + 1
        # Wait for what the tile before has written.
        tl.debug_barrier()
        place = tl.load(upto + receiver, mask=counts, other=0) + earlier_count
        tl.store(
            sources + place, tl.load(dropped + link // steps, mask=counts, other=0), mask=counts
        )
        weight = tl.load(weights + link // steps * weight_place, mask=counts, other=0.0)
        tl.store(own + place, weight, mask=counts)
        tl.debug_barrier()
        tl.store(upto + receiver, place + 1, mask=counts & is_last)
