"""What stays of each list: its ends, and of the rest the best, up to a budget."""

from __future__ import annotations

import torch
from kvpolicy.kernels.launch.arguments import check_tensors
from kvpolicy.kernels.scoring.order import keys
from kvpolicy.kernels.scoring.select import top


def best(
    score: torch.Tensor | None,
    present: torch.Tensor | None,
    there: torch.Tensor,
    numbers: torch.Tensor,
) -> torch.Tensor:
    """The first and last entries of R lists and of the others the highest scores.

    Args:
        score: float64 [R, M]; compared as float32, of equal ones the first; what it holds where it
            is absent means nothing. None: nothing but the ends stays.
        present: bool [R, M], where there is a score; None: everywhere.
        there: bool [R, M], the entries of each list, in order.
        numbers: int64 [N, 3], of R / N lists each, one behind the other: how many first entries,
            how many last ones, and how many in all, if scores decide. Where a list has no more
            entries than that, all of them stay, with a score or without.

    Returns:
        bool [R, M]; false where nothing is there.

    Raises:
        ValueError: names the argument, what was expected and what was given.
    """
    check(score, present, there, numbers)
    first, last, budget = numbers.repeat_interleave(len(there) // max(len(numbers), 1), 0).unbind(1)
    number = there.sum(1)
    place = there.cumsum(1) - 1
    ends = (place < first[:, None]) | (place >= (number - last)[:, None])
    ends = ends & there
    if score is None:
        return ends
    missing = (budget - ends.sum(1)).clamp(min=0)
    free = there & ~ends
    chosen = top(keys(score, free if present is None else free & present), missing[:, None])
    fits = number - ends.sum(1) <= missing
    return ends | chosen | (fits[:, None] & there)


def check(
    score: torch.Tensor | None,
    present: torch.Tensor | None,
    there: torch.Tensor,
    numbers: torch.Tensor,
) -> None:
    """Refuses wrong shapes and dtypes; reads no tensor.

    Raises:
        ValueError: names the argument, what was expected and what was given.
    """
    check_lists(there, score, present)
    whole = numbers.dim() == 2 and len(numbers) and len(there) % len(numbers) == 0
    if numbers.dtype != torch.int64 or not whole or numbers.shape[1] != 3:
        raise ValueError(
            f"numbers: expected int64 [N, 3], N a part of {len(there)}, "
            f"got {numbers.dtype} {list(numbers.shape)}"
        )


def check_lists(
    there: torch.Tensor,
    score: torch.Tensor | None,
    present: torch.Tensor | None,
    taken: torch.Tensor | None = None,
) -> None:
    """Refuses lists and what belongs to their entries, as `best` and `then` take them.

    Raises:
        ValueError: names the argument, what was expected and what was given.
    """
    if there.dtype != torch.bool or there.dim() != 2:
        raise ValueError(f"there: expected bool [R, M], got {there.dtype} {list(there.shape)}")
    given = (
        ("taken", taken, torch.bool, there.shape),
        ("score", score, torch.float64, there.shape),
        ("present", present, torch.bool, there.shape),
    )
    check_tensors(given)
