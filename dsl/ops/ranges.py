"""Interval arithmetic: the interval of an operation's result from those of its arguments.

Absent values do not count, and what would be NaN is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from kvpolicy.dsl.ops.host import Number, snap

Interval = tuple[Number, Number]  # least and largest value
Rule = Interval | Callable[..., Interval]  # fixed, or from the arguments' intervals

ANY: Interval = (-math.inf, math.inf)
POSITIVE: Interval = (0.0, math.inf)
SHARE: Interval = (0.0, 1.0)
TURN: Interval = (-1, 1)


def product(a: Number, b: Number) -> Number:
    """The product of numbers that may be infinite; 0 times anything is 0."""
    return 0 if a == 0 or b == 0 else a * b


def _sum(a: Number, b: Number, worst: float) -> Number:
    """The sum of two ends of intervals; `worst` for opposite infinities."""
    return worst if math.isinf(a) and math.isinf(b) and a != b else a + b


def add(a: Interval, b: Interval) -> Interval:
    return (_sum(a[0], b[0], -math.inf), _sum(a[1], b[1], math.inf))


def negate(a: Interval) -> Interval:
    return (-a[1], -a[0])


def subtract(a: Interval, b: Interval) -> Interval:
    return add(a, negate(b))


def multiply(a: Interval, b: Interval) -> Interval:
    corners = [product(x, y) for x in a for y in b]
    return (min(corners), max(corners))


def divide(a: Interval, b: Interval) -> Interval:
    if b[0] > 0:
        return multiply(a, (0 if math.isinf(b[1]) else 1 / b[1], 1 / b[0]))
    return POSITIVE if a[0] >= 0 and b[0] >= 0 else ANY


def power(a: Interval, b: Interval) -> Interval:
    return POSITIVE if a[0] >= 0 else ANY


def absolute(a: Interval) -> Interval:
    return (max(0, a[0], -a[1]), max(a[1], -a[0]))


def logarithm(a: Interval) -> Interval:
    # The logarithm of a negative number counts as 0.
    high = math.log(a[1]) if 0 < a[1] < math.inf else (math.inf if a[1] > 0 else 0)
    low = math.log(a[0]) if 0 < a[0] < math.inf else -math.inf
    return (low, high if a[0] >= 0 else max(0, high))


def _to_whole(function: Callable[[Number], int]) -> Callable[[Interval], Interval]:
    """A rounding of both ends, which keeps their order."""

    def rounded(a: Interval) -> Interval:
        low, high = (x if math.isinf(x) else function(snap(x)) for x in a)
        return low, high

    return rounded


floor, ceil, nearest = _to_whole(math.floor), _to_whole(math.ceil), _to_whole(round)


def floor_divide(a: Interval, b: Interval) -> Interval:
    return floor(divide(a, b))


def minimum(a: Interval, b: Interval) -> Interval:
    return (min(a[0], b[0]), min(a[1], b[1]))


def maximum(a: Interval, b: Interval) -> Interval:
    return (max(a[0], b[0]), max(a[1], b[1]))


def either(a: Interval, b: Interval) -> Interval:
    return (min(a[0], b[0]), max(a[1], b[1]))


def first(*a: Interval) -> Interval:
    return a[0]


def last(*a: Interval) -> Interval:
    return a[-1]


def total(a: Interval) -> Interval:
    """The sum of any number of values."""
    return (0.0 if a[0] >= 0 else -math.inf, 0.0 if a[1] <= 0 else math.inf)


def with_zero(*a: Interval) -> Interval:
    """A mean of values, or of values and zeros."""
    return (min(a[0][0], 0), max(a[0][1], 0))
