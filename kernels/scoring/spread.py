"""Means, variances and entropies of what is present, along some dimensions.

Dimensions: R rows, values that stay apart; K values of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from kvpolicy.kernels.scoring import strided


def mean(x: torch.Tensor, there: torch.Tensor | None, over: Sequence[int]) -> torch.Tensor:
    """The mean of the present values; 0 of none, and where it is NaN.

    Args:
        x: float64; what it holds where `there` is false means nothing.
        there: bool, broadcasting to x; None: everything is there.
        over: dimensions of x, at least one, each once, not negative.

    Returns:
        float64 with the other dimensions of x.

    Raises:
        ValueError: names the argument, the expected and the actual value.
    """
    check(x, there, over)
    there = _whole(x, there)
    return _usable(_sum(x, there, over) / there.sum(list(over)))


def var(x: torch.Tensor, there: torch.Tensor | None, over: Sequence[int]) -> torch.Tensor:
    """The variance of the present values, divided by their number. As `mean`."""
    check(x, there, over)
    there = _whole(x, there)
    number = there.sum(list(over), keepdim=True)
    middle = _sum(x, there, over, keepdim=True) / number
    return _usable(_sum((x - middle) ** 2, there, over) / number.sum(list(over)))


def entropy(x: torch.Tensor, there: torch.Tensor | None, over: Sequence[int]) -> torch.Tensor:
    """-sum(p log p) of the present values, p being their shares of their sum. As `mean`.

    A share, its logarithm and their product count as 0 where they are NaN, so that a 0 adds
    nothing, nor does the logarithm of a negative share.
    """
    check(x, there, over)
    there = _whole(x, there)
    total = _usable(_sum(x, there, over, keepdim=True))
    share = _usable(x / (total + 0.0))  # -0 is 0
    return -_usable(_sum(_usable(share * _usable(share.log())), there, over))


def check(x: torch.Tensor, there: torch.Tensor | None, over: Sequence[int]) -> None:
    """Refuses wrong shapes and dtypes; reads no values.

    Raises:
        ValueError: names the argument, the expected and the actual value.
    """
    strided.check(x, there)
    if not over or len(set(over)) != len(over) or not all(0 <= dim < x.dim() for dim in over):
        raise ValueError(f"over: expected dimensions 0 .. {x.dim() - 1}, got {list(over)}")


def _whole(x: torch.Tensor, there: torch.Tensor | None) -> torch.Tensor:
    if there is None:
        return torch.ones_like(x, dtype=torch.bool)
    return there.expand(x.shape)


def _sum(
    x: torch.Tensor, there: torch.Tensor, over: Sequence[int], *, keepdim: bool = False
) -> torch.Tensor:
    return torch.where(there, x, 0.0).sum(list(over), keepdim=keepdim)


def _usable(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.isnan(), 0.0, x)
