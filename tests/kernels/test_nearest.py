"""The nearest kept entry: the reference against its definition, Triton against the reference."""

import pytest
import torch
from kvpolicy.kernels.merging import nearest, nearest_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# NumPy, in which the interpreter computes, warns of what the kernels handle.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
BOTH = [nearest.nearest, nearest_triton.nearest]
# Beyond every tensor: reading it would fail or give nonsense.
FAR = 2**30


def lists(kept, there=None):
    """Places of dropped entries, which of these are real, and kept entries, from bool [G, n]."""
    there = torch.ones_like(kept) if there is None else there
    dropped, kept = there & ~kept, there & kept
    number = dropped.sum(-1)
    most = int(number.max()) if number.numel() else 0
    places = (~dropped).long().argsort(dim=-1, stable=True)[:, :most]
    real = torch.arange(most) < number[:, None]
    return [each.to(DEVICE) for each in (places.masked_fill(~real, FAR), real, kept)]


def random(heads, size, dim, dtype, seed, unused=0.1):
    """x [G, n, D] as a view of a pool, NaN where nothing is cached, and its lists."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(heads, 1, dim, generator=generator)
    x = torch.randn(heads, size, dim, generator=generator) + common
    there = torch.rand(heads, size, generator=generator) >= unused
    kept = torch.rand(heads, size, generator=generator) < 0.3
    x[~there] = torch.nan
    pool = x.to(dtype).transpose(0, 1).contiguous().to(DEVICE)
    return pool.transpose(0, 1), lists(kept, there)


def by_definition(x, places, real, kept):
    result = torch.zeros(places.shape, dtype=torch.int64)
    for head, p in (real & kept.any(1, keepdim=True)).nonzero().tolist():
        best, vector = -torch.inf, x[head, places[head, p]].double()
        for c in kept[head].nonzero()[:, 0].tolist():
            other = x[head, c].double()
            cosine = (vector / vector.norm()) @ (other / other.norm())
            cosine = cosine.nan_to_num(0.0).float().item()
            if cosine > best:
                best, result[head, p] = cosine, c
    return result, real & kept.any(1, keepdim=True)


def same(made, expected):
    """Whether receivers, and which of them exist, are equal."""
    return all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(made, expected, strict=True))


def pooled(x, given):
    """The same vectors as rows of a pool."""
    heads, size, dim = x.shape
    ids = torch.randperm(heads * size, generator=torch.Generator().manual_seed(9)).to(DEVICE)
    return x.reshape(-1, dim)[ids.argsort()], *given, ids.view(heads, size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference_equals_its_definition(dtype):
    x, given = random(2, 40, 8, dtype, 0)
    x[:, 5:9] = 0  # of zero vectors every cosine is 0
    assert same(nearest.nearest(x, *given), by_definition(x, *given))


@pytest.mark.parametrize(
    ("heads", "size", "dim", "dtype"),
    [
        (1, 1, 64, torch.bfloat16),
        (2, 63, 128, torch.bfloat16),
        (2, 1000, 128, torch.bfloat16),
        (8, 63, 80, torch.float16),
        (1, 1000, 64, torch.float16),
        (2, 1000, 80, torch.float32),
        (8, 63, 64, torch.float32),
        (1, 300, 128, torch.float64),
        (1, 63, 256, torch.float32),
        (1, 4097, 64, torch.bfloat16),
        (2, 63, 80, torch.float8_e4m3fn),
        (1, 300, 128, torch.float8_e5m2),
    ],
)
def test_triton_equals_the_reference(heads, size, dim, dtype):
    x, given = random(heads, size, dim, dtype, size + dim)
    expected = nearest.nearest(x, *given)
    # The interpreter's time is per operation: fewer, larger tiles.
    tiles = {"rows": 256, "columns": 256} if size > 500 and DEVICE == "cpu" else {}
    assert same(nearest_triton.nearest(x, *given, **tiles), expected)
    assert size == 1 or expected[0].unique().numel() > 5
    if size < 500:
        for each in (nearest, nearest_triton):
            assert same(each.nearest(*pooled(x, given)), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_of_equal_cosines_the_first(dtype):
    """Small integers: many vectors share a direction, and many are zero."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-1, 2, (2, 150, 6), generator=generator).to(dtype).to(DEVICE)
    x[:, ::7] *= 3
    x[:, ::20] = 0
    given = lists(torch.rand(2, 150, generator=generator) < 0.6)
    expected = nearest.nearest(x, *given)
    assert same(expected, by_definition(x, *given))
    assert same(nearest_triton.nearest(x, *given, rows=16, columns=16), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_cosines_that_float32_sums_cannot_tell_apart(dtype):
    """Kept vectors differ in the last bits of one number: only float64 finds the nearest."""
    generator = torch.Generator().manual_seed(2)
    base = torch.randn(64, generator=generator)
    x = (base + 1e-2 * torch.randn(1, 60, 64, generator=generator)).to(dtype)
    if dtype == torch.float32:
        x[0, 30:] = base * (1 + 2e-7 * torch.randn(30, 64, generator=generator))
    x = x.to(DEVICE)
    kept = torch.zeros(1, 60, dtype=torch.bool)
    kept[:, 30:] = True
    given = lists(kept)
    expected = nearest.nearest(x, *given)
    units = torch.nn.functional.normalize(x.float(), dim=-1)
    naive = (units[0, :30] @ units[0, 30:].T).argmax(-1)
    assert (naive + 30 != expected[0][0]).any() or dtype == torch.bfloat16
    assert same(nearest_triton.nearest(x, *given), expected)


@pytest.mark.parametrize("columns", [16, 32])
def test_two_tiles_compete_for_a_row(columns):
    """Kept vectors j and j + 16 are alike and unlike others: tiles of 16 have both in one lane."""
    generator = torch.Generator().manual_seed(7)
    base = torch.randn(16, 64, generator=generator)
    near = base.repeat(2, 1) * (1 + 6e-4 * torch.randn(32, 64, generator=generator))
    x = torch.cat([base * 2, near])[None].to(DEVICE)
    given = lists(torch.arange(48)[None] >= 16)
    expected = nearest.nearest(x, *given)
    assert torch.equal(expected[0][0] % 16, torch.arange(16, device=DEVICE))
    assert (expected[0] >= 32).any()
    assert (expected[0] < 32).any()
    assert same(nearest_triton.nearest(x, *given, columns=columns), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_all_cosines_are_negative(dtype):
    """Padding of a tile, which is 0, is no candidate."""
    generator = torch.Generator().manual_seed(8)
    x = torch.rand(2, 40, 64, generator=generator)
    kept = torch.rand(2, 40, generator=generator) < 0.4
    x = torch.where(kept[..., None], -x, x).to(dtype).to(DEVICE)
    given = lists(kept)
    assert same(nearest_triton.nearest(x, *given), nearest.nearest(x, *given))


@pytest.mark.parametrize(
    ("scale", "which"),
    [(5e37, "kept"), (5e37, "dropped"), (1e30, "all"), (1e-30, "all"), (1e-30, "kept")],
)
def test_lengths_beyond_float32(scale, which):
    """Squares of these underflow or overflow in float32; directions count all the same."""
    x, given = random(2, 63, 64, torch.bfloat16, 3, unused=0)
    x = x.contiguous()
    one = {"kept": given[2][0].nonzero()[3, 0], "dropped": given[0][0, 3], "all": slice(None)}[
        which
    ]
    expected = nearest.nearest(x, *given)
    x[0, one] *= torch.tensor(scale, dtype=torch.bfloat16)
    assert same(nearest.nearest(x, *given), expected) or which == "all"
    assert same(nearest_triton.nearest(x, *given), nearest.nearest(x, *given))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_vectors_without_a_direction(value, dtype):
    """A vector with NaN or infinity counts as zero, and does not affect others."""
    x, given = random(2, 63, 64, dtype, 4, unused=0)
    x[0, given[0][0, 2], 3] = value
    first, *_, sixth = given[2][0].nonzero()[:6, 0]
    x[0, sixth, 0] = value
    x[1, given[2][1].nonzero()[0, 0]] = 0
    expected = nearest.nearest(x, *given)
    assert expected[0][0, 2] == first
    assert same(nearest_triton.nearest(x, *given), expected)


@pytest.mark.parametrize("function", BOTH)
def test_nothing_dropped_or_nothing_kept(function):
    x, _ = random(3, 20, 64, torch.bfloat16, 5, unused=0)
    kept = torch.zeros(3, 20, dtype=torch.bool)
    kept[0], kept[2, 4:9] = True, True
    given = lists(kept)
    chosen, found = function(x, *given)
    assert not chosen[:2].any()
    assert not found[:2].any()
    assert chosen[2].any()
    assert torch.equal(found[2], given[1][2])
    whole = torch.ones(3, 20, dtype=torch.bool)
    assert function(x, *lists(whole))[0].shape == (3, 0)
    assert not function(x, *lists(~whole))[1].any()
    none = x[:0], *(each[:0] for each in given)
    assert function(*none)[0].shape == (0, given[0].shape[1])


@pytest.mark.parametrize("function", BOTH)
def test_arguments_are_checked(function):
    x, given = random(2, 20, 8, torch.float32, 6)
    for at, wrong, words in (
        (0, x[0], r"x: expected floats \[G, n, D\]"),
        (1, given[0].int(), r"dropped: expected torch.int64 \[2, \d+\], got torch.int32"),
        (2, given[1][:1], r"present: expected torch.bool \[2, "),
        (3, given[2][:1], r"kept: expected torch.bool \[2, 20\]"),
    ):
        arguments = [x, *given]
        arguments[at] = wrong
        with pytest.raises(ValueError, match=words):
            function(*arguments)
    pool = pooled(x, given)
    with pytest.raises(ValueError, match=r"x: expected floats \[E, D\]"):
        function(x, *pool[1:])
    with pytest.raises(ValueError, match=r"ids: expected int64 \[G, n\]"):
        function(*pool[:-1], pool[-1].int())
