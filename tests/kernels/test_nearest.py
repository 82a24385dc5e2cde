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
    """Places of dropped and kept entries with their numbers, from bool [G, n]."""
    there = torch.ones_like(kept) if there is None else there
    made = []
    for chosen in (there & ~kept, there & kept):
        places = (~chosen).long().argsort(dim=-1, stable=True)
        number = chosen.sum(-1)
        rest = torch.arange(places.shape[1]) >= number[:, None]
        places = places.masked_fill(rest, FAR)[:, : int(number.max()) if number.numel() else 0]
        made += [places.to(DEVICE), number.to(DEVICE)]
    return made


def random(heads, size, dim, dtype, seed, unused=0.1):
    """x [G, n, D] as it lies in a pool, with NaN where nothing is cached, and its lists."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(heads, 1, dim, generator=generator)
    x = (torch.randn(heads, size, dim, generator=generator) + common).to(dtype)
    there = torch.rand(heads, size, generator=generator) >= unused
    kept = torch.rand(heads, size, generator=generator) < 0.3
    x[~there] = torch.nan
    pool = x.transpose(0, 1).contiguous().to(DEVICE)
    return pool.transpose(0, 1), lists(kept, there)


def by_definition(x, dropped, dropped_count, kept, kept_count):
    result = torch.zeros(dropped.shape, dtype=torch.int64)
    for head in range(x.shape[0]):
        for p in range(int(dropped_count[head])):
            best, vector = -torch.inf, x[head, dropped[head, p]].double()
            for c in range(int(kept_count[head])):
                other = x[head, kept[head, c]].double()
                cosine = (vector / vector.norm()) @ (other / other.norm())
                cosine = cosine.nan_to_num(0.0).float().item()
                if cosine > best:
                    best, result[head, p] = cosine, c
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference_equals_its_definition(dtype):
    x, given = random(2, 40, 8, dtype, 0)
    x[:, 5:9] = 0  # of zero vectors every cosine is 0
    assert torch.equal(nearest.nearest(x, *given).cpu(), by_definition(x.cpu(), *given))


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
    ],
)
def test_triton_equals_the_reference(heads, size, dim, dtype):
    x, given = random(heads, size, dim, dtype, size + dim)
    expected = nearest.nearest(x, *given)
    # The interpreter's time is per operation: fewer, larger tiles.
    tiles = {"rows": 256, "columns": 256} if size > 500 and DEVICE == "cpu" else {}
    assert torch.equal(nearest_triton.nearest(x, *given, **tiles), expected)
    assert size == 1 or expected.unique().numel() > 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_of_equal_cosines_the_first(dtype):
    """Small integers: many vectors have one direction, and many are zero."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-1, 2, (2, 150, 6), generator=generator).to(dtype).to(DEVICE)
    x[:, ::7] *= 3
    x[:, ::20] = 0
    given = lists(torch.rand(2, 150, generator=generator) < 0.6)
    expected = nearest.nearest(x, *given)
    assert torch.equal(expected.cpu(), by_definition(x.cpu(), *(each.cpu() for each in given)))
    assert torch.equal(nearest_triton.nearest(x, *given, rows=16, columns=16), expected)


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
    assert (naive != expected[0]).any() or dtype == torch.bfloat16
    assert torch.equal(nearest_triton.nearest(x, *given), expected)


@pytest.mark.parametrize("columns", [16, 32])
def test_two_tiles_compete_for_a_row(columns):
    """Kept vector j is like j + 16 and like no other: with tiles of 16 both are of one lane."""
    generator = torch.Generator().manual_seed(7)
    base = torch.randn(16, 64, generator=generator)
    near = base.repeat(2, 1) * (1 + 6e-4 * torch.randn(32, 64, generator=generator))
    x = torch.cat([base * 2, near])[None].to(DEVICE)
    given = lists(torch.arange(48)[None] >= 16)
    expected = nearest.nearest(x, *given)
    assert torch.equal(expected[0] % 16, torch.arange(16, device=DEVICE))
    assert (expected >= 16).any()
    assert (expected < 16).any()
    assert torch.equal(nearest_triton.nearest(x, *given, columns=columns), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_all_cosines_are_negative(dtype):
    """What a tile holds beyond the kept ones, and what is 0 there, is no candidate."""
    generator = torch.Generator().manual_seed(8)
    x = torch.rand(2, 40, 64, generator=generator)
    kept = torch.rand(2, 40, generator=generator) < 0.4
    x = torch.where(kept[..., None], -x, x).to(dtype).to(DEVICE)
    given = lists(kept)
    assert torch.equal(nearest_triton.nearest(x, *given), nearest.nearest(x, *given))


@pytest.mark.parametrize(
    ("scale", "which"),
    [(5e37, "kept"), (5e37, "dropped"), (1e30, "all"), (1e-30, "all"), (1e-30, "kept")],
)
def test_lengths_beyond_float32(scale, which):
    """Squares of these vanish or overflow in float32; directions count all the same."""
    x, given = random(2, 63, 64, torch.bfloat16, 3, unused=0)
    x = x.contiguous()
    one = {"kept": given[2][0, 3], "dropped": given[0][0, 3], "all": slice(None)}[which]
    expected = nearest.nearest(x, *given)
    x[0, one] *= torch.tensor(scale, dtype=torch.bfloat16)
    assert torch.equal(nearest.nearest(x, *given), expected) or which == "all"
    assert torch.equal(nearest_triton.nearest(x, *given), nearest.nearest(x, *given))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_vectors_without_a_direction(value, dtype):
    """NaN and infinity in a vector make it as good as zero; it harms no other."""
    x, given = random(2, 63, 64, dtype, 4, unused=0)
    x[0, given[0][0, 2], 3] = value
    x[0, given[2][0, 5], 0] = value
    x[1, given[2][1, 0]] = 0
    expected = nearest.nearest(x, *given)
    assert expected[0, 2] == 0
    assert torch.equal(nearest_triton.nearest(x, *given), expected)


@pytest.mark.parametrize("function", BOTH)
def test_nothing_dropped_or_nothing_kept(function):
    x, _ = random(3, 20, 64, torch.bfloat16, 5, unused=0)
    kept = torch.zeros(3, 20, dtype=torch.bool)
    kept[0], kept[2, 4:9] = True, True
    given = lists(kept)
    chosen = function(x, *given)
    assert not chosen[:2].any()
    assert chosen[2].any()
    whole = torch.ones(3, 20, dtype=torch.bool)
    assert function(x, *lists(whole)).shape == (3, 0)
    assert not function(x, *lists(~whole)).any()
    none = x[:0], *(each[:0] for each in given)
    assert function(*none).shape == (0, given[0].shape[1])


@pytest.mark.parametrize("function", BOTH)
def test_arguments_are_checked(function):
    x, given = random(2, 20, 8, torch.float32, 6)
    for at, wrong, words in (
        (0, x[0], r"x: expected floats \[G, n, D\]"),
        (1, given[0].int(), r"dropped: expected int64 \[2, \*\], got torch.int32"),
        (2, given[1][:1], r"dropped_count: expected integers \[2\]"),
        (3, given[2][:1], r"kept: expected int64 \[2, \*\]"),
        (4, given[3].float(), r"kept_count: expected integers \[2\], got torch.float32"),
    ):
        arguments = [x, *given]
        arguments[at] = wrong
        with pytest.raises(ValueError, match=words):
            function(*arguments)
