"""Writing rows into pages against writing one at a time; rounding against exact fractions."""

from fractions import Fraction

import pytest
import torch
from kvpolicy.kernels.entries.compact_layers import compact_layers
from kvpolicy.kernels.entries.place import place
from kvpolicy.kernels.entries.rounding import rounded

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def written(entries, k, v, kept, pages, value_offset, first_page=None):
    """The entries after `place`, by definition."""
    entries = entries.clone()
    kv_heads, length = kept.shape
    page = 0
    for head in range(kv_heads):
        page = page if first_page is None else int(first_page[head])
        at = 0
        for row in range(length):
            if not kept[head, row]:
                continue
            target = int(pages[page + at // kv_heads]) * kv_heads + at % kv_heads
            entries[target] = k[head, row].to(entries.dtype)
            entries[target + value_offset] = v[head, row].to(entries.dtype)
            at += 1
        page += -(-at // kv_heads)
    return entries


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [3, 64, 128])
@pytest.mark.parametrize(("kv_heads", "length"), [(1, 1), (2, 63), (3, 9), (4, 8), (8, 17), (2, 0)])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_equals_writing_one_at_a_time(dtype, size, kv_heads, length, share):
    generator = torch.Generator().manual_seed(kv_heads * 100 + length)
    pages = kv_heads * (length // kv_heads + 1)
    value_offset = 2 * pages * kv_heads
    entries = torch.full((2 * value_offset, size), float("nan"), dtype=dtype)
    k, v = torch.randn(2, kv_heads, length, size, generator=generator)
    kept = torch.rand(kv_heads, length, generator=generator) < share
    kept[0] = False  # an empty head
    order = torch.randperm(2 * pages, generator=generator)[:pages]
    wanted = written(entries, k, v, kept, order, value_offset)
    k[~kept], v[~kept] = float("nan"), float("inf")  # must not be read

    counts = place(entries, k, v, kept, order, value_offset=value_offset)

    assert counts.tolist() == kept.sum(1).tolist()
    torch.testing.assert_close(entries, wanted, rtol=0, atol=0, equal_nan=True)
    assert int((~entries.isnan()).all(1).sum()) == 2 * int(kept.sum())


def test_full_pages_end_where_the_next_head_begins():
    entries = torch.zeros(16, 1)
    k = torch.arange(1.0, 9.0).view(2, 4, 1)
    place(
        entries,
        k,
        -k,
        torch.ones(2, 4, dtype=torch.bool),
        torch.tensor([3, 0, 1, 2]),
        value_offset=8,
    )
    assert entries[:8, 0].tolist() == [3, 4, 5, 6, 7, 8, 1, 2]
    assert entries[8:, 0].tolist() == [-3, -4, -5, -6, -7, -8, -1, -2]


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lists_may_have_pages_of_their_own(dtype, share):
    """More pages than needed, in any order; the last list ends with the last page."""
    entries = torch.full((240, 3), float("nan"))
    k, v = torch.randn(2, 3, 10, 3)
    kept = torch.rand(3, 10, generator=torch.Generator().manual_seed(1)) < share
    first_page = torch.tensor([8, 2, 16], dtype=dtype)
    pages = torch.randperm(40)[:20]
    wanted = written(entries, k, v, kept, pages, 120, first_page)
    counts = place(entries, k, v, kept, pages, value_offset=120, first_page=first_page)
    torch.testing.assert_close(entries, wanted, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(counts, kept.sum(1))
    if share == 1.0:
        message = r"pages: expected \[>= 20\], got \[19\]"
        with pytest.raises(ValueError, match=message):
            place(entries, k, v, kept, pages[:-1], value_offset=120, first_page=first_page)


@pytest.mark.parametrize("kv_heads", [1, 2, 3])
def test_lays_entries_out_as_compaction_does(kv_heads):
    generator = torch.Generator().manual_seed(kv_heads)
    length, size = 21, 5
    rows = 4 * length
    storage = torch.randn(1, 2, rows, kv_heads, size, generator=generator)
    slots = torch.randperm(2 * length, generator=generator)[:length]
    kept = torch.rand(1, kv_heads, length, generator=generator) < 0.5
    pages = 2 * length + torch.randperm(2 * length, generator=generator)
    used = (kept.sum(2) + kv_heads - 1) // kv_heads
    k, v = storage[0][:, slots].transpose(1, 2).clone()
    copies = storage.clone()
    compact_layers(copies, slots, kept, pages, used.cumsum(1) - used)
    place(storage.view(-1, size), k, v, kept[0], pages, value_offset=rows * kv_heads)
    assert torch.equal(storage, copies)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_may_hold_what_is_moved(dtype):
    """In-place compaction: all rows have been read before any is written."""
    entries = torch.arange(48).view(24, 2).to(dtype)
    k, v = entries[:12].view(2, 6, 2).clone(), entries[12:].view(2, 6, 2).clone()
    kept = torch.tensor([[0, 1, 0, 1, 1, 0], [1, 0, 0, 0, 1, 1]], dtype=torch.bool)
    place(entries, k, v, kept, torch.arange(4), value_offset=12)
    assert torch.equal(entries[[0, 1, 2]], k[0, [1, 3, 4]])
    assert torch.equal(entries[[4, 5, 6]], k[1, [0, 4, 5]])
    assert torch.equal(entries[[16, 17, 18]], v[1, [0, 4, 5]])


def test_float64_rows_are_rounded_once():
    entries = torch.zeros(4, 1, dtype=torch.bfloat16)
    row = torch.full((1, 1, 1), 1 + 2**-8 + 2**-40, dtype=torch.float64)
    kept = torch.ones(1, 1, dtype=torch.bool)
    place(entries, row, -row, kept, torch.tensor([1]), value_offset=2)
    assert entries[:, 0].tolist() == [0, 1 + 2**-7, 0, -1 - 2**-7]


def nearest(x, dtype):
    """The number of `dtype` nearest to a float64, by comparing exact fractions."""
    near = torch.tensor(x, dtype=torch.float64).to(dtype)
    around = [near, torch.nextafter(near, near * 0 - 1e4), torch.nextafter(near, near * 0 + 1e4)]
    around = [a for a in around if a.isfinite()]

    def distance(a):
        even = int(a.view(torch.int16)) % 2
        return abs(Fraction(float(a)) - Fraction(x)), even

    return min(around, key=distance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_is_to_the_nearest(dtype):
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(200, generator=generator).to(dtype).double()
    step = 2.0 ** torch.randint(-50, 0, (200,), generator=generator).double()
    halves = (exact + torch.nextafter(exact.to(dtype), torch.tensor(9e3, dtype=dtype)).double()) / 2
    # Near the middle between two numbers, where rounding twice goes wrong; tiny and zero as well.
    x = torch.cat([halves, halves * (1 + step), halves * (1 - step), halves * 1e-7, exact * 0])
    got = rounded(x, dtype)
    wanted = torch.stack([nearest(float(each), dtype) for each in x])
    assert torch.equal(got, wanted)
    assert not torch.equal(x.to(dtype), wanted)  # so the test can tell


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_rounding_keeps_what_is_not_finite(dtype):
    x = torch.tensor([float("inf"), -float("inf"), float("nan"), 1e300, -0.0], dtype=torch.float64)
    got = rounded(x, dtype)
    assert got.dtype == dtype
    assert got[:2].tolist() == [float("inf"), -float("inf")]
    assert got[2].isnan()
    assert float(got[3]) == (1e300 if dtype == torch.float64 else float("inf"))
    assert got[4].signbit()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kept": torch.ones(2, 3)}, r"kept: expected bool \[G, N\], got torch.float32 \[2, 3\]"),
        ({"k": torch.zeros(2, 4, 2)}, r"k: expected \[2, 3, 2\], got \[2, 4, 2\]"),
        ({"v": torch.zeros(2, 3, 3)}, r"v: expected \[2, 3, 2\], got \[2, 3, 3\]"),
        ({"pages": torch.arange(3)}, r"pages: expected \[>= 4\], got \[3\]"),
        ({"first_page": torch.zeros(3).long()}, r"first_page: expected \[2\], got \[3\]"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    arguments = {
        "entries": torch.zeros(64, 2),
        "k": torch.zeros(2, 3, 2),
        "v": torch.zeros(2, 3, 2),
        "kept": torch.ones(2, 3, dtype=torch.bool),
        "pages": torch.arange(4),
    } | change
    with pytest.raises(ValueError, match=message):
        place(**arguments, value_offset=16)
