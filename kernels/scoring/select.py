"""The highest keys of each row, by a rule that also decides ties."""

from __future__ import annotations

import torch
from kvpolicy.kernels.launch.arguments import check_axes, refused

# Key of an absent score, below the key of every number; it is never chosen.
ABSENT = -(2**31)


def top(keys: torch.Tensor, number: int | torch.Tensor) -> torch.Tensor:
    """Choose the `number` highest keys of each row; of equal keys the first.

    Args:
        keys: [R, n] int32 in the order of the scores; `ABSENT`, the lowest int32, where none is.
        number: int or int64 [R, 1]; below 1 nothing is chosen, from n on every present key.

    Returns:
        [R, n] bool; fewer than `number` True if fewer keys are present.

    Raises:
        ValueError: names the argument, the expected and the actual shape.
    """
    check(keys, number)
    size = keys.shape[1]
    if not size:
        return torch.zeros_like(keys, dtype=torch.bool)
    if isinstance(number, int):
        if number <= 0:
            return torch.zeros_like(keys, dtype=torch.bool)
        if number >= size:
            return keys > ABSENT
        threshold = torch.topk(keys, number, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    else:
        number = number.clamp(0, size)
        ordered = keys.sort(dim=-1, descending=True).values
        threshold = ordered.gather(-1, (number - 1).clamp(min=0))
    above, equal = keys > threshold, keys == threshold
    wanted = number - above.sum(-1, keepdim=True)
    return (above | (equal & (equal.cumsum(-1) <= wanted))) & (keys > ABSENT)


def check(keys: torch.Tensor, number: int | torch.Tensor) -> None:
    """Refuse wrong shapes and dtypes; read no values."""
    check_axes("keys", keys, torch.int32, "[R, n]")
    if isinstance(number, int):
        return
    if number.dtype != torch.int64 or number.shape != (keys.shape[0], 1):
        raise refused("number", number, f"int64 [{keys.shape[0]}, 1]")
