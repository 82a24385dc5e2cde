"""Arithmetic that every execution shares, for computed numbers that decide.

Two executions may add the same floats in another order, so a number that should be a whole one can
come out a few units in the last place above or below it. Where a number is turned into a count
(`floor`, `ceil`, `round`, `//`, `%`, counts of `top`, budgets, the shares of `split`), values this
close to a multiple of one half are taken for it; where numbers are compared or ordered, they are
first rounded to float32. Exact rationals need neither.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kvpolicy.dsl.ir.split import MOST, cascade_layers, split_layers
from kvpolicy.dsl.ops.host import Number, snap


def whole(x: Number, most: int) -> int:
    """`floor(x)` as a count between 0 and `most`."""
    x = snap(x)
    if x >= most:
        return most
    return max(0, math.floor(x)) if x > 0 else 0


def floored(x: Number) -> Number:
    """`floor(x)`; an infinity stays what it is."""
    x = snap(x)
    return math.floor(x) if math.isfinite(x) else x


def index(x: Number, size: int) -> int | None:
    """A number as an index from 0 to `size` - 1; None if it is no such index."""
    x = snap(x)
    return int(x) if 0 <= x < size and x == int(x) else None


def ordered(x: Number) -> Number:
    """A number as it is compared: a computed one is rounded to float32."""
    if not isinstance(x, float):
        return x
    from ctypes import c_float  # slow to import, and no check needs it

    return c_float(x).value


def split(
    total: Number,
    weights: Sequence[Number],
    maxima: Sequence[Number] | None,
    *,
    cascade: bool = False,
) -> list[int]:
    """`split[layer]`, or `cascade[layer]`, of numbers that may be computed; see `ir/split.py`.

    Computed weights are rounded to float32, because they decide which layers get the odd entries.
    """
    weights = [ordered(x) for x in weights]
    caps = None if maxima is None else [whole(maximum, MOST) for maximum in maxima]
    divide = cascade_layers if cascade else split_layers
    return divide(whole(total, MOST), weights, caps)


def seed(x: Number) -> int:
    """A number as the seed of `uniform`: floored, 0 for an infinity."""
    return math.floor(snap(x)) if math.isfinite(x) else 0


def hashed(seed: int, layer: int, kv: Any, token: Any, generated: int = 0) -> Any:
    """Uniform whole numbers from 0 to 2^32 - 1, a hash that is the same in every execution.

    Args:
        seed, layer: integers.
        kv, token: int64 arrays (numpy or torch) that broadcast against each other.
        generated: number of the decode step, from 1; 0 in the prefill.
    """
    bits = 0xFFFFFFFF
    state = (seed & bits) + 0 * kv
    for part in (layer, kv, token, generated):
        # Both constants are below 2**31, so that their products with 32 bits fit into int64.
        state = (state + 0x9E3779B9 * (part + 1)) & bits
        state = ((state ^ (state >> 16)) * 0x21F0AAAD) & bits
        state = ((state ^ (state >> 15)) * 0x735A2D97) & bits
        state = state ^ (state >> 15)
    return state


def cluster(values: Sequence[Number], k: int) -> list[int]:
    """Labels of the best 1-D k-means of `values`; label 0 has the lowest mean.

    Optimal by dynamic programming over the sorted values (O(k * L^2)); of equally good partitions
    the one with larger later clusters. With fewer distinct values than `k`, some labels are unused.
    """
    order = sorted(range(len(values)), key=lambda i: (values[i], i))
    x = [float(values[i]) for i in order]
    n = len(x)
    k = max(1, min(k, n))
    sums, squares = [0.0], [0.0]
    for value in x:
        sums.append(sums[-1] + value)
        squares.append(squares[-1] + value * value)

    def spread(first: int, end: int) -> float:
        total = sums[end] - sums[first]
        return squares[end] - squares[first] - total * total / (end - first)

    best = [[0.0] + [math.inf] * n] + [[math.inf] * (n + 1) for _ in range(k)]
    cut = [[0] * (n + 1) for _ in range(k + 1)]
    for clusters in range(1, k + 1):
        for end in range(clusters, n + 1):
            for first in range(clusters - 1, end):
                cost = best[clusters - 1][first] + spread(first, end)
                if cost < best[clusters][end]:
                    best[clusters][end], cut[clusters][end] = cost, first
    labels, end = [0] * n, n
    for clusters in range(k, 0, -1):
        for i in range(cut[clusters][end], end):
            labels[order[i]] = clusters - 1
        end = cut[clusters][end]
    return labels
