"""The order of scores: int32 keys that sort as the language orders, and ranks.

Ranking sorts with `torch.sort`, which is exact, stable and of linear work (a radix sort on a GPU):
a kernel would gain nothing there, only in the many small steps before and after it.
"""

from __future__ import annotations

import torch
from kvpolicy.kernels.launch.arguments import check_axes
from kvpolicy.kernels.scoring import strided
from kvpolicy.kernels.scoring.select import ABSENT


def keys(x: torch.Tensor, present: torch.Tensor | None) -> torch.Tensor:
    """Turn scores into int32 keys in the order of float32, absent scores lowest.

    Args:
        x: float64; rounded to float32, -0 is 0. Ignored where `present` is False.
        present: bool that broadcasts to x, where a score is present; None: everywhere.

    Returns:
        int32, the shape of x, contiguous; `ABSENT` where no score is present.

    Raises:
        ValueError: names the argument, the expected and the actual value.
    """
    strided.check(x, present)
    key = (x.float() + 0.0).view(torch.int32)
    key = key ^ ((key >> 31) & 0x7FFFFFFF)
    return (key if present is None else torch.where(present, key, ABSENT)).contiguous()


def rank(keys: torch.Tensor) -> torch.Tensor:
    """Rank the keys of each row: 1 is the highest; of equal keys the first ranks higher.

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
    result = torch.empty(keys.shape, dtype=torch.float64, device=keys.device)
    return result.scatter_(-1, first, order.expand(keys.shape))


def check_rank(keys: torch.Tensor) -> None:
    """Refuse wrong shapes and dtypes; read no values."""
    check_axes("keys", keys, torch.int32, "[R, n]")
