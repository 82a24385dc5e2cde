"""Reading ragged lists into dense tensors, one entry at a time beside it."""

import pytest
import torch
from kvpolicy.kernels.entries.gather import gather
from kvpolicy.kernels.entries.place import place


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [3, 128])
@pytest.mark.parametrize(("kv_heads", "length"), [(1, 1), (2, 63), (3, 7), (8, 16), (2, 0)])
def test_each_entry_goes_to_its_place(dtype, size, kv_heads, length):
    generator = torch.Generator().manual_seed(length)
    there = torch.rand(kv_heads, length, generator=generator) < 0.5
    there[-1] = False  # an empty head
    lengths = there.sum(1)
    before, after = 3, 4  # entries of other requests in the same lists
    indptr = torch.cat([torch.tensor([0]), lengths.cumsum(0)]) + before
    count = int(lengths.sum())
    indices = torch.randperm(4 * kv_heads * length + 8, generator=generator)[
        : before + count + after
    ]
    keys, values = (
        torch.full((4 * kv_heads * length + 8, size), bad, dtype=dtype)
        for bad in (float("nan"), float("inf"))
    )
    own = indices[before : before + count]
    keys[own] = torch.randn(count, size, generator=generator).to(dtype)
    values[own] = torch.randn(count, size, generator=generator).to(dtype)

    k, v = gather(keys, values, indptr, indices, there)

    assert k.dtype == v.dtype == dtype
    assert k.shape == v.shape == (kv_heads, length, size)
    wanted_k, wanted_v = torch.zeros(2, kv_heads, length, size, dtype=dtype)
    for head in range(kv_heads):
        for j, candidate in enumerate(there[head].nonzero()[:, 0]):
            entry = indices[indptr[head] + j]
            wanted_k[head, candidate], wanted_v[head, candidate] = keys[entry], values[entry]
    assert torch.equal(k, wanted_k)
    assert torch.equal(v, wanted_v)


@pytest.mark.parametrize("length", [0, 1, 5])
def test_equal_lists_need_no_mask(length):
    entries = torch.arange(80.0).view(40, 2)
    indptr = torch.arange(4) * length
    indices = torch.randperm(20, generator=torch.Generator().manual_seed(0))[: 3 * length]
    everywhere = torch.ones(3, length, dtype=torch.bool)
    plain = gather(entries, entries[20:], indptr, indices)
    masked = gather(entries, entries[20:], indptr, indices, everywhere)
    for one, other in zip(plain, masked, strict=True):
        assert one.shape == (3, length, 2)
        assert torch.equal(one, other)


def test_the_result_is_a_copy():
    entries = torch.zeros(4, 2)
    k, _ = gather(entries, entries, torch.tensor([0, 2, 4]), torch.arange(4))
    k += 1
    assert not entries.any()


def test_what_was_placed_is_read_back():
    generator = torch.Generator().manual_seed(1)
    kv_heads, length, size = 3, 11, 4
    k, v = torch.randn(2, kv_heads, length, size, generator=generator)
    there = torch.rand(kv_heads, length, generator=generator) < 0.6
    pages = torch.randperm(20, generator=generator)
    entries = torch.full((120, size), float("nan"))
    counts = place(entries, k, v, there, pages, value_offset=60)
    used = (counts + kv_heads - 1) // kv_heads
    first = used.cumsum(0) - used
    indices = torch.cat(
        [
            (pages[f : f + u, None] * kv_heads + torch.arange(kv_heads)).flatten()[:n]
            for f, u, n in zip(first, used, counts, strict=True)
        ]
    )
    indptr = torch.cat([torch.tensor([0]), counts.cumsum(0)])
    got_k, got_v = gather(entries, entries[60:], indptr, indices, there)
    assert torch.equal(got_k, k.masked_fill(~there[:, :, None], 0))
    assert torch.equal(got_v, v.masked_fill(~there[:, :, None], 0))


def test_lists_that_do_not_fit_are_named():
    entries, indices = torch.zeros(8, 2), torch.arange(5)
    indptr = torch.tensor([0, 2, 5])
    with pytest.raises(ValueError, match=r"indptr: expected lists of one length, got \[2, 3\]"):
        gather(entries, entries, indptr, indices)
    with pytest.raises(ValueError, match=r"holds: expected \[2, 3\] True per KV head"):
        gather(entries, entries, indptr, indices, torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"holds: expected bool \[2, M\], got torch.bool \[3, 2\]"):
        gather(entries, entries, indptr, indices, torch.ones(3, 2, dtype=torch.bool))
