"""`split[layer]`: totals add up, maxima hold, and CAKE's roundings come out."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvpolicy.dsl.ir.split import MOST, cascade_layers, split_layers

# Shares, total, maximum and result of CAKE's own budget code (arXiv:2503.12491).
CAKE = [
    ([3.7, 3.7, 1.6], 9, 9, [4, 4, 1]),
    ([20.0, 5.0, 2.0], 27, 12, [12, 9, 6]),
    ([10.8, 0.4, 0.4, 0.4], 12, 9, [9, 2, 1, 0]),
    ([1.5, 2.5, 6.0], 10, 9, [2, 2, 6]),
    ([1.0, 0.9, 0.6], 10, 9, [5, 3, 2]),
    ([1.0, 0.9, 0.6, 0.02], 10, 9, [4, 4, 2, 0]),
]
weights = st.lists(st.fractions(0, 100) | st.floats(0, 1e6), min_size=1, max_size=12)


@pytest.mark.parametrize(("shares", "total", "most", "expected"), CAKE)
def test_cake(shares, total, most, expected):
    assert split_layers(total, shares, [most] * len(shares)) == expected


@given(weights, st.integers(0, 10_000))
def test_adds_up_and_is_proportional(shares, total):
    parts = split_layers(total, shares)
    assert sum(parts) == total
    whole = sum(map(Fraction, shares))
    for part, share in zip(parts, shares, strict=True):
        exact = total * Fraction(share) / whole if whole else Fraction(total, len(shares))
        assert math.floor(exact) <= part <= math.floor(exact) + 1


@given(weights, st.integers(0, 10_000), st.lists(st.integers(0, 2_000), min_size=12, max_size=12))
def test_maxima_hold_and_nothing_is_lost(shares, total, maxima):
    maxima = maxima[: len(shares)]
    parts = split_layers(total, shares, maxima)
    assert all(0 <= part <= most for part, most in zip(parts, maxima, strict=True))
    assert sum(parts) == min(total, sum(maxima))


@pytest.mark.parametrize(
    ("total", "shares", "maxima", "expected"),
    [
        (7, [0, 0, 0], None, [3, 2, 2]),  # no weights: equal, the odd one to the earliest
        (-3, [1, 1], None, [0, 0]),
        (Fraction(19, 2), [1, 2], None, [3, 6]),  # floored before it is divided
        (6, [math.inf, 1, math.inf], None, [3, 0, 3]),
        (6, [math.nan, 1, 1], None, [0, 3, 3]),
        (6, [-5, 1, 1], None, [0, 3, 3]),
        (math.inf, [1, 2], [5, 6], [5, 6]),
        (math.inf, [1], None, [MOST]),
        (5, [], None, []),
    ],
)
def test_corners(total, shares, maxima, expected):
    assert split_layers(total, shares, maxima) == expected


def test_a_cascade_does_not_bring_back():
    # The authors' numbers: after three layers 5, 3 and 2, after four 4, 4, 2 and 0.
    shares, maxima = [1, Fraction(9, 10), Fraction(3, 5), Fraction(1, 50)], [9] * 4
    assert split_layers(10, shares[:3], maxima[:3]) == [5, 3, 2]
    assert split_layers(10, shares, maxima) == [4, 4, 2, 0]
    assert cascade_layers(10, shares, maxima) == [4, 3, 2, 0]
    assert cascade_layers(10, [1], None) == [10]
    assert cascade_layers(10, [], None) == []


@given(weights, st.integers(0, 10_000), st.lists(st.integers(0, 2_000), min_size=12, max_size=12))
def test_a_cascade_is_never_larger(shares, total, maxima):
    maxima = maxima[: len(shares)]
    least = cascade_layers(total, shares, maxima)
    once = split_layers(total, shares, maxima)
    assert all(0 <= few <= most for few, most in zip(least, once, strict=True))
