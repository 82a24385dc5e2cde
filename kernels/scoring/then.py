"""Entries of each list that stay: those already taken, then the highest scores of the rest."""

from __future__ import annotations

import torch
from kvpolicy.kernels.launch.arguments import refused
from kvpolicy.kernels.scoring.best import check_lists
from kvpolicy.kernels.scoring.order import keys
from kvpolicy.kernels.scoring.select import top
from kvpolicy.kernels.scoring.whole import whole


def then(
    taken: torch.Tensor,
    score: torch.Tensor,
    present: torch.Tensor | None,
    holds: torch.Tensor,
    number: torch.Tensor,
    *,
    in_all: bool,
) -> torch.Tensor:
    """Keep the taken entries of R lists, and of the others those with the highest scores.

    Args:
        taken: bool [R, M], entries that stay in any case; counts only where `holds` is True.
        score: float64 [R, M]; compared as float32, of equal scores the first wins; ignored where it
            is absent.
        present: bool [R, M], where a score is present; None: everywhere.
        holds: bool [R, M], columns at which each list holds an entry.
        number: float64 [N], N > 0, each for R / N consecutive lists: how many of the other entries
            to keep, as a whole number by `whole`.
        in_all: whether `number` includes the taken entries. If so, all others stay if they are no
            more than the rest of `number`, even without a score.

    Returns:
        bool [R, M], entries that stay; False where `holds` is False.

    Raises:
        ValueError: names the argument, what was expected and what was given.
    """
    check(taken, score, present, holds, number)
    limit = number.repeat_interleave(len(holds) // max(len(number), 1))
    stays, free = taken & holds, holds & ~taken
    if in_all:
        limit = (limit - stays.sum(1)).clamp(min=0)
    competing = free if present is None else free & present
    kept = stays | top(keys(score, competing), whole(limit)[:, None])
    if not in_all:
        return kept
    return kept | (holds & (free.sum(1) <= limit)[:, None])


def check(
    taken: torch.Tensor,
    score: torch.Tensor,
    present: torch.Tensor | None,
    holds: torch.Tensor,
    number: torch.Tensor,
) -> None:
    """Refuse wrong shapes and dtypes; read no tensor."""
    check_lists(holds, score, present, taken)
    fits = number.dim() == 1 and len(number) and len(holds) % len(number) == 0
    if number.dtype != torch.float64 or not fits:
        raise refused("number", number, f"float64 [N], N a part of {len(holds)}")
