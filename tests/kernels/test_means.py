"""Means over dropped entries of a layer: the reference against rationals, Triton beside it."""

from fractions import Fraction

import pytest
import torch
from kvpolicy.kernels.merging import means, means_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COLUMNS = [means.means_of_columns, means_triton.means_of_columns]
BOTH = [means.means, means_triton.means]
SIZES = [(6, 3, 700), (4, 1, 20), (2, 2, 0), (8, 4, 256), (0, 2, 5)]  # R, G, P


def given(lists, width, share=0.7):
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(lists, width, generator=generator, dtype=torch.float64)
    there = torch.rand(lists, width, generator=generator) < share
    x[~there] = torch.nan
    return x.to(DEVICE), there.to(DEVICE)


@pytest.mark.parametrize("function", BOTH)
@pytest.mark.parametrize(("lists", "kv_heads", "width"), SIZES)
def test_means_of_what_is_there(function, lists, kv_heads, width):
    x, there = given(lists, width)
    there[:kv_heads] &= lists <= kv_heads  # a layer that drops nothing, beside others
    made = function(x, there, kv_heads).tolist()
    for first in range(0, lists, kv_heads):
        own = [
            Fraction(number)
            for row, held in zip(x[first : first + kv_heads], there[first:], strict=False)
            for number in row[held].tolist()
        ]
        wanted = float(sum(own) / len(own)) if own else 0.0
        assert made[first : first + kv_heads] == pytest.approx([wanted] * kv_heads, abs=1e-14)


@pytest.mark.parametrize(("lists", "kv_heads", "width"), SIZES)
def test_means_of_columns(lists, kv_heads, width):
    x, there = given(lists, width)
    there[:kv_heads] &= lists <= kv_heads
    both = [each(x, there, kv_heads) for each in COLUMNS]
    assert torch.equal(*both)
    for each, row in enumerate(both[0].tolist()):
        first = each - each % kv_heads
        for column, made in enumerate(row):
            held = x[first : first + kv_heads, column][there[first : first + kv_heads, column]]
            wanted = float(sum(map(Fraction, held.tolist())) / len(held)) if len(held) else 0.0
            assert made == pytest.approx(wanted, abs=1e-14)


@pytest.mark.parametrize("function", BOTH)
def test_width_changes_no_bit(function):
    """Rows are longer if other lists drop more."""
    x, there = given(6, 300)
    made = function(x, there, 3)
    for more in (1, 90, 1000):
        wide = [torch.nn.functional.pad(each, (0, more)) for each in (x, there)]
        assert torch.equal(function(*wide, 3), made)
    assert torch.equal(function(x.T.contiguous().T, there.T.contiguous().T, 3), made)


@pytest.mark.parametrize("function", BOTH + COLUMNS)
def test_arguments_are_checked(function):
    x, there = given(4, 9)
    for arguments, words in (
        ((x.float(), there, 2), r"x: expected float64 \[R, P\]"),
        ((x, there[:2], 2), r"present: expected torch.bool \[4, 9\]"),
        ((x, there, 3), "kv_heads: expected a part of 4, got 3"),
    ):
        with pytest.raises(ValueError, match=words):
            function(*arguments)
