"""After a fold in place: turn kept keys where they lie, in one launch, a program per list."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from kvpolicy.kernels.entries.compact_in_place_triton import lanes_of, proceeds
from kvpolicy.kernels.entries.requests import Requests
from kvpolicy.kernels.entries.rotate_triton import _turned
from kvpolicy.kernels.entries.rounding import FLOAT8
from kvpolicy.kernels.entries.turn import check
from kvpolicy.kernels.launch.kernel import kernel


def turn(
    requests: Requests,
    kept: torch.Tensor,
    holds: torch.Tensor,
    proceed: torch.Tensor,
    inv_freq: torch.Tensor,
    *,
    interleaved: bool = False,
    tile: int | None = None,
) -> None:
    """Rotate each key that `compact_in_place` kept forward by the number of later entries dropped.

    As `turn.turn`, within the bound of `rotate_triton`.

    Args:
        tile: entries that a program turns at a time; a power of two. None: 2,048 numbers, 1,024
            of 8 bits, or 512 in float64, in all.
    """
    check(requests, kept, holds, proceed, inv_freq)
    storage, tables, rows, _, _ = requests
    layers, _, padded, kv_heads, size = storage.shape
    pairs = len(inv_freq)
    if not kept.numel() or not pairs:
        return
    tile_numbers = {torch.float64: 512, **dict.fromkeys(FLOAT8, 1024)}.get(storage.dtype, 2048)
    _turn[(len(kept),)](
        storage, tables.first_page, tables.slots_start, tables.slots, rows,
        kept.contiguous().view(torch.uint8), holds.contiguous().view(torch.uint8),
        proceed.contiguous().view(torch.uint8), inv_freq.double().contiguous(), padded,
        kept.shape[1], LAYERS=layers, KV_HEADS=kv_heads, SIZE=size, PAIRS=pairs,
        PADDED_PAIRS=triton.next_power_of_2(pairs), INTERLEAVED=interleaved,
        TILE=tile or max(tile_numbers // triton.next_power_of_2(size), 1),
        FLAGS=proceed.shape[1], FLAGS_P=lanes_of(proceed.shape[1]),
    )  # fmt: skip


@kernel(aligned=["storage"])
def _turn(
    storage, first_pages, slots_starts, slots, rows, kept, holds, proceed, inv_freq, padded, width,
    LAYERS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, PAIRS: tl.constexpr,
    PADDED_PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, TILE: tl.constexpr,
    FLAGS: tl.constexpr, FLAGS_P: tl.constexpr,
):  # fmt: skip
    """Turn the kept keys of one list."""
    list_ = tl.program_id(0)
    request = list_ // (LAYERS * KV_HEADS)
    if proceeds(proceed, request, FLAGS, FLAGS_P):
        row = tl.load(rows + request)
        first_page = tl.load(first_pages + row * LAYERS * KV_HEADS + list_ % (LAYERS * KV_HEADS))
        own_slots = slots + tl.load(slots_starts + row)
        base = list_.to(tl.int64) * width
        dropped = 0
        for start in range(0, width, TILE):
            column = start + tl.arange(0, TILE)
            held = tl.load(holds + base + column, mask=column < width, other=0).to(tl.int32)
            stays = tl.load(kept + base + column, mask=column < width, other=0).to(tl.int32)
            dropped += tl.sum(held & (1 - stays))
        pair = tl.arange(0, PADDED_PAIRS)
        first = (2 * pair if INTERLEAVED else pair)[None, :]
        second = first + (1 if INTERLEAVED else PAIRS)
        frequency = tl.load(inv_freq + pair, mask=pair < PAIRS, other=0)[None, :]
        number = 0
        for start in range(0, width, TILE):
            column = start + tl.arange(0, TILE)
            held = tl.load(holds + base + column, mask=column < width, other=0).to(tl.int32)
            stays = tl.load(kept + base + column, mask=column < width, other=0).to(tl.int32) & held
            drops = held - stays
            shift = dropped - tl.cumsum(drops)
            place = number + tl.cumsum(stays) - stays
            turns = (stays > 0) & (shift > 0)
            page = first_page + place // KV_HEADS
            slot = tl.load(own_slots + page // LAYERS, mask=turns, other=0).to(tl.int64)
            entry = ((page % LAYERS) * padded.to(tl.int64) * 2 + slot) * KV_HEADS + place % KV_HEADS
            address = storage + entry[:, None] * SIZE
            mask = turns[:, None] & (pair < PAIRS)[None, :]
            a = tl.load(address + first, mask=mask, other=0.0)
            b = tl.load(address + second, mask=mask, other=0.0)
            angle = shift.to(tl.float64)[:, None] * frequency
            new_a, new_b = _turned(a, b, angle, a.dtype)
            tl.store(address + first, new_a, mask=mask)
            tl.store(address + second, new_b, mask=mask)
            number += tl.sum(stays)
            dropped -= tl.sum(drops)
