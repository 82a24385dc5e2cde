"""Inner products and sums of two layers' vectors: Triton against the reference."""

import pytest
import torch
from kvpolicy.kernels.merging import share, share_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
EPS = 2.0**-53
CASES = [
    (1, 1, 64, torch.float32),
    (2, 63, 80, torch.bfloat16),
    (8, 20, 128, torch.float16),
    (1, 1000, 64, torch.bfloat16),
    (2, 63, 128, torch.float64),
    (2, 0, 64, torch.bfloat16),
    (2, 63, 7, torch.float8_e4m3fn),
    (3, 20, 64, torch.float8_e5m2),
]


def layers(heads, tokens, dim, dtype, seed=0):
    """`below` and `own` [G, N, D], as views of a pool."""
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randn(2, tokens, heads, dim, generator=generator).to(dtype).to(DEVICE)
    return pool.transpose(1, 2)


@pytest.mark.parametrize(("heads", "tokens", "dim", "dtype"), CASES)
def test_gram(heads, tokens, dim, dtype):
    below, own = layers(heads, tokens, dim, dtype)
    made, expected = share_triton.gram(below, own), share.gram(below, own)
    # Sums of D products in two orders.
    error = (made - expected).abs()
    assert (error <= 2 * dim * EPS * share.gram(below.double().abs(), own.double().abs())).all()
    for i, pair in enumerate(((below, below), (below, own), (own, own))):
        by_definition = torch.einsum("gnd,gnd->gn", *(x.double() for x in pair))
        assert torch.allclose(expected[i], by_definition, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("heads", "tokens", "dim", "dtype"), CASES)
def test_blend(heads, tokens, dim, dtype):
    below, own = layers(heads, tokens, dim, dtype)
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(2, heads, tokens, generator=generator, dtype=torch.float64).to(DEVICE)
    made, expected = share_triton.blend(below, own, a, b), share.blend(below, own, a, b)
    # Two products and their sum, which a GPU may round as one.
    most = share.blend(below.double().abs(), own.double().abs(), a.abs(), b.abs())
    assert ((made - expected).abs() <= 3 * EPS * most).all()
    by_definition = a[..., None] * below.double() + b[..., None] * own.double()
    assert torch.allclose(expected, by_definition, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("function", [share.blend, share_triton.blend])
def test_nan_is_nothing(function):
    """From 0 * inf, of a vector without a direction, and inf - inf."""
    below, own = torch.zeros(1, 3, 2, device=DEVICE), torch.ones(1, 3, 2, device=DEVICE)
    below[0, 1] = 1
    a = torch.full((1, 3), torch.inf, dtype=torch.float64, device=DEVICE)
    b = torch.tensor([[2.0, -torch.inf, 0.0]], dtype=torch.float64, device=DEVICE)
    assert function(below, own, a, b)[0].tolist() == [[2.0, 2.0], [0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("kernels", [share, share_triton])
def test_arguments_are_checked(kernels):
    below, own = layers(2, 5, 4, torch.float32)
    with pytest.raises(ValueError, match=r"below: expected floats \[G, N, D\]"):
        kernels.gram(below[0], own[0])
    with pytest.raises(ValueError, match=r"own: expected torch.float32 \[2, 5, 4\], got .*float16"):
        kernels.gram(below, own.half())
    weights = torch.ones(2, 5, dtype=torch.float64, device=DEVICE)
    with pytest.raises(ValueError, match=r"b: expected torch.float64 \[2, 5\], got torch.float32"):
        kernels.blend(below, own, weights, weights.float())
