"""Reading ragged lists into dense tensors: Triton against the reference, bit by bit."""

import pytest
import torch
from kvpolicy.kernels.entries import gather as reference
from kvpolicy.kernels.entries import gather_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def made(kv_heads, size, length, dtype, share):
    """Arguments of `gather`: lists among those of other requests, NaN outside them."""
    generator = torch.Generator().manual_seed(length + size)
    there = torch.rand(kv_heads, length, generator=generator) < share
    there[kv_heads // 2] = kv_heads == 1  # an empty head, or one that holds all
    lengths = there.sum(1)
    indptr = torch.cat([torch.tensor([0]), lengths.cumsum(0)]) + 3
    count = int(lengths.sum())
    indices = torch.randperm(2 * count + 8, generator=generator)[: 3 + count + 4]
    entries, values = torch.full((2, 2 * count + 8, size), float("nan"), dtype=dtype)
    own = indices[3 : 3 + count]
    entries[own] = torch.randn(count, size, generator=generator).to(dtype)
    values[own] = torch.randn(count, size, generator=generator).to(dtype)
    return [x.to(DEVICE) for x in (entries, values, indptr, indices, there)]


def assert_same(got, expected):
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert torch.equal(a.double(), b.double())  # NaN would not be equal


CASES = [
    # kv_heads, size, length, dtype, share
    (2, 64, 0, F32, 1.0),
    (1, 64, 1, F16, 1.0),
    (3, 80, 63, BF16, 0.5),
    (8, 256, 63, F16, 0.9),
    (4, 96, 1000, BF16, 0.05),
    (2, 128, 1000, F32, 0.0),
    (2, 80, 4097, BF16, 0.5),
    (3, 7, 63, E4M3, 0.5),
    (2, 128, 130, E5M2, 0.9),
]


@pytest.mark.parametrize(("kv_heads", "size", "length", "dtype", "share"), CASES)
@pytest.mark.parametrize("tile", [None, 256])
def test_equals_reference(kv_heads, size, length, dtype, share, tile):
    arguments = made(kv_heads, size, length, dtype, share)
    assert_same(gather_triton.gather(*arguments, tile=tile), reference.gather(*arguments))


@pytest.mark.parametrize("length", [0, 1, 63, 130])
def test_lists_of_one_length(length):
    generator = torch.Generator().manual_seed(length)
    entries, values = torch.randn(2, 400, 64, generator=generator).to(BF16).to(DEVICE)
    indices = torch.randperm(400, generator=generator)[: 3 * length].to(DEVICE)
    indptr = (torch.arange(4) * length).to(DEVICE)
    expected = reference.gather(entries, values, indptr, indices)
    assert_same(gather_triton.gather(entries, values, indptr, indices), expected)
    if length:
        # The last two lists alone: how long they are is said, not read.
        expected = reference.gather(entries, values, indptr[1:], indices)
        got = gather_triton.gather(entries, values, indptr[1:], indices, width=length)
        assert_same(got, expected)


def test_a_list_that_is_too_short_leaves_zeros():
    """If the reference raises, the next head's entries are not taken for this head's."""
    entries = torch.arange(1.0, 13.0, device=DEVICE).view(6, 2)
    indptr, indices = torch.tensor([0, 1, 4], device=DEVICE), torch.arange(4, device=DEVICE)
    there = torch.ones(2, 3, dtype=torch.bool, device=DEVICE)
    with pytest.raises(ValueError, match=r"holds: expected \[1, 3\] True per KV head, got \[3, 3"):
        reference.gather(entries, entries, indptr, indices, there)
    for mask in (there, None):
        k, v = gather_triton.gather(entries, entries, indptr, indices, mask, width=3)
        assert k.tolist() == v.tolist()
        assert k.tolist() == [[[1, 2], [0, 0], [0, 0]], [[3, 4], [5, 6], [7, 8]]]


def test_wrong_arguments_are_named():
    entries, indices = torch.zeros(6, 2), torch.arange(4)
    with pytest.raises(
        ValueError, match=r"indptr: expected int64 \[G \+ 1\], G > 0, got torch.int64 \[1\]"
    ):
        gather_triton.gather(entries, entries, torch.tensor([0]), indices)
    with pytest.raises(ValueError, match=r"values: expected \[E, 2\], got \[6, 1\]"):
        gather_triton.gather(entries, torch.zeros(6, 1), torch.tensor([0, 2, 4]), indices)
    with pytest.raises(ValueError, match=r"entries, values: expected contiguous \[E, D\]"):
        gather_triton.gather(entries, entries.T.contiguous().T, torch.tensor([0, 2, 4]), indices)
    for holds in (torch.ones(3, 2).bool(), torch.ones(2, 2)):
        with pytest.raises(ValueError, match=r"holds: expected bool \[2, M\], got torch"):
            gather_triton.gather(entries, entries, torch.tensor([0, 2, 4]), indices, holds)
