"""Comparisons of a merge: the reference against its definition, Triton against the reference."""

import pytest
import torch
from kvpolicy.kernels.merging import inner_products, inner_products_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
EPS = 2.0**-53
BOTH = [inner_products.inner_products, inner_products_triton.inner_products]


def given(lists, width, dim, dtype, most):
    """Arguments: x [R, n, D], NaN where unread; zero vectors, missing receivers and pairs."""
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(lists, width, dim, generator=generator)
    x[:, ::7] = 0
    dropped, receivers = torch.randint(max(width, 1), (2, lists, most), generator=generator)
    present, receivers_present = torch.rand(2, lists, most, generator=generator) < 0.7
    receivers_present &= present
    used = torch.zeros(lists, width + 1, dtype=torch.bool)
    for at, there in ((dropped, present), (receivers, receivers_present)):
        used.scatter_(1, at.masked_fill(~there, width), True)
    x[~used[:, :width]] = torch.nan
    marks = (dropped, present, receivers, receivers_present)
    return [each.to(DEVICE) for each in (x.to(dtype), *marks)]


def pooled(x, *marks):
    """The same vectors as rows of a pool."""
    ids = torch.randperm(x[..., 0].numel(), device=DEVICE)
    return x.reshape(-1, x.shape[2])[ids.argsort()], *marks, ids.view(x.shape[:2])


@pytest.mark.parametrize(
    ("lists", "width", "dim", "dtype", "most"),
    [
        (2, 63, 80, torch.bfloat16, 21),
        (3, 40, 64, torch.float32, 16),
        (1, 9, 128, torch.float64, 40),
        (5, 20, 64, torch.float16, 1),
        (2, 20, 64, torch.float16, 0),
        (0, 20, 64, torch.bfloat16, 3),
        (2, 63, 7, torch.float8_e4m3fn, 21),
        (3, 20, 64, torch.float8_e5m2, 5),
    ],
)
def test_inner_products(lists, width, dim, dtype, most):
    own = given(lists, width, dim, dtype, most)
    x, dropped, present, receivers, receivers_present = own
    expected = inner_products.inner_products(*own)
    for head, pair in [] if not lists or not most else [(0, 0), (lists - 1, most - 1)]:
        zeros = torch.zeros(dim, dtype=torch.float64, device=DEVICE)
        one = x[head, dropped[head, pair]].double() if present[head, pair] else zeros
        other = x[head, receivers[head, pair]].double() if receivers_present[head, pair] else zeros
        sums = torch.stack([one @ one, one @ other, other @ other])
        cosine = (sums[1] / (sums[0].sqrt() * sums[2].sqrt())).nan_to_num(0.0)
        wanted = torch.cat([sums, cosine[None]])
        torch.testing.assert_close(expected[:, head, pair], wanted, rtol=1e-12, atol=1e-12)
    # Sums of D products in two orders, of numbers below 6.
    most_apart = 2 * dim * EPS * dim * 36
    for each in (
        (inner_products.inner_products, *pooled(*own)),
        (inner_products_triton.inner_products, *own),
    ):
        assert ((each[0](*each[1:]) - expected).abs() <= most_apart).all()
    by_triton = inner_products_triton.inner_products(*own)
    assert torch.equal(inner_products_triton.inner_products(*pooled(*own), block=16), by_triton)


@pytest.mark.parametrize("function", BOTH)
def test_arguments_are_checked(function):
    own = given(2, 10, 4, torch.float32, 3)
    for at, wrong, words in (
        (0, own[0][0], r"x: expected floats \[G, n, D\]"),
        (1, own[1].int(), r"dropped: expected torch.int64 \[2, 3\]"),
        (2, own[2][:, 1:], r"present: expected torch.bool \[2, 3\]"),
        (3, own[3][:1], r"receivers: expected torch.int64 \[2, 3\]"),
        (4, own[4].long(), r"receivers_present: expected torch.bool \[2, 3\]"),
    ):
        arguments = list(own)
        arguments[at] = wrong
        with pytest.raises(ValueError, match=words):
            function(*arguments)
