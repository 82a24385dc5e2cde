"""Numbers of entries that each list holds and keeps, in one launch: a program per layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from kvpolicy.kernels.entries.tally import BEFORE, check
from kvpolicy.kernels.launch.kernel import kernel


def tally(
    kept: torch.Tensor,
    holds: torch.Tensor,
    finite: torch.Tensor | None,
    expected: torch.Tensor | None,
    kv_heads: int,
    *,
    block: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Count the entries of S layers with G KV heads each.

    As `tally.tally`.

    Args:
        block: entries of each list that a program reads at a time, a power of two. None: 4096 in
            all lists of a layer together, but at least 16 of each.

    Returns:
        int64 [S, 3 + 2 * G] and bool [S].
    """
    check(kept, holds, finite, expected, kv_heads)
    layers, padded = len(kept) // kv_heads, triton.next_power_of_2(kv_heads)
    numbers = torch.empty((layers, BEFORE + 2 * kv_heads), dtype=torch.int64, device=kept.device)
    good = torch.empty(layers, dtype=torch.bool, device=kept.device)
    if layers:
        _tally[(layers,)](
            kept.contiguous().view(torch.uint8), holds.contiguous().view(torch.uint8),
            None if finite is None else finite.contiguous().view(torch.uint8),
            None if expected is None else expected.contiguous(),
            numbers, good.view(torch.uint8), kept.shape[1],
            KV_HEADS=kv_heads, KV_HEADS_P=padded, FIRST=BEFORE,
            BLOCK=block or max(4096 // padded, 16),
        )  # fmt: skip
    return numbers, good


@kernel()
def _tally(
    kept, holds, finite, expected, numbers, good, width,
    KV_HEADS: tl.constexpr, KV_HEADS_P: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Count the entries of one layer."""
    layer = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, KV_HEADS_P)
    real = head < KV_HEADS
    base = ((layer * KV_HEADS + head) * width)[:, None]
    held_counts, kept_counts = tl.zeros((KV_HEADS_P,), tl.int32), tl.zeros((KV_HEADS_P,), tl.int32)
    positions, differences = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = real[:, None] & (column < width)[None, :]
        held = tl.load(holds + base + column[None, :], mask=inside, other=0).to(tl.int32)
        stays = tl.load(kept + base + column[None, :], mask=inside, other=0).to(tl.int32) & held
        any_kept = tl.max(stays, 0)
        positions += tl.sum(any_kept)
        differences += tl.sum(tl.where(inside & (stays != any_kept[None, :]), 1, 0))
        held_counts += tl.sum(held, 1)
        kept_counts += tl.sum(stays, 1)
    layer_numbers = numbers + layer * (FIRST + 2 * KV_HEADS)
    tl.store(layer_numbers, positions.to(tl.int64))
    tl.store(layer_numbers + 1, (differences == 0).to(tl.int64))
    tl.store(layer_numbers + FIRST + head, held_counts.to(tl.int64), mask=real)
    tl.store(layer_numbers + FIRST + KV_HEADS + head, kept_counts.to(tl.int64), mask=real)
    wrong = tl.full((), 0, tl.int32)
    if finite is not None:
        usable = tl.load(finite + layer * KV_HEADS + head, mask=real, other=1)
        wrong += tl.sum((usable == 0).to(tl.int32))
    tl.store(layer_numbers + 2, (wrong == 0).to(tl.int64))
    if expected is not None:
        address = expected + layer * (FIRST + 2 * KV_HEADS) + FIRST + KV_HEADS + head
        wrong += tl.sum((real & (tl.load(address, mask=real, other=0) != kept_counts)).to(tl.int32))
    tl.store(good + layer, (wrong == 0).to(tl.uint8))
