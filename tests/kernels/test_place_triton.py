"""Writing rows into pages: Triton against the reference, bit by bit, rounding included."""

import pytest
import torch
import triton
import triton.language as tl
from kvpolicy.kernels.entries import place as reference
from kvpolicy.kernels.entries import place_triton
from kvpolicy.kernels.entries.rounding import rounded
from kvpolicy.kernels.entries.rounding_triton import rounded as rounded_in_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(a, b):
    return torch.equal(a.view(BITS[a.element_size()]), b.view(BITS[b.element_size()]))


def made(kv_heads, size, length, dtype, own, share, spare=2):
    """Arguments of `place`: a pool of NaN, rows of dtype `own`, NaN where not kept."""
    generator = torch.Generator().manual_seed(length + size)
    rows = kv_heads * (length // kv_heads + 1) + spare
    value_offset = 2 * rows * kv_heads
    entries = torch.full((2 * value_offset, size), float("nan"), dtype=dtype)
    k, v = torch.randn(2, kv_heads, length, size, generator=generator, dtype=F64)
    kept = torch.rand(kv_heads, length, generator=generator) < share
    kept[kv_heads // 2] = kv_heads == 1  # one head holds nothing, or the only one all
    k[~kept], v[~kept] = float("nan"), float("inf")
    k, v = k.to(own), v.to(own)
    pages = torch.randperm(2 * rows, generator=generator)[:rows]
    tensors = [entries, k, v, kept, pages]
    return [each.to(DEVICE) for each in tensors], value_offset


def both(arguments, value_offset, first_page=None, **knobs):
    entries, *others = arguments
    expected, got = entries.clone(), entries.clone()
    further = {"value_offset": value_offset, "first_page": first_page}
    counts = reference.place(expected, *others, **further)
    own = place_triton.place(got, *others, **further, **knobs)
    assert own.dtype == torch.int64
    assert torch.equal(own, counts)
    assert same_bits(got, expected)
    assert int((~got.isnan()).all(1).sum()) == 2 * int(others[2].sum())


CASES = [
    # kv_heads, size, length, dtype of the pool, dtype of the rows, share
    (1, 64, 0, F32, F32, 1.0),
    (2, 64, 0, F16, F16, 1.0),
    (1, 64, 1, BF16, BF16, 1.0),
    (3, 80, 63, BF16, F64, 0.5),
    (2, 96, 63, F16, F64, 1.0),
    (8, 128, 63, BF16, F32, 0.4),
    (4, 256, 63, F16, BF16, 1.0),
    (2, 128, 1000, BF16, F16, 0.02),
    (3, 64, 1000, F32, F64, 0.0),
    (8, 80, 1000, BF16, BF16, 0.5),
    (1, 64, 4097, F32, BF16, 0.3),
    (2, 96, 4097, F32, F32, 0.01),
    (3, 80, 63, E4M3, F64, 0.5),
    (8, 7, 130, E5M2, F32, 0.4),
    (2, 128, 63, E4M3, E4M3, 1.0),
]


@pytest.mark.parametrize(("kv_heads", "size", "length", "dtype", "own", "share"), CASES)
def test_equals_reference(kv_heads, size, length, dtype, own, share):
    arguments, value_offset = made(kv_heads, size, length, dtype, own, share)
    # Large tiles where there are many rows: the interpreter is slow by the program, not by the row.
    both(arguments, value_offset, tile=None if length < 1000 else 256)


def test_rows_that_do_not_lie_together():
    """Views of a pool's slots by head; one of them has to be copied first."""
    arguments, value_offset = made(2, 64, 63, BF16, BF16, 0.5)
    arguments[1] = arguments[1].transpose(0, 1).contiguous().transpose(0, 1)
    arguments[2] = arguments[2].transpose(1, 2).contiguous().transpose(1, 2)
    assert not arguments[1].is_contiguous()
    assert arguments[2].stride(2) != 1
    both(arguments, value_offset)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_lists_may_have_pages_of_their_own(dtype, share):
    (entries, k, v, kept, _), value_offset = made(3, 80, 63, BF16, F32, share)
    first_page = torch.tensor([30, 1, 60], dtype=dtype, device=DEVICE)
    pages = torch.randperm(value_offset // 3, device=DEVICE)[:81]
    arguments = [entries, k, v, kept, pages]
    both(arguments, value_offset, first_page=first_page)


def test_what_has_no_page_is_not_written():
    (entries, k, v, kept, pages), value_offset = made(2, 64, 63, F32, F32, 1.0)
    whole = entries.clone()
    reference.place(whole, k, v, kept, pages, value_offset=value_offset)
    got = entries.clone()
    place_triton.place(got, k, v, kept, pages[:11], value_offset=value_offset)
    written = (pages[:11, None] * 2 + torch.arange(2, device=DEVICE)).flatten()
    there = torch.cat([written, written + value_offset])
    assert torch.equal(got[there], whole[there])
    got[there] = float("nan")
    assert got.isnan().all()


@pytest.mark.parametrize("place", [reference.place, place_triton.place])
@pytest.mark.parametrize(
    ("where", "change", "message"),
    [
        (1, torch.zeros(2, 4, 2), r"k: expected \[2, 3, 2\], got \[2, 4, 2\]"),
        (2, torch.zeros(2, 3, 3), r"v: expected \[2, 3, 2\], got \[2, 3, 3\]"),
        (3, torch.ones(2, 3), r"kept: expected bool \[G, N\], got torch.float32 \[2, 3\]"),
        (4, torch.zeros(2, 3).long(), r"pages: expected \[P\], got \[2, 3\]"),
    ],
)
def test_wrong_arguments_are_named(place, where, change, message):
    kept = torch.ones(2, 3, dtype=torch.bool)
    k, v = torch.zeros(2, 2, 3, 2)
    arguments = [torch.zeros(64, 2), k, v, kept, torch.arange(4)]
    arguments[where] = change
    with pytest.raises(ValueError, match=message):
        place(*arguments, value_offset=16)


def test_the_pool_lies_together():
    (entries, *others), value_offset = made(2, 64, 1, F32, F32, 1.0)
    with pytest.raises(ValueError, match=r"entries: expected contiguous \[E, D\]"):
        place_triton.place(entries.t().contiguous().t(), *others, value_offset=value_offset)


@triton.jit
def _round(x, out, number, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < number
    value = tl.load(x + at, mask=inside, other=0)
    tl.store(out + at, rounded_in_kernel(value, out.dtype.element_ty), mask=inside)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("own", [F64, F32, F16, BF16])
@pytest.mark.parametrize("dtype", [F64, F32, F16, BF16])
def test_rounding(own, dtype):
    """Near the middle between two numbers, tiny, huge, and not finite."""
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(300, generator=generator).to(dtype)
    next_ = torch.nextafter(exact, torch.full_like(exact, 9e3))
    middle = (exact.double() + next_.double()) / 2
    step = 2.0 ** torch.randint(-50, 0, (300,), generator=generator).double()
    odd = torch.tensor([float("inf"), -float("inf"), 3.4e38, -7e4, 65519.0, 1e300, 0.0, -0.0])
    x = torch.cat([middle, middle * (1 + step), middle * (1 - step), exact.double() * 1e-40, odd])
    x = torch.cat([x, middle * 1e-7]).to(own).to(DEVICE)
    got = torch.empty_like(x, dtype=dtype)
    _round[(triton.cdiv(len(x), 512),)](x, got, len(x), BLOCK=512)
    assert same_bits(got, rounded(x, dtype))
    nan = torch.full((3,), float("nan"), dtype=own, device=DEVICE)
    got = torch.zeros(3, dtype=dtype, device=DEVICE)
    _round[(1,)](nan, got, 3, BLOCK=4)
    assert got.isnan().all()
