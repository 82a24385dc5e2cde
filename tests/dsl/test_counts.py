"""Rounding, shares, clusters and hash, common to all executions, beside definition.py."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from definition import cascade, single, snapped, split
from hypothesis import example, given
from hypothesis import strategies as st
from kvpolicy.dsl.data.arrays import snapped as snapped_array
from kvpolicy.dsl.execute.tensors.values import snapped as snapped_tensor
from kvpolicy.dsl.ir import counts
from kvpolicy.dsl.ir.split import cascade_layers, split_layers
from kvpolicy.dsl.ops.host import snap
from trees import NEAR_HALVES

finite = NEAR_HALVES | st.floats(allow_nan=False, allow_infinity=False)
rationals = st.builds(Fraction, st.integers(-150, 900), st.sampled_from([1, 2, 3, 7]))
weights = st.lists(rationals | st.integers(0, 5), min_size=1, max_size=9)


@given(finite)
@example(1.7e308)
@example(0.5 + 2.0**-32)
@example(-(2.0**-32))
def test_snap(x):
    expected = float(snapped(x))
    assert snap(x) == expected
    assert snapped_array(np.array([x]))[0] == expected
    assert snapped_tensor(torch.tensor([x], dtype=torch.float64)).item() == expected


@given(finite | rationals, st.integers(0, 2**40))
def test_counts(x, most):
    """Floored, and clamped from 0 to the number of entries."""
    exact = x if isinstance(x, Fraction) else snapped(x)
    assert counts.whole(x, most) == min(most, max(0, math.floor(exact)))
    assert counts.floored(x) == math.floor(exact)


@given(finite | rationals | st.integers(-3, 12), st.integers(1, 9))
def test_places(x, size):
    exact = snapped(x) if isinstance(x, float) else Fraction(x)
    assert counts.index(x, size) == next((i for i in range(size) if i == exact), None)


@pytest.mark.parametrize("x", [math.inf, -math.inf, math.nan])
def test_what_is_no_number(x):
    assert counts.whole(x, 7) == (7 if x == math.inf else 0)
    assert counts.index(x, 7) is None
    assert counts.seed(x) == 0


@given(weights, st.integers(-3, 300) | rationals, st.lists(rationals, min_size=9, max_size=9))
def test_shares_of_rationals(shares, total, maxima):
    limits = maxima[: len(shares)]
    assert split_layers(total, shares) == split(total, shares)
    assert split_layers(total, shares, limits) == split(total, shares, limits)
    assert cascade_layers(total, shares) == cascade(total, shares)
    assert cascade_layers(total, shares, limits) == cascade(total, shares, limits)


@given(
    st.lists(st.floats(-1, 1e6), min_size=1, max_size=9),
    st.integers(0, 300).map(float) | NEAR_HALVES.filter(lambda x: x < 1e4),
    st.lists(NEAR_HALVES, min_size=9, max_size=9),
    st.booleans(),
)
@example([1.0, 2.0], 7 - 2.0**-34, [9 - 2.0**-34] * 9, False)
def test_shares_of_computed_numbers(shares, total, maxima, cascades):
    """Weights decide who gets the odd entries, so they are rounded; total and maxima count."""
    rounded = [Fraction(single(share)) for share in shares]
    limits = maxima[: len(shares)]
    divide = cascade if cascades else split
    expected = divide(snapped(total), rounded, [snapped(limit) for limit in limits])
    assert counts.split(total, shares, limits, cascade=cascades) == expected
    expected = divide(snapped(total), rounded)
    assert counts.split(total, shares, None, cascade=cascades) == expected


def spread(values: list[Fraction]) -> Fraction:
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values)


def least_spread(values: list[int], k: int) -> Fraction:
    """The least sum of squared distances to means, over all cuts of the sorted values in k."""
    x = [Fraction(value) for value in sorted(values)]
    found = []
    for cuts in combinations(range(1, len(x)), k - 1):
        ends = [0, *cuts, len(x)]
        found.append(sum(spread(x[first:end]) for first, end in pairwise(ends)))
    return min(found)


@given(st.lists(st.integers(-300, 300), min_size=1, max_size=7), st.integers(1, 8))
def test_clusters(values, k):
    labels = counts.cluster([value / 4 for value in values], k)
    groups = [[x for x, own in zip(values, labels, strict=True) if own == i] for i in range(k)]
    used = [group for group in groups if group]
    total = sum(spread([Fraction(x) for x in group]) for group in used)
    assert total == least_spread(values, min(k, len(values)))
    means = [sum(group) / len(group) for group in used]
    assert means == sorted(means)  # label 0 has the lowest


def mixed(seed: int, *parts: int) -> int:
    """The hash in Python's integers."""
    state = seed % 2**32
    for part in parts:
        state = (state + 0x9E3779B9 * (part + 1)) % 2**32
        state = ((state ^ state >> 16) * 0x21F0AAAD) % 2**32
        state = ((state ^ state >> 15) * 0x735A2D97) % 2**32
        state ^= state >> 15
    return state


@given(
    st.integers(-(2**63), 2**63), st.integers(0, 200), st.integers(0, 200),
    st.integers(0, 2**31 - 2), st.integers(0, 2**31 - 2),
)  # fmt: skip
def test_the_hash_leaves_no_int64(seed, layer, kv, token, generated):
    expected = mixed(seed, layer, kv, token, generated)
    for array in (np.array, torch.tensor):
        places = [array([number]) for number in (kv, token)]
        assert counts.hashed(seed, layer, *places, generated).tolist() == [expected]


@given(NEAR_HALVES | rationals)
def test_seeds(x):
    exact = x if isinstance(x, Fraction) else snapped(x)
    assert counts.seed(x) == math.floor(exact)
