"""Merging: the reference against its definition, Triton against the reference."""

import pytest
import torch
from kvpolicy.kernels.merging import merge_rows, merge_rows_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
EPS = 2.0**-53
ROWS = [merge_rows.merge_rows, merge_rows_triton.merge_rows]
MASS = [merge_rows.merge_mass, merge_rows_triton.merge_mass]
MEMBERS = [merge_rows.members, merge_rows_triton.members]


def linked(receivers, tokens):
    """Offsets for ascending receivers [G, K]; receiver `tokens` means none."""
    bounds = torch.arange(tokens + 1).expand(receivers.shape[0], -1).contiguous()
    return torch.searchsorted(receivers, bounds, out_int32=True)


def random(heads, tokens, dim, dtype, links, seed, popular=0.5):
    """Arguments of `merge_rows`: a share of the links have one receiver, some have none."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    receivers = (uniform(heads, links) * (tokens + 1) * 0.7).long()
    receivers[uniform(heads, links) < popular] = tokens // 3
    receivers[uniform(heads, links) < 0.1] = tokens
    receivers = receivers.sort(-1)[0]
    # Dropped entries are the last ones; what no one refers to holds NaN.
    x = torch.randn(tokens + 9, heads, dim, generator=generator)
    x[tokens:] = torch.nan
    x = x.to(dtype)
    sources = (uniform(heads, links) * tokens).long()
    sources[receivers == tokens] = 2**30
    given = x.transpose(0, 1)[:, :tokens], sources, uniform(heads, links) - 0.3
    own, divide = uniform(heads, tokens), uniform(heads, tokens) + 0.1
    x, *links, own, divide = (
        each.to(DEVICE) for each in (*given, linked(receivers, tokens), own, divide)
    )
    return x, tuple(links), own, divide


def by_definition(x, links_of_all, own, divide):
    sources, weights, offsets = links_of_all
    result = x.double().clone()
    for head in range(x.shape[0]):
        for c in range(x.shape[1]):
            links = range(int(offsets[head, c]), int(offsets[head, c + 1]))
            total = x[head, c].double() * own[head, c]
            for each in links:
                total += x[head, sources[head, each]].double() * weights[head, each]
            by = float(divide[head, c])
            if links and by and by == by and abs(by) < torch.inf and total.isfinite().all():
                result[head, c] = total / by
    return result


def tolerance(x, links, own, divide):
    """Rounding error of two sums of n products in any order, and of the division."""
    sources, weights, offsets = links
    sizes = x.double().abs(), (sources, weights.abs(), offsets), own.abs(), divide.abs()
    number = offsets.diff().double()[..., None]
    return (2 * number + 6) * EPS * merge_rows.merge_rows(*sizes)


def test_reference_equals_its_definition():
    given = random(2, 30, 5, torch.float32, 40, 0)
    expected = by_definition(*given)
    assert not torch.equal(expected, given[0].double())
    error = (merge_rows.merge_rows(*given) - expected).abs()
    assert (error <= tolerance(*given)).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "tokens", "dim", "dtype", "links"),
    [
        (1, 1, 64, torch.float32, 1),
        (2, 63, 80, torch.bfloat16, 70),
        (8, 20, 128, torch.float16, 15),
        (1, 1000, 64, torch.bfloat16, 100),
        (2, 63, 128, torch.float64, 90),
        (1, 63, 96, torch.float32, 1000),
        (2, 63, 7, torch.float8_e4m3fn, 90),
        (3, 20, 64, torch.float8_e5m2, 15),
    ],
)
def test_triton_equals_the_reference(heads, tokens, dim, dtype, links):
    given = random(heads, tokens, dim, dtype, links, tokens + links)
    before = given[0].double()
    expected, made = merge_rows.merge_rows(*given), merge_rows_triton.merge_rows(*given)
    assert made.dtype == torch.float64
    assert ((made - expected).abs() <= tolerance(*given)).all()
    assert torch.equal(given[0].double(), before)
    (sources, weights, offsets), own = given[1:3]
    for weighs in (own, None):
        mass = merge_rows_triton.merge_mass(given[1], weighs)
        sizes = None if weighs is None else own.abs()
        total = merge_rows.merge_mass((sources, weights.abs(), offsets), sizes)
        error = (mass - merge_rows.merge_mass(given[1], weighs)).abs()
        assert (error <= 2 * (offsets.diff() + 1) * EPS * total).all()
    assert torch.equal(merge_rows_triton.members(given[1]), merge_rows.members(given[1]))


@pytest.mark.parametrize("function", ROWS)
@pytest.mark.parametrize(
    ("dtype", "most"),
    [
        (torch.float16, 65504.0),
        (torch.bfloat16, 3.3895313892515355e38),
        (torch.float32, 3.4028234663852886e38),
        (torch.float64, 1.7976931348623157e308),
        (torch.float8_e5m2, 57344.0),
    ],
)
def test_what_would_be_infinite_where_it_is_stored_stays(function, dtype, most):
    """Two receivers of one number each: the first becomes the largest one, the second larger."""
    x = torch.ones(1, 3, 2, dtype=torch.float32).to(dtype).to(DEVICE)
    weights = torch.tensor([[most, most]], dtype=torch.float64, device=DEVICE)
    sources = torch.tensor([[2, 2]], device=DEVICE)
    offsets = torch.tensor([[0, 1, 2, 2]], dtype=torch.int32, device=DEVICE)
    divide = torch.tensor([[1.0, 0.99, 1.0]], dtype=torch.float64, device=DEVICE)
    own = torch.zeros(1, 3, dtype=torch.float64, device=DEVICE)
    merged = function(x, (sources, weights, offsets), own, divide)
    assert merged[0, :, 0].tolist() == [most, 1.0, 1.0]


@pytest.mark.parametrize("function", ROWS)
def test_numbers_without_infinity_are_as_large_as_they_get(function):
    """float8_e4m3fn rounds them to its largest, see `rounded`."""
    x = torch.ones(1, 2, 2).to(torch.float8_e4m3fn).to(DEVICE)
    weights = torch.full((1, 1), 1e9, dtype=torch.float64, device=DEVICE)
    sources = torch.tensor([[1]], device=DEVICE)
    offsets = torch.tensor([[0, 1, 1]], dtype=torch.int32, device=DEVICE)
    divide = torch.ones(1, 2, dtype=torch.float64, device=DEVICE)
    merged = function(x, (sources, weights, offsets), None, divide)
    assert merged[0, :, 0].tolist() == [1e9 + 1, 1.0]


@pytest.mark.parametrize("function", ROWS)
def test_without_own_weights_and_divisor_receivers_become_means(function):
    x, (sources, _, offsets), *_ = random(2, 40, 10, torch.float32, 60, 3)
    weights = torch.rand(sources.shape, dtype=torch.float64, device=DEVICE) + 0.1
    links = (sources, weights, offsets)
    one = torch.ones(x.shape[:2], dtype=torch.float64, device=DEVICE)
    for own in (None, 2 * one):
        mass = merge_rows.merge_mass(links, own)
        expected = by_definition(x, links, one if own is None else own, mass)
        given = (x, links, one if own is None else own, mass)
        assert ((function(x, links, own, None) - expected).abs() <= tolerance(*given)).all()


def test_programs_change_no_bit():
    """Sums follow the list of links, however the work is divided."""
    given = random(2, 63, 64, torch.bfloat16, 150, 7)
    one = merge_rows_triton.merge_rows(*given)
    assert torch.equal(merge_rows_triton.merge_rows(*given, receivers=1), one)
    mass = merge_rows_triton.merge_mass(*given[1:3])
    assert torch.equal(merge_rows_triton.merge_mass(*given[1:3], receivers=3), mass)


@pytest.mark.parametrize("function", ROWS)
def test_what_stays_as_it_is(function):
    """Receivers without links, with a divisor that is none, or that would become infinite."""
    x = torch.arange(1, 15, dtype=torch.float32).reshape(1, 7, 2).to(DEVICE)
    receivers = torch.tensor([[0, 1, 2, 3, 4]])
    sources = torch.tensor([[6, 6, 6, 6, 6]], device=DEVICE)
    weights = torch.ones(1, 5, dtype=torch.float64, device=DEVICE)
    weights[0, 3] = 1e308
    own = torch.ones(1, 7, dtype=torch.float64, device=DEVICE)
    divide = torch.full((1, 7), 2.0, dtype=torch.float64, device=DEVICE)
    divide[0, :3] = torch.tensor([0.0, torch.inf, torch.nan])
    made = function(x, (sources, weights, linked(receivers, 7).to(DEVICE)), own, divide)
    expected = x.double().clone()
    expected[0, 4] = (x[0, 4] + x[0, 6]).double() / 2
    assert torch.equal(made, expected)


@pytest.mark.parametrize("function", ROWS)
def test_nothing_to_merge(function):
    x, (sources, weights, _), own, divide = random(2, 20, 64, torch.bfloat16, 12, 8)
    none = torch.zeros(2, 21, dtype=torch.int32, device=DEVICE)
    assert torch.equal(function(x, (sources, weights, none), own, divide), x.double())
    made = function(x, (sources[:, :0], weights[:, :0], none), own, divide)
    assert torch.equal(made, x.double())


@pytest.mark.parametrize("function", MASS)
def test_mass(function):
    offsets = torch.tensor([[0, 0, 3, 4]], dtype=torch.int32, device=DEVICE)
    weights = torch.tensor([[1.0, 2.0, 4.0, 8.0, 9.0]], dtype=torch.float64, device=DEVICE)
    own = torch.tensor([[0.5, 0.25, -1.0]], dtype=torch.float64, device=DEVICE)
    expected = torch.tensor([[0.5, 7.25, 7.0]], dtype=torch.float64, device=DEVICE)
    sources = torch.zeros(1, 5, dtype=torch.int64, device=DEVICE)
    links = (sources, weights, offsets)
    assert torch.equal(function(links, own), expected)
    assert function(links, None).tolist() == [[1.0, 8.0, 9.0]]
    assert torch.equal(function((sources[:, :0], weights[:, :0], 0 * offsets), own), own)


@pytest.mark.parametrize("function", MEMBERS)
def test_members(function):
    links = random(2, 300, 5, torch.float32, 40, 1)[1]
    assert torch.equal(function(links), 1 + links[2].diff().double())
    assert function((links[0][:, :0], links[1][:, :0], 0 * links[2])).eq(1).all()


@pytest.mark.parametrize("function", ROWS)
def test_arguments_are_checked(function):
    x, links, own, divide = random(2, 20, 8, torch.float32, 12, 9)
    given = [x, *links, own, divide]
    for at, wrong, words in (
        (0, x[0], r"x: expected floats \[G, n, D\]"),
        (1, links[0].int(), r"sources: expected torch.int64 \[2, 12\], got torch.int32"),
        (2, links[1].float(), r"weights: expected float64 \[G, K\]"),
        (3, links[2][:, 1:], r"offsets: expected torch.int32 \[2, 21\], got .* \[2, 20\]"),
        (4, own[:, 1:], r"own: expected torch.float64 \[2, 20\]"),
        (5, divide[:1], r"divide: expected torch.float64 \[2, 20\], got .* \[1, 20\]"),
    ):
        arguments = list(given)
        arguments[at] = wrong
        x, *links, own, divide = arguments
        with pytest.raises(ValueError, match=words):
            function(x, tuple(links), own, divide)
