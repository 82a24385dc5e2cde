"""What stays of what is taken and, of the rest, of the best, in one launch."""

from __future__ import annotations

import torch
from kvpolicy.kernels.scoring.best_triton import chosen
from kvpolicy.kernels.scoring.then import check


def then(
    taken: torch.Tensor,
    score: torch.Tensor,
    present: torch.Tensor | None,
    there: torch.Tensor,
    number: torch.Tensor,
    *,
    in_all: bool,
    block: int = 1024,
) -> torch.Tensor:
    """What is taken of R lists, and of the others the highest scores.

    As `then.then`, without reading a number of the device.

    Args:
        block: entries that a program looks at at a time, a power of two.

    Returns:
        bool [R, M].

    Raises:
        ValueError: names the argument, what was expected and what was given.
    """
    check(taken, score, present, there, number)
    return chosen(taken, score, present, there, number, in_all=in_all, block=block)
