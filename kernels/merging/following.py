"""Entries that leave each list, and the entries that stay after each of them."""

from __future__ import annotations

import torch
from kvpolicy.kernels.launch.arguments import check_axes, refused


def following(
    kept: torch.Tensor, holds: torch.Tensor, most: int, steps: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find the leaving entries of R lists, in order, and the next S staying entries after each.

    Args:
        kept, holds: bool [R, M], entries that each list keeps and holds; `kept` counts only where
            `holds` is True.
        most: P, at least the number that leave any list, at most M.
        steps: S.

    Returns:
        int64 [R, P], columns of leaving entries, and bool [R, P], which of these exist; int64
        [R, P, S], columns of staying entries after them, and bool [R, P, S], which of these exist.
        Columns are 0 where none exists.

    Raises:
        ValueError: names the argument, what was expected and what was given.
    """
    check(kept, holds, most, steps)
    device, width = kept.device, kept.shape[1]
    leaves, stays = holds & ~kept, holds & kept
    dropped, order = ((~x).to(torch.uint8).argsort(dim=1, stable=True) for x in (leaves, stays))
    dropped = dropped[:, :most]
    present = torch.arange(most, device=device) < leaves.sum(1)[:, None]
    follower = stays.long().cumsum(1).gather(1, dropped)[..., None]
    follower = follower + torch.arange(steps, device=device)
    receivers_present = present[..., None] & (follower < stays.sum(1)[:, None, None])
    follower = follower.clamp(max=max(width - 1, 0)).flatten(1)
    receivers = order.gather(1, follower).view(receivers_present.shape)
    dropped, receivers = dropped.where(present, 0), receivers.where(receivers_present, 0)
    return dropped, present, receivers, receivers_present


def check(kept: torch.Tensor, holds: torch.Tensor, most: int, steps: int) -> None:
    """Refuse wrong shapes and dtypes; read no tensor."""
    check_axes("holds", holds, torch.bool, "[R, M]")
    if kept.dtype != torch.bool or kept.shape != holds.shape:
        raise refused("kept", kept, f"bool {list(holds.shape)}")
    if not 0 <= most <= holds.shape[1]:
        raise ValueError(f"most: expected 0 to {holds.shape[1]}, got {most}")
    if steps < 0:
        raise ValueError(f"steps: expected 0 or more, got {steps}")
