"""Division of a total among the layers: the meaning of `split[layer]`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from kvpolicy.dsl.ops.host import Number

MOST = 2**62  # stands for infinity: more entries than any cache holds


def split_layers(
    total: Number, weights: Sequence[Number], maxima: Sequence[Number] | None = None
) -> list[int]:
    """Whole numbers for L layers that add up to floor(total), in proportion to the weights.

    Shares are computed exactly and floored. What exceeds a layer's maximum is poured equally over
    the layers below theirs, then what is still missing; where it does not divide, the earliest
    layers get one more. Both are repeated until everything is placed or every layer is full.

    Args:
        total: what to divide; floored, and 0 if negative; at most MOST.
        weights: [L]; negative ones and NaN count as 0. All 0: equal shares. Infinite ones share
            everything equally.
        maxima: [L] most that each layer takes, floored; None: no limit.

    Returns:
        [L] integers, none below 0 or above its maximum.

    Source: the budgets of CAKE, https://arxiv.org/abs/2503.12491, made to terminate.
    """
    count = len(weights)
    if count == 0:
        return []
    caps = [MOST] * count if maxima is None else [_whole(maximum) for maximum in maxima]
    floored_total = _whole(total)
    shares = _floors(floored_total, weights)
    while True:
        excess = sum(max(0, share - cap) for share, cap in zip(shares, caps, strict=True))
        shares = [min(share, cap) for share, cap in zip(shares, caps, strict=True)]
        _pour(shares, caps, excess)
        missing = floored_total - sum(shares)
        poured = _pour(shares, caps, missing)
        if not poured and not excess:
            return shares
        if all(share >= cap for share, cap in zip(shares, caps, strict=True)):
            return caps


def cascade_layers(
    total: Number, weights: Sequence[Number], maxima: Sequence[Number] | None = None
) -> list[int]:
    """The least that each layer gets if the layers so far are split after every layer.

    What a layer drops when a later one claims its share does not come back. Arguments as of
    `split_layers`; the sum may be less than the total.

    Source: the cascading eviction of CAKE, https://arxiv.org/abs/2503.12491.
    """
    least = [MOST] * len(weights)
    for end in range(1, len(weights) + 1):
        shares = split_layers(total, weights[:end], None if maxima is None else maxima[:end])
        least[:end] = map(min, least[:end], shares)
    return least


def _whole(value: Number) -> int:
    """floor(value), between 0 and MOST; NaN is 0."""
    if value >= MOST:
        return MOST
    return math.floor(value) if value > 0 else 0


def _floors(total: int, weights: Sequence[Number]) -> list[int]:
    """Floors of the exact proportional shares."""
    if any(weight == math.inf for weight in weights):
        weights = [int(weight == math.inf) for weight in weights]
    exact_weights = [Fraction(weight) if weight > 0 else Fraction(0) for weight in weights]
    weight_sum = sum(exact_weights)
    if not weight_sum:
        exact_weights, weight_sum = [Fraction(1)] * len(exact_weights), Fraction(len(exact_weights))
    return [math.floor(total * weight / weight_sum) for weight in exact_weights]


def _pour(shares: list[int], caps: Sequence[int], amount: int) -> bool:
    """Adds an amount in equal parts to the layers below their maximum; whether it could."""
    open_layers = [i for i, share in enumerate(shares) if share < caps[i]]
    if amount <= 0 or not open_layers:
        return False
    part, remainder = divmod(amount, len(open_layers))
    for rank, layer in enumerate(open_layers):
        shares[layer] += part + (rank < remainder)
    return True
