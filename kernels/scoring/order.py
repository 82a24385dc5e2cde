"""The order of scores: int32 keys that sort as the language orders, and ranks.

Ranking sorts. `torch.sort` is exact, stable and of linear work (a radix sort on a GPU), so that a
kernel has nothing to add there; what stands before and after it are many small steps.
"""

from __future__ import annotations

import torch
from kvpolicy.kernels.scoring import strided
from kvpolicy.kernels.scoring.select import ABSENT


def keys(x: torch.Tensor, there: torch.Tensor | None) -> torch.Tensor:
    """int32 in the order of float32, absent ones lowest.

    Args:
        x: float64; rounded to float32, -0 is 0. What it holds where `there` is false means nothing.
        there: bool, broadcasting to x; None: everything is there.

    Returns:
        The shape of x, contiguous.

    Raises:
        ValueError: names the argument, the expected and the actual value.
    """
    strided.check(x, there)
    made = (x.float() + 0.0).view(torch.int32)
    made = made ^ ((made >> 31) & 0x7FFFFFFF)
    return (made if there is None else torch.where(there, made, ABSENT)).contiguous()


def rank(keys: torch.Tensor) -> torch.Tensor:
    """1 for the highest key of each row, of equal ones for the first.

    Args:
        keys: int32 [R, n].

    Returns:
        float64 [R, n].

    Raises:
        ValueError: names the argument, the expected and the actual shape.
    """
    check_rank(keys)
    first = keys.sort(dim=-1, descending=True, stable=True).indices
    order = torch.arange(1, keys.shape[-1] + 1, dtype=torch.float64, device=keys.device)
    made = torch.empty(keys.shape, dtype=torch.float64, device=keys.device)
    return made.scatter_(-1, first, order.expand(keys.shape))


def check_rank(keys: torch.Tensor) -> None:
    """Refuses wrong shapes and dtypes; reads no values.

    Raises:
        ValueError: names the argument, the expected and the actual shape.
    """
    if keys.dtype != torch.int32 or keys.dim() != 2:
        raise ValueError(f"keys: expected int32 [R, n], got {keys.dtype} {list(keys.shape)}")
