"""`carry` in Triton: a launch per state, at least one.

A program goes through the entries of a layer in order, a block of all KV heads at a time: the
number of entries that some head kept so far is the place of the next one.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from kvpolicy.kernels.entries.carry import check
from kvpolicy.kernels.launch.kernel import kernel


def carry(
    kept: torch.Tensor,
    columns: torch.Tensor | None,
    positions: torch.Tensor,
    used: torch.Tensor,
    newest: torch.Tensor,
    states: Sequence[torch.Tensor],
    fresh: Sequence[float],
    *,
    steps: int,
    width: int,
    block: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Collect the entries that any KV head of a layer keeps, for S layers of G heads, and new ones.

    As `carry.carry`.

    Args:
        block: entries of each list that a program reads at a time, a power of two. None: 2048 in
            all lists of a layer together, but at least 16 of each.

    Returns:
        int64 [S, M'], bool [S * G, M'] and states, each float64 [S * G, ..., M'].
    """
    check(kept, columns, positions, used, newest, states, fresh)
    layers, device = len(positions), kept.device
    kv_heads = len(kept) // max(layers, 1)
    padded = triton.next_power_of_2(max(kv_heads, 1))
    made = torch.empty((layers, width), dtype=torch.int64, device=device)
    holds = torch.empty((len(kept), width), dtype=torch.bool, device=device)
    later = [
        torch.empty((*x.shape[:-1], width), dtype=torch.float64, device=device) for x in states
    ]
    stays, own = kept.contiguous().view(torch.uint8), positions.contiguous()
    chosen = None if columns is None else columns.contiguous().view(torch.uint8)
    first = True
    for i in range(max(len(states), 1)) if layers and width else ():
        old, new, value = (states[i], later[i], fresh[i]) if states else (None, None, 0.0)
        low, high = struct.unpack("<ii", struct.pack("<d", value))  # Triton would pass a float32
        each = 1 if old is None or old.dim() == 2 else old.shape[1]
        _carry[(layers, each)](
            stays, chosen, own if first else None, used, used.stride(0), newest, made,
            holds.view(torch.uint8),
            None if old is None else old.contiguous(), new, low, high,
            kept.shape[1], width, steps, layers // len(newest),
            KV_HEADS=kv_heads, KV_HEADS_P=padded, BLOCK=block or max(2048 // padded, 16),
        )  # fmt: skip
        first = False
    return made, holds, later


@kernel()
def _carry(
    kept, columns, positions, used, used_stride, newest, made, holds, state, later, low, high,
    before, width, steps, share,
    KV_HEADS: tl.constexpr, KV_HEADS_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Carry one layer and one number per entry; `low` and `high` are the bits of `fresh`."""
    this = tl.program_id(0)
    layer = this.to(tl.int64)
    head = tl.arange(0, KV_HEADS_P)
    real = (head < KV_HEADS)[:, None]
    old = ((layer * KV_HEADS + head) * before)[:, None]
    new = ((layer * KV_HEADS + head) * width)[:, None]
    # Several numbers per entry lie as those of several lists.
    number = (layer * KV_HEADS + head) * tl.num_programs(1) + tl.program_id(1)
    old_number, new_number = (number * before)[:, None], (number * width)[:, None]
    notes = tl.program_id(1) == 0
    start = width - steps - tl.load(used + layer * used_stride).to(tl.int32)
    last = tl.load(newest + this // share)
    bits = (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)
    fresh = bits.to(tl.float64, bitcast=True)
    # Columns without a kept entry: empty ones in front, new entries at the end.
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        comes = column >= width - steps
        inside = (column < width) & (comes | (column < start))
        both = real & inside[None, :]
        if positions is not None:
            place = tl.where(comes, last - (width - 1 - column), -1)
            tl.store(made + layer * width + column, place, mask=inside & notes)
            held = tl.broadcast_to(comes[None, :], (KV_HEADS_P, BLOCK)).to(tl.uint8)
            tl.store(holds + new + column[None, :], held, mask=both & notes)
        if state is not None:
            x = tl.where(comes, fresh, 0.0)
            x = tl.broadcast_to(x[None, :], (KV_HEADS_P, BLOCK))
            tl.store(later + new_number + column[None, :], x, mask=both)
    seen = 0
    for first in range(0, before, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = real & (column < before)[None, :]
        stays = tl.load(kept + old + column[None, :], mask=inside, other=0).to(tl.int32)
        if columns is None:
            some = tl.max(stays, 0)
        else:
            chosen = columns + layer * before + column
            some = tl.load(chosen, mask=column < before, other=0).to(tl.int32)
        target = start + seen + tl.cumsum(some) - some
        both = real & (some > 0)[None, :]
        if positions is not None:
            own = tl.load(positions + layer * before + column, mask=some > 0, other=0)
            tl.store(made + layer * width + target, own, mask=(some > 0) & notes)
            tl.store(holds + new + target[None, :], stays.to(tl.uint8), mask=both & notes)
        if state is not None:
            x = tl.load(state + old_number + column[None, :], mask=both, other=0.0)
            tl.store(later + new_number + target[None, :], x, mask=both)
        seen += tl.sum(some)
