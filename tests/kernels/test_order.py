"""Sort keys and ranks: Triton against the reference, and that against Python's sort."""

from __future__ import annotations

import math

import pytest
import torch
from kvpolicy.kernels.scoring import order, order_triton
from kvpolicy.kernels.scoring.select import ABSENT

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Scores above the range of float32 become infinite.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
SIZES = [(1,), (63,), (1000,), (4097,), (3, 1000), (2, 3, 63), (2, 3, 4, 5), (0, 4), (4, 0)]


def scores(shape, seed=0):
    """Scores with many ties, of both signs."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).double() / 8


@pytest.mark.parametrize("shape", SIZES)
def test_keys_equal_the_reference(shape):
    known = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.6
    row = known.reshape(-1, shape[-1])[0] if known.numel() else torch.ones(shape[-1]) > 0
    for there in (None, known, row):
        x = scores(shape)
        if there is not None:
            x = torch.where(there, x, math.nan)
            there = there.to(DEVICE).expand(shape)
        x = x.to(DEVICE)
        assert torch.equal(order_triton.keys(x, there), order.keys(x, there))
        turned = None if there is None else there.transpose(0, -1)
        made = order_triton.keys(x.transpose(0, -1), turned)
        assert made.is_contiguous()
        assert torch.equal(made, order.keys(x, there).transpose(0, -1))


@pytest.mark.parametrize("module", [order, order_triton])
def test_keys_sort_as_the_language_orders(module):
    given = [-math.inf, -1e300, -2.0, -1e-40, -0.0, 0.0, 1e-40, 1.0, 1.0 + 1e-12, 2.0, math.inf]
    x = torch.tensor([*given, math.nan], dtype=torch.float64, device=DEVICE)
    there = torch.tensor([True] * len(given) + [False], device=DEVICE)
    *keys, absent = module.keys(x, there).tolist()
    single = torch.tensor(given).float().tolist()
    for i in range(len(given) - 1):
        assert (keys[i] < keys[i + 1]) == (single[i] < single[i + 1]), given[i : i + 2]
        assert keys[i] <= keys[i + 1]
    assert absent == ABSENT
    assert min(keys) > ABSENT


@pytest.mark.parametrize("module", [order, order_triton])
@pytest.mark.parametrize("shape", [(1, 1), (2, 63), (3, 1000), (1, 4097), (0, 5), (5, 0)])
def test_ranks(module, shape):
    keys = order.keys(scores(shape, 2).to(DEVICE), None)
    if keys.numel():
        keys[0, shape[1] // 2] = ABSENT
    made = module.rank(keys)
    assert made.dtype == torch.float64
    for row, own in zip(keys.tolist(), made.tolist(), strict=True):
        places = sorted(range(len(row)), key=lambda i: (-row[i], i))
        assert [own[i] for i in places] == list(range(1, len(row) + 1))
    assert made.shape == shape


@pytest.mark.parametrize("module", [order, order_triton])
def test_wrong_arguments(module):
    with pytest.raises(ValueError, match=r"x: expected float64, got torch.float32"):
        module.keys(torch.ones(3, device=DEVICE), None)
    with pytest.raises(ValueError, match=r"keys: expected int32 \[R, n\], got torch.int64 \[3\]"):
        module.rank(torch.ones(3, dtype=torch.int64, device=DEVICE))
