"""Entries of each list that stay: its ends, and the highest scores of the rest, up to a budget."""

from __future__ import annotations

import torch
from kvpolicy.kernels.launch.arguments import check_axes, check_tensors, refused
from kvpolicy.kernels.scoring.order import keys
from kvpolicy.kernels.scoring.select import top


def best(
    score: torch.Tensor | None,
    present: torch.Tensor | None,
    holds: torch.Tensor,
    limits: torch.Tensor,
) -> torch.Tensor:
    """Keep the first and last entries of R lists, and of the others those with the highest scores.

    Args:
        score: float64 [R, M]; compared as float32, of equal scores the first wins; ignored where it
            is absent. None: only the ends stay.
        present: bool [R, M], where a score is present; None: everywhere.
        holds: bool [R, M], columns at which each list holds an entry.
        limits: int64 [N, 3], N > 0, each row for R / N consecutive lists, no number negative: how
            many first entries, how many last ones, and the budget for all, which counts only with
            scores. A list with no more entries than its budget keeps all, even without a score; the
            ends stay even if they exceed it.

    Returns:
        bool [R, M], entries that stay; False where `holds` is False.

    Raises:
        ValueError: names the argument, what was expected and what was given.
    """
    check(score, present, holds, limits)
    first, last, budget = limits.repeat_interleave(len(holds) // max(len(limits), 1), 0).unbind(1)
    number = holds.sum(1)
    place = holds.cumsum(1) - 1
    ends = (place < first[:, None]) | (place >= (number - last)[:, None])
    ends = ends & holds
    if score is None:
        return ends
    missing = (budget - ends.sum(1)).clamp(min=0)
    free = holds & ~ends
    highest = top(keys(score, free if present is None else free & present), missing[:, None])
    fits = number - ends.sum(1) <= missing
    return ends | highest | (fits[:, None] & holds)


def check(
    score: torch.Tensor | None,
    present: torch.Tensor | None,
    holds: torch.Tensor,
    limits: torch.Tensor,
) -> None:
    """Refuse wrong shapes and dtypes; read no tensor."""
    check_lists(holds, score, present)
    fits = limits.dim() == 2 and len(limits) and len(holds) % len(limits) == 0
    if limits.dtype != torch.int64 or not fits or limits.shape[1] != 3:
        raise refused("limits", limits, f"int64 [N, 3], N a part of {len(holds)}")


def check_lists(
    holds: torch.Tensor,
    score: torch.Tensor | None,
    present: torch.Tensor | None,
    taken: torch.Tensor | None = None,
) -> None:
    """Refuse wrong shapes and dtypes of what `best` and `then` take alike; read no tensor."""
    check_axes("holds", holds, torch.bool, "[R, M]")
    arguments = (
        ("taken", taken, torch.bool, holds.shape),
        ("score", score, torch.float64, holds.shape),
        ("present", present, torch.bool, holds.shape),
    )
    check_tensors(arguments)
