"""What stays of each list of what is taken already and, of the rest, of the best."""

from __future__ import annotations

import torch
from kvpolicy.kernels.scoring.best import check_lists
from kvpolicy.kernels.scoring.order import keys
from kvpolicy.kernels.scoring.select import top
from kvpolicy.kernels.scoring.whole import whole


def then(
    taken: torch.Tensor,
    score: torch.Tensor,
    present: torch.Tensor | None,
    there: torch.Tensor,
    number: torch.Tensor,
    *,
    in_all: bool,
) -> torch.Tensor:
    """What is taken of R lists, and of the others the highest scores.

    Args:
        taken: bool [R, M].
        score: float64 [R, M]; compared as float32, of equal ones the first; what it holds where it
            is absent means nothing.
        present: bool [R, M], where there is a score; None: everywhere.
        there: bool [R, M], the entries of each list, in order.
        number: float64 [N], of R / N lists each, one behind the other, counted as by `whole`: how
            many of the others.
        in_all: so many with those that are taken. Where the others are no more, all of them stay,
            with a score or without.

    Returns:
        bool [R, M]; false where nothing is there.

    Raises:
        ValueError: names the argument, what was expected and what was given.
    """
    check(taken, score, present, there, number)
    wanted = number.repeat_interleave(len(there) // max(len(number), 1))
    own, free = taken & there, there & ~taken
    if in_all:
        wanted = (wanted - own.sum(1)).clamp(min=0)
    competing = free if present is None else free & present
    chosen = own | top(keys(score, competing), whole(wanted)[:, None])
    if not in_all:
        return chosen
    return chosen | (there & (free.sum(1) <= wanted)[:, None])


def check(
    taken: torch.Tensor,
    score: torch.Tensor,
    present: torch.Tensor | None,
    there: torch.Tensor,
    number: torch.Tensor,
) -> None:
    """Refuses wrong shapes and dtypes; reads no tensor.

    Raises:
        ValueError: names the argument, what was expected and what was given.
    """
    check_lists(there, score, present, taken)
    fits = number.dim() == 1 and len(number) and len(there) % len(number) == 0
    if number.dtype != torch.float64 or not fits:
        raise ValueError(
            f"number: expected float64 [N], N a part of {len(there)}, "
            f"got {number.dtype} {list(number.shape)}"
        )
