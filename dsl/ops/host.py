"""Arithmetic of numbers that the host knows: exact rationals, or float64.

Infinities, `pi`, `cos`, `sin`, `acos`, `exp`, `log`, `sqrt` and irrational powers are float64.
What would be NaN is 0, and an exact number with very many digits goes on as float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

Number = Fraction | float | int

# An exact number of more bits than this goes on as float64: that bounds time, and an exact number
# can always become a float.
MAX_BITS = 1000

# Relative distance within which a computed number counts as the multiple of 1/2 next to it: far
# above the error of float64 sums, far below one entry in a million.
SNAP = 2.0**-32

# From here on every float64 is a whole number.
_ALL_WHOLE = 2.0**52


def snap(x: Number) -> Number:
    """`x`, or the multiple of 1/2 that it misses only by rounding errors."""
    if isinstance(x, Fraction | int) or not abs(x) < _ALL_WHOLE:
        return x
    nearest = round(2 * x) / 2
    return nearest if abs(x - nearest) <= SNAP * max(1.0, abs(x)) else x


def applied(operation: Callable[..., Number], args: Sequence[Any]) -> Number:
    """The result of an operation under the rules for NaN, infinities and size."""
    try:
        value = operation(*args)
    except ZeroDivisionError:
        return _by_zero(args[0])
    except OverflowError:
        value = operation(*(as_float(arg) for arg in args))
    except (ValueError, TypeError):  # outside a function's domain, or a complex power
        return Fraction(0)
    if isinstance(value, complex):
        return Fraction(0)
    if isinstance(value, float) and math.isnan(value):
        return Fraction(0)
    if isinstance(value, Fraction) and _bits(value) > MAX_BITS:
        return as_float(value)
    return value


def as_float(value: Number) -> float:
    """The nearest float64; infinite where there is none."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _by_zero(dividend: Number) -> Number:
    if dividend == 0 or dividend != dividend:
        return Fraction(0)
    return math.inf if dividend > 0 else -math.inf


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def power(base: Number, exponent: Number) -> Number:
    """`base ^ exponent`; 0 for powers of a negative base that are not whole."""
    if base == 0 and exponent < 0:
        return math.inf
    if base < 0 and math.isfinite(exponent) and exponent != math.floor(exponent):
        return Fraction(0)  # not a number
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        if _bits(base) * abs(exponent.numerator) <= 2 * MAX_BITS:
            return base**exponent.numerator
    try:
        return math.pow(as_float(base), as_float(exponent))
    except OverflowError:
        return -math.inf if base < 0 and exponent % 2 == 1 else math.inf


def _round_to(function: Callable[[Number], int]) -> Callable[[Number], Number]:
    """A rounding by which infinities stay and computed numbers are snapped first."""

    def rounded(x: Number) -> Number:
        infinite = isinstance(x, float) and math.isinf(x)
        return x if infinite else Fraction(function(snap(x)))

    return rounded


floor, ceil, nearest = _round_to(math.floor), _round_to(math.ceil), _round_to(round)


def floor_divide(a: Number, b: Number) -> Number:
    """`a // b`; the quotient of computed numbers is snapped first."""
    if isinstance(a, float) or isinstance(b, float):
        return floor(applied(lambda: as_float(a) / as_float(b), []) if b else _by_zero(a))
    return Fraction(a // b)


def modulo(a: Number, b: Number) -> Number:
    """`a % b`, by `floor_divide`; 0 for b = 0."""
    if isinstance(a, float) or isinstance(b, float):
        return a - b * floor_divide(a, b) if b else Fraction(0)
    return a % b if b else Fraction(0)


def exp(x: Number) -> float:
    """e to the power x; infinite beyond float64."""
    try:
        return math.exp(as_float(x))
    except OverflowError:
        return math.inf


def log(x: Number) -> Number:
    """Natural logarithm; 0 of a negative number, -inf of 0."""
    return math.log(x) if x > 0 else -math.inf if x == 0 else Fraction(0)


def total(values: Sequence[Any]) -> Number:
    return sum(values, Fraction(0))


def mean(values: Sequence[Any]) -> Number:
    return total(values) / len(values) if values else Fraction(0)


def variance(values: Sequence[Any]) -> Number:
    middle = mean(values)
    return mean([(value - middle) * (value - middle) for value in values])


def count(values: Sequence[Any]) -> Number:
    return Fraction(sum(1 for value in values if value is not False))
