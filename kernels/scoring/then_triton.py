"""Entries that stay: those already taken, then the highest scores of the rest, in one launch."""

from __future__ import annotations

import torch
from kvpolicy.kernels.scoring.best_triton import chosen
from kvpolicy.kernels.scoring.then import check


def then(
    taken: torch.Tensor,
    score: torch.Tensor,
    present: torch.Tensor | None,
    holds: torch.Tensor,
    number: torch.Tensor,
    *,
    in_all: bool,
    block: int = 1024,
) -> torch.Tensor:
    """Keep the taken entries of R lists, and of the others those with the highest scores.

    As `then.then`; the host does not wait for the device.

    Args:
        block: entries that a program reads at a time, a power of two.

    Returns:
        bool [R, M].
    """
    check(taken, score, present, holds, number)
    return chosen(taken, score, present, holds, number, in_all=in_all, block=block)
