"""Means, variances and entropies: Triton against the reference, and that against its definition."""

from __future__ import annotations

import math
import re

import pytest
import torch
from kvpolicy.kernels.scoring import spread, spread_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# What is computed beside the numbers that count, and of infinities.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
EPS = 2.0**-53
INF = math.inf
NAMES = ("mean", "var", "entropy")
SIZES = [
    ((1,), [0]),
    ((63,), [0]),
    ((1000,), [0]),
    ((4097,), [0]),
    ((12000,), [0]),  # several parts
    ((8, 1000), [0, 1]),
    ((3, 4097), [0, 1]),  # several parts of what lies in two dimensions
    ((2, 4097), [1]),
    ((8, 1000), [0]),
    ((4, 3, 1000), [0, 1]),
    ((4, 3, 63), [0, 2]),
    ((9, 63), [0]),
    ((9000, 3), [0]),  # several parts of rows that lie beside each other
    ((2, 3, 4, 5, 6, 2, 3), [0, 2, 4, 6]),  # more than an address of three dimensions says
    ((5, 0), [1]),
    ((0, 5), [1]),
]


def values(shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def masks(shape):
    """Masks: None, per value, along the last dimension only, and all False."""
    chosen = values(shape, 1) < 0.6
    last = chosen.reshape(-1, shape[-1])[0] if chosen.numel() else values(shape[-1:]) < 2
    made = [None, chosen, last, torch.zeros(shape, dtype=torch.bool)]
    # The interpreter takes long for many values.
    made = made if chosen.numel() < 4000 else made[1:3]
    return [None if x is None else x.to(DEVICE) for x in made]


def poisoned(x, there):
    """x with NaN where the mask is False."""
    x = x.to(DEVICE)
    return x if there is None else torch.where(there, x, math.nan)


@pytest.mark.thorough(every=3)
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("shape", "over"), SIZES)
def test_equals_the_reference(name, shape, over):
    for there in masks(shape):
        x = poisoned(values(shape), there)
        made, expected = (getattr(each, name)(x, there, over) for each in (spread_triton, spread))
        assert made.dtype == torch.float64
        assert made.shape == expected.shape
        assert expected.isfinite().all()
        # Numbers of one sign are added in two orders. A share of an entropy and its term are wrong
        # by a few roundings each; the terms of at most K shares are below log(K).
        size = max(2, math.prod(shape[dim] for dim in over))
        bound = 4 * size * EPS * (math.log(size) + 2)
        assert ((made - expected).abs() <= bound).all()
    assert torch.equal(made, getattr(spread_triton, name)(x, there, over)), "other bits"


@pytest.mark.parametrize("module", [spread, spread_triton])
def test_definitions(module):
    x = values((3, 50))
    there = values((3, 50), 1) < 0.5
    for row in range(3):
        own = x[row, there[row]]
        share = own / own.sum()
        wanted = (own.mean(), own.var(correction=0), -(share * share.log()).sum())
        for name, number in zip(NAMES, wanted, strict=True):
            made = getattr(module, name)(x.to(DEVICE), there.to(DEVICE), [1])[row]
            assert made.item() == pytest.approx(number.item(), rel=1e-13)


@pytest.mark.parametrize("tokens", [5, 9000])
@pytest.mark.parametrize(
    ("given", "mean", "var", "entropy"),
    [
        ([0.0, 0.0], 0.0, 0.0, 0.0),
        ([-0.0, 0.0], 0.0, 0.0, 0.0),
        ([3.0, 3.0], 3.0, 0.0, math.log(2)),
        ([1.0, -1.0], 0.0, 1.0, -INF),  # a share of infinity, and one without a logarithm
        ([2.0, -1.0], 0.5, 2.25, -2 * math.log(2)),
        ([INF, 1.0], INF, 0.0, 0.0),
        ([INF, -INF], 0.0, 0.0, -INF),
        ([1e9, 1e9 + 1], 1e9 + 0.5, 0.25, math.log(2)),  # nothing cancels
    ],
)
def test_corners(tokens, given, mean, var, entropy):
    """Two present values, in one part and at both ends of several."""
    x = torch.full((tokens,), math.nan, dtype=torch.float64, device=DEVICE)
    there = torch.zeros(tokens, dtype=torch.bool, device=DEVICE)
    for at, number in zip((0, tokens - 1), given, strict=True):
        x[at], there[at] = number, True
    for name, wanted in zip(NAMES, (mean, var, entropy), strict=True):
        expected = getattr(spread, name)(x, there, [0]).item()
        assert expected == pytest.approx(wanted, rel=1e-6, abs=1e-15), name
        assert getattr(spread_triton, name)(x, there, [0]).item() == pytest.approx(
            expected, rel=1e-13, abs=1e-15
        ), name


def test_strides():
    """Expanded and transposed values, as the program has them."""
    x = values((7, 6)).to(DEVICE)
    wide = x.t()[:, None].expand(6, 4, 7)
    there = (values((6, 1, 7), 2) < 0.7).to(DEVICE).expand(6, 4, 7)
    for name in NAMES:
        for over in ([0], [1], [2], [0, 2], [1, 2], [0, 1, 2]):
            made = getattr(spread_triton, name)(wide, there, over)
            expected = getattr(spread, name)(wide, there, over)
            torch.testing.assert_close(made, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("module", [spread, spread_triton])
def test_wrong_arguments(module):
    x = torch.ones(3, 4, dtype=torch.float64, device=DEVICE)
    with pytest.raises(ValueError, match=r"x: expected float64, got torch.float32"):
        module.mean(x.float(), None, [0])
    for over in ([2], [], [0, 0]):
        with pytest.raises(
            ValueError, match=re.escape(f"over: expected dimensions 0 .. 1, got {over}")
        ):
            module.var(x, None, over)
    with pytest.raises(ValueError, match=r"present: expected bool that broadcasts to \[3, 4\]"):
        module.entropy(x, torch.ones(3, dtype=torch.bool, device=DEVICE), [0])
