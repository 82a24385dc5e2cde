"""Entries that leave each list, and the entries that stay after each: one launch.

A program reads one list and notes the columns of leaving and of staying entries, and how many
entries stay before each leaving one. Then it looks up which entries follow each leaving one.
"""

from __future__ import annotations

import torch
import triton.language as tl
from kvpolicy.kernels.launch.kernel import kernel
from kvpolicy.kernels.merging.following import check


def following(
    kept: torch.Tensor,
    holds: torch.Tensor,
    most: int,
    steps: int,
    *,
    block: int = 1024,
    rows: int = 64,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find the leaving entries of R lists, in order, and the next S staying entries after each.

    As `following.following`; the host does not wait for the device. If more than `most` entries
    leave, the last ones are ignored.

    Args:
        block: entries that a program reads at a time, a power of two.
        rows: leaving entries whose followers it looks up at a time, a power of two.

    Returns:
        int64 [R, P], bool [R, P], int64 [R, P, S], bool [R, P, S].
    """
    check(kept, holds, most, steps)
    device, (lists, width) = kept.device, kept.shape
    dropped = torch.empty((lists, most), dtype=torch.int64, device=device)
    present = torch.empty((lists, most), dtype=torch.bool, device=device)
    receivers = torch.empty((lists, most, steps), dtype=torch.int64, device=device)
    receivers_present = torch.empty((lists, most, steps), dtype=torch.bool, device=device)
    if lists and most:
        # Columns of staying entries; then how many entries stay before each leaving one.
        noted = torch.empty((lists, width + most), dtype=torch.int32, device=device)
        _following[(lists,)](
            kept.contiguous().view(torch.uint8), holds.contiguous().view(torch.uint8), noted,
            dropped, present.view(torch.uint8), receivers, receivers_present.view(torch.uint8),
            width, most, steps, BLOCK=block, ROWS=rows, STEPS=16,
        )  # fmt: skip
    return dropped, present, receivers, receivers_present


@kernel()
def _following(
    kept, holds, noted, dropped, present, receivers, receivers_present, width, most, steps,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Find the entries of one list."""
    list_ = tl.program_id(0).to(tl.int64)
    kept += list_ * width
    holds += list_ * width
    order = noted + list_ * (width + most)
    stays_before = order + width
    dropped += list_ * most
    leaving_count, staying_count = 0, 0
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        held = tl.load(holds + column, mask=column < width, other=0).to(tl.int32)
        stays = tl.load(kept + column, mask=column < width, other=0).to(tl.int32) & held
        leaves = held - stays
        rank = staying_count + tl.cumsum(stays)
        place = leaving_count + tl.cumsum(leaves) - leaves
        fits = (leaves > 0) & (place < most)
        tl.store(dropped + place, column.to(tl.int64), mask=fits)
        tl.store(stays_before + place, rank, mask=fits)
        tl.store(order + rank - 1, column, mask=stays > 0)
        leaving_count += tl.sum(leaves)
        staying_count += tl.sum(stays)
    # Threads read below what others wrote above.
    tl.debug_barrier()
    for first in range(0, most, ROWS):
        row = first + tl.arange(0, ROWS)
        exists = row < leaving_count
        tl.store(present + list_ * most + row, exists.to(tl.uint8), mask=row < most)
        tl.store(dropped + row, tl.zeros([ROWS], tl.int64), mask=(row < most) & ~exists)
        first_follower = tl.load(stays_before + row, mask=(row < most) & exists, other=0)
        for start in range(0, steps, STEPS):
            step = start + tl.arange(0, STEPS)
            inside = (row < most)[:, None] & (step < steps)[None, :]
            follower = first_follower[:, None] + step[None, :]
            follows = inside & exists[:, None] & (follower < staying_count)
            receiver = tl.load(order + follower, mask=follows, other=0)
            offset = (list_ * most + row)[:, None] * steps + step[None, :]
            tl.store(receivers + offset, receiver.to(tl.int64), mask=inside)
            tl.store(receivers_present + offset, follows.to(tl.uint8), mask=inside)
