"""Exact division of a total among the layers: `split[layer]` and `cascade[layer]` of the language.

A float32 is a whole multiple of 2**-149, so shares are quotients of whole numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from kvpolicy.kernels.launch.arguments import check_axes, refused

MOST = 2**62  # more than any layer holds


def split(
    total: int, weights: torch.Tensor, maxima: torch.Tensor | int | None, *, cascade: bool = False
) -> torch.Tensor:
    """Divide a total into whole numbers for L layers, in proportion to the weights.

    Shares are floored. The excess over a layer's maximum, then what is still missing, is poured
    equally over the layers below their maxima, the odd entries to the first of these, until all is
    placed or all layers are full. The host waits for the weights.

    Args:
        total: 0 or more.
        weights: [L] float64, rounded to float32; negative ones and NaN count as 0, infinite ones
            share everything equally. All 0: equal shares.
        maxima: most that each layer takes, int64 [L] or one for all; None: no limit.
        cascade: whether to divide among the first layers after every layer, and to give each layer
            the least of its shares.

    Returns:
        [L] float64. They add up to the total, or to less if all layers are full or with `cascade`.

    Raises:
        ValueError: names the argument, the expected and the actual value.
    """
    check(total, weights, maxima)
    layers = weights.shape[0]
    host_weights = weights.float().tolist()
    if isinstance(maxima, torch.Tensor):
        most = maxima.tolist()
    else:
        most = [MOST if maxima is None else maxima] * layers
    placed = [MOST] * layers
    for end in range(1, layers + 1) if cascade else (layers,):
        stage = _divided(total, host_weights[:end], most[:end])
        placed[:end] = map(min, placed[:end], stage)
    return torch.tensor(placed, dtype=torch.float64, device=weights.device)


def check(total: int, weights: torch.Tensor, maxima: torch.Tensor | int | None) -> None:
    """Refuse wrong shapes, dtypes and totals; read no tensor."""
    if total < 0:
        raise ValueError(f"total: expected 0 or more, got {total}")
    check_axes("weights", weights, torch.float64, "[L]")
    if isinstance(maxima, torch.Tensor):
        if maxima.shape != weights.shape or maxima.dtype != torch.int64:
            raise refused("maxima", maxima, f"int64 {list(weights.shape)}")


def _divided(total: int, weights: Sequence[float], most: Sequence[int]) -> list[int]:
    """Divide once, among all the given layers."""
    whole_weights = _whole(weights)
    weight_sum = sum(whole_weights)
    placed = [total * weight // weight_sum for weight in whole_weights]
    while True:
        excess = sum(max(0, number - limit) for number, limit in zip(placed, most, strict=True))
        placed = [min(number, limit) for number, limit in zip(placed, most, strict=True)]
        placed = _poured(placed, most, excess)
        next_placed = _poured(placed, most, total - sum(placed))
        if next_placed == placed and not excess:
            return placed
        placed = next_placed
        if not _room(placed, most):
            return list(most)


def _whole(weights: Sequence[float]) -> list[int]:
    """The weights as whole numbers in the same proportion, not all 0."""
    if math.inf in weights:
        return [int(weight == math.inf) for weight in weights]
    multiples = [int(math.ldexp(weight, 149)) if weight > 0 else 0 for weight in weights]
    return multiples if any(multiples) else [1] * len(multiples)


def _room(placed: Sequence[int], most: Sequence[int]) -> list[int]:
    """Indices of the layers below their maxima."""
    return [i for i, (number, limit) in enumerate(zip(placed, most, strict=True)) if number < limit]


def _poured(placed: Sequence[int], most: Sequence[int], amount: int) -> list[int]:
    """Add an amount in equal parts to the layers below their maxima, odd entries to the first."""
    poured, room = list(placed), _room(placed, most)
    if amount > 0 and room:
        part, odd = divmod(amount, len(room))
        for rank, layer in enumerate(room):
            poured[layer] += part + (rank < odd)
    return poured
