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
        int64 [S, M'], bool [S * G, M'] and states, each float64 [S * G, C, M'].
    """
    check(kept, columns, positions, used, newest, states, fresh)
    layers, device = len(positions), kept.device
    kv_heads = len(kept) // max(layers, 1)
    padded = triton.next_power_of_2(max(kv_heads, 1))
    new_positions = torch.empty((layers, width), dtype=torch.int64, device=device)
    holds = torch.empty((len(kept), width), dtype=torch.bool, device=device)
    new_states = [
        torch.empty((*x.shape[:-1], width), dtype=torch.float64, device=device) for x in states
    ]
    stays, layer_positions = kept.contiguous().view(torch.uint8), positions.contiguous()
    collected = None if columns is None else columns.contiguous().view(torch.uint8)
    last_positions, first = newest.contiguous(), True
    for i in range(max(len(states), 1)) if layers and width else ():
        state, new_state, value = (
            (states[i], new_states[i], fresh[i]) if states else (None, None, 0.0)
        )
        low, high = struct.unpack("<ii", struct.pack("<d", value))  # Triton would pass a float32
        numbers_per_entry = 1 if state is None else state.shape[1]
        _carry[(layers, numbers_per_entry)](
            stays, collected, layer_positions if first else None, used, used.stride(0),
            last_positions, new_positions, holds.view(torch.uint8),
            None if state is None else state.contiguous(), new_state, low, high,
            kept.shape[1], width, steps, layers // len(newest),
            KV_HEADS=kv_heads, KV_HEADS_P=padded, BLOCK=block or max(2048 // padded, 16),
        )  # fmt: skip
        first = False
    return new_positions, holds, new_states


@kernel()
def _carry(
    kept, columns, positions, used, used_stride, newest, made, holds, state, later, low, high,
    before, width, steps, share,
    KV_HEADS: tl.constexpr, KV_HEADS_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Carry one layer and one number per entry; `low` and `high` are the bits of `fresh`."""
    program = tl.program_id(0)
    layer = program.to(tl.int64)
    head = tl.arange(0, KV_HEADS_P)
    real = (head < KV_HEADS)[:, None]
    old_base = ((layer * KV_HEADS + head) * before)[:, None]
    new_base = ((layer * KV_HEADS + head) * width)[:, None]
    # Several numbers per entry lie as those of several lists.
    number = (layer * KV_HEADS + head) * tl.num_programs(1) + tl.program_id(1)
    old_number, new_number = (number * before)[:, None], (number * width)[:, None]
    is_first = tl.program_id(1) == 0
    start = width - steps - tl.load(used + layer * used_stride).to(tl.int32)
    last_position = tl.load(newest + program // share)
    bits = (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)
    fresh = bits.to(tl.float64, bitcast=True)
    # Columns without a kept entry: empty ones in front, new entries at the end.
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        is_new = column >= width - steps
        inside = (column < width) & (is_new | (column < start))
        mask = real & inside[None, :]
        if positions is not None:
            new_position = tl.where(is_new, last_position - (width - 1 - column), -1)
            tl.store(made + layer * width + column, new_position, mask=inside & is_first)
            held = tl.broadcast_to(is_new[None, :], (KV_HEADS_P, BLOCK)).to(tl.uint8)
            tl.store(holds + new_base + column[None, :], held, mask=mask & is_first)
        if state is not None:
            x = tl.where(is_new, fresh, 0.0)
            x = tl.broadcast_to(x[None, :], (KV_HEADS_P, BLOCK))
            tl.store(later + new_number + column[None, :], x, mask=mask)
    count = 0
    for first in range(0, before, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = real & (column < before)[None, :]
        stays = tl.load(kept + old_base + column[None, :], mask=inside, other=0).to(tl.int32)
        if columns is None:
            collected = tl.max(stays, 0)
        else:
            address = columns + layer * before + column
            collected = tl.load(address, mask=column < before, other=0).to(tl.int32)
        target = start + count + tl.cumsum(collected) - collected
        mask = real & (collected > 0)[None, :]
        if positions is not None:
            position = tl.load(positions + layer * before + column, mask=collected > 0, other=0)
            tl.store(made + layer * width + target, position, mask=(collected > 0) & is_first)
            tl.store(holds + new_base + target[None, :], stays.to(tl.uint8), mask=mask & is_first)
        if state is not None:
            x = tl.load(state + old_number + column[None, :], mask=mask, other=0.0)
            tl.store(later + new_number + target[None, :], x, mask=mask)
        count += tl.sum(collected)
