"""Variances and truths over layers: Triton against the reference, and that against a stack."""

from __future__ import annotations

import math

import pytest
import torch
from kvpolicy.kernels.scoring import over_layers, over_layers_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def ranks(layers, shape, seed=0):
    """A random permutation per layer, as ranks are."""
    generator = torch.Generator().manual_seed(seed)
    size = math.prod(shape)
    made = [torch.randperm(size, generator=generator).double().view(shape) for _ in range(layers)]
    return [x.to(DEVICE) for x in made]


def truths(layers, shape, share, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.rand(shape, generator=generator) < share).to(DEVICE) for _ in range(layers)]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("layers", [1, 2, 9, over_layers_triton.MOST + 1])
@pytest.mark.parametrize("shape", [(1,), (63,), (1000,), (4097,), (2, 63), (0,)])
def test_equals_the_reference(shape, layers, masked):
    there = truths(layers, shape, 0.6) if masked else None
    values, sets = ranks(layers, shape), truths(layers, shape, 0.3, 2)
    if masked:
        values = [torch.where(own, x, math.nan) for own, x in zip(there, values, strict=True)]
    for first in {0, layers - 1}:
        # What does not count is not read either.
        given = [torch.full_like(x, math.nan) for x in values[:first]] + values[first:]
        made, expected = (
            module.var_of_layers(given, there, first)
            for module in (over_layers_triton, over_layers)
        )
        assert expected.isfinite().all()
        # Ranks are whole numbers, so that their sums are exact; squares are added in one order.
        bound = 8 * layers * 2.0**-53 * max(1, math.prod(shape)) ** 2
        assert ((made - expected).abs() <= bound).all()
        any_ = [m.any_of_layers(sets, there, first) for m in (over_layers_triton, over_layers)]
        assert any_[0].dtype == torch.bool
        assert torch.equal(*any_)


@pytest.mark.parametrize("module", [over_layers, over_layers_triton])
def test_definition(module):
    values = ranks(5, (40,))
    stacked = torch.stack(values[1:])
    wanted = stacked.var(0, correction=0)
    torch.testing.assert_close(module.var_of_layers(values, None, 1), wanted, rtol=1e-13, atol=0)
    none = [torch.zeros(40, dtype=torch.bool, device=DEVICE)] * 5
    assert not module.var_of_layers(values, none, 0).any()
    assert not module.any_of_layers([~x for x in none], none, 0).any()


def test_values_of_any_strides():
    values = [x.view(6, 7).t() for x in ranks(3, (42,))]
    torch.testing.assert_close(
        over_layers_triton.var_of_layers(values, None, 0),
        over_layers.var_of_layers(values, None, 0),
        rtol=1e-13,
        atol=0,
    )


@pytest.mark.parametrize("module", [over_layers, over_layers_triton])
def test_wrong_arguments(module):
    values = ranks(2, (3,))
    with pytest.raises(ValueError, match=r"first: expected 0 \.\. 1, got 2"):
        module.var_of_layers(values, None, 2)
    with pytest.raises(ValueError, match=r"values: expected torch.bool \[3\], got torch.float64"):
        module.any_of_layers(values, None, 0)
    with pytest.raises(ValueError, match="present: expected 2 tensors, got 1"):
        module.var_of_layers(values, truths(1, (3,), 1), 0)
