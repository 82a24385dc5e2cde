"""Means, variances and entropies of the present values, along some dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from kvpolicy.kernels.scoring import strided


def mean(x: torch.Tensor, present: torch.Tensor | None, over: Sequence[int]) -> torch.Tensor:
    """The mean of the present values; 0 of none, and where it would be NaN.

    Args:
        x: float64; ignored where `present` is False.
        present: bool that broadcasts to x, which values are present; None: all.
        over: dimensions of x, at least one, each once, not negative.

    Returns:
        float64 with the other dimensions of x.

    Raises:
        ValueError: names the argument, the expected and the actual value.
    """
    check(x, present, over)
    return _usable(_mean(x, present, over)).squeeze(tuple(over))


def var(x: torch.Tensor, present: torch.Tensor | None, over: Sequence[int]) -> torch.Tensor:
    """The population variance of the present values. As `mean`."""
    check(x, present, over)
    deviation = x - _mean(x, present, over)
    return _usable(_mean(deviation * deviation, present, over)).squeeze(tuple(over))


def entropy(x: torch.Tensor, present: torch.Tensor | None, over: Sequence[int]) -> torch.Tensor:
    """-sum(p log p) over the present values, where p are their shares of their sum. As `mean`.

    The sum, a share, its logarithm and their product count as 0 where they are NaN, so a share of 0
    or a negative one adds nothing.
    """
    check(x, present, over)
    total = _usable(_sum(x, present, over))
    share = _usable(x / (total + 0.0))  # -0 is 0
    terms = _usable(_sum(_usable(share * _usable(share.log())), present, over))
    return terms.neg_().squeeze(tuple(over))


def check(x: torch.Tensor, present: torch.Tensor | None, over: Sequence[int]) -> None:
    """Refuse wrong shapes and dtypes; read no values."""
    strided.check(x, present)
    if not over or len(set(over)) != len(over) or not all(0 <= dim < x.dim() for dim in over):
        raise ValueError(f"over: expected dimensions 0 .. {x.dim() - 1}, got {list(over)}")


def _mean(x: torch.Tensor, present: torch.Tensor | None, over: Sequence[int]) -> torch.Tensor:
    """As `mean`, but NaN of no values; the reduced dimensions stay, with size 1."""
    number: torch.Tensor | int = math.prod(x.shape[dim] for dim in over)
    if present is not None:
        present = present.expand([1] * (x.dim() - present.dim()) + list(present.shape))
        number = present.sum(tuple(over), keepdim=True)
        number = number * math.prod(x.shape[dim] for dim in over if present.shape[dim] == 1)
    return _sum(x, present, over) / number


def _sum(x: torch.Tensor, present: torch.Tensor | None, over: Sequence[int]) -> torch.Tensor:
    x = x if present is None else torch.where(present, x, 0.0)
    return x.sum(tuple(over), keepdim=True)


def _usable(x: torch.Tensor) -> torch.Tensor:
    """Replace NaN by 0, in place."""
    return x.nan_to_num_(nan=0.0, posinf=math.inf, neginf=-math.inf)
