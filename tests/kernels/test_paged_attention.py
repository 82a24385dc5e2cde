"""The reference of paged attention against attention written out for one query at a time."""

import math

import pytest
import torch
from kvpolicy.kernels.paged_attention import paged_attention


def lists_of(lengths, entries, generator):
    """Random disjoint lists of so many entries: indptr, indices."""
    order = torch.randperm(entries, generator=generator)
    indptr = torch.tensor([0, *lengths]).cumsum(0)
    return indptr, order[: int(indptr[-1])]


def dense(q, keys, values, indptr, indices, scale):
    """One softmax per (request, token, head), in float64."""
    requests, tokens, heads, _ = q.shape
    groups = (len(indptr) - 1) // requests
    out = torch.zeros(q.shape, dtype=torch.float64)
    for b in range(requests):
        for head in range(heads):
            at = b * groups + head // (heads // groups)
            entries = indices[indptr[at] : indptr[at + 1]]
            for t in range(tokens):
                seen = entries[: max(len(entries) - (tokens - 1 - t), 0)]
                if len(seen):
                    scores = keys[seen].double() @ q[b, t, head].double() * scale
                    out[b, t, head] = scores.softmax(0) @ values[seen].double()
    return out


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (4, 2), (4, 4), (8, 2)])
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_attention_written_out(heads, groups, tokens, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    requests, size = 3, 16
    lengths = torch.randint(tokens, 40, (requests * groups,), generator=generator).tolist()
    lengths[0] = tokens  # a list with nothing but the queries' own tokens
    indptr, indices = lists_of(lengths, 400, generator)
    keys = torch.randn(400, size, generator=generator).to(dtype)
    values = torch.randn(400, size, generator=generator).to(dtype)
    q = torch.randn(requests, tokens, heads, size, generator=generator).to(dtype)
    scale = 1 / math.sqrt(size)

    got = paged_attention(q, keys, values, indptr, indices, scale=scale)

    assert got.dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    wanted = dense(q, keys, values, indptr, indices, scale)
    torch.testing.assert_close(got.double(), wanted, atol=tolerance, rtol=tolerance)


def test_an_empty_list_gives_zero():
    keys = torch.full((4, 8), float("nan"))
    indptr = torch.zeros(3, dtype=torch.int64)
    nothing = torch.zeros(0, dtype=torch.int64)
    out = paged_attention(torch.ones(1, 1, 4, 8), keys, keys, indptr, nothing, scale=1.0)
    assert torch.equal(out, torch.zeros_like(out))


def test_nothing_outside_the_lists_is_touched():
    generator = torch.Generator().manual_seed(0)
    indptr, indices = lists_of([7, 0, 3, 12], 60, generator)
    keys, values = torch.randn(2, 60, 8, generator=generator)
    q = torch.randn(2, 1, 4, 8, generator=generator)
    wanted = paged_attention(q, keys, values, indptr, indices, scale=0.3)
    unused = torch.ones(60, dtype=torch.bool)
    unused[indices] = False
    keys[unused], values[unused] = float("nan"), float("inf")
    assert torch.equal(paged_attention(q, keys, values, indptr, indices, scale=0.3), wanted)


def test_other_requests_change_nothing():
    generator = torch.Generator().manual_seed(1)
    keys, values = torch.randn(2, 300, 8, generator=generator)
    indptr, indices = lists_of([5, 9, 40, 2, 17, 30], 300, generator)
    q = torch.randn(3, 1, 4, 8, generator=generator)
    together = paged_attention(q, keys, values, indptr, indices, scale=0.3)
    for b in range(3):
        own = indptr[2 * b : 2 * b + 3]
        part = indices[own[0] : own[-1]]
        alone = paged_attention(q[b : b + 1], keys, values, own - own[0], part, scale=0.3)
        torch.testing.assert_close(alone[0], together[b], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "groups", "size"), [(1, 1, 3), (6, 3, 5), (8, 2, 128)])
@pytest.mark.parametrize("tokens", [1, 3])
def test_keys_and_values_from_separate_lists_with_lengths(heads, groups, size, tokens, dtype):
    """Equals attention over entries that hold the products, in lists of their own."""
    generator = torch.Generator().manual_seed(size)
    lengths = torch.randint(tokens, 30, (2 * groups,), generator=generator).tolist()
    lengths[1 % len(lengths)] = 0  # an empty list
    indptr, indices = lists_of(lengths, 200 * groups, generator)
    _, value_indices = lists_of(lengths, 200 * groups, generator)
    count = indices.shape[0]
    stored_k = torch.full((200 * groups, size), float("nan"), dtype=dtype)
    stored_v = stored_k.clone()
    stored_k[indices] = torch.randn(count, size, generator=generator).to(dtype)
    stored_v[value_indices] = torch.randn(count, size, generator=generator).to(dtype)
    key_scale, value_scale = 3 * torch.rand(2, count, generator=generator)
    key_scale[0] = value_scale[-1] = 0.0
    q = torch.randn(2, tokens, heads, size, generator=generator).to(dtype)

    got = paged_attention(
        q,
        stored_k,
        stored_v,
        indptr,
        indices,
        scale=0.3,
        value_indices=value_indices,
        key_scale=key_scale,
        value_scale=value_scale,
    )

    keys = stored_k[indices].float() * key_scale[:, None]
    values = stored_v[value_indices].float() * value_scale[:, None]
    listed = torch.arange(count)
    wanted = paged_attention(q.float(), keys, values, indptr, listed, scale=0.3)
    assert torch.equal(got, wanted.to(dtype))
    assert wanted.abs().sum() > 0


def test_a_request_without_separate_lists_reads_as_before():
    generator = torch.Generator().manual_seed(3)
    indptr, indices = lists_of([7, 4], 30, generator)
    keys, values = torch.randn(2, 30, 8, generator=generator)
    q = torch.randn(1, 1, 4, 8, generator=generator)
    ones = torch.ones(11)
    wanted = paged_attention(q, keys, values, indptr, indices, scale=0.3)
    got = paged_attention(
        q,
        keys,
        values,
        indptr,
        indices,
        scale=0.3,
        value_indices=indices,
        key_scale=ones,
        value_scale=ones,
    )
    assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 4, 8)}, r"q: expected \[B, T, H, D\], got \[2, 4, 8\]"),
        ({"keys": torch.zeros(9, 7)}, r"keys: expected \[E, 8\], got \[9, 7\]"),
        ({"values": torch.zeros(9, 8).half()}, "values: expected torch.float32, got torch.float16"),
        ({"indptr": torch.zeros(6)}, r"indptr: expected \[2 \* G \+ 1\] with G dividing 4"),
        ({"value_indices": torch.arange(3)}, r"value_indices: expected \[0\], got \[3\]"),
        ({"key_scale": torch.ones(2)}, r"key_scale: expected \[0\], got \[2\]"),
        ({"indptr": torch.zeros(7)}, r"indptr: expected \[2 \* G \+ 1\] with G dividing 4"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    arguments = {
        "q": torch.zeros(2, 1, 4, 8),
        "keys": torch.zeros(9, 8),
        "values": torch.zeros(9, 8),
        "indptr": torch.zeros(5, dtype=torch.int64),
        "indices": torch.zeros(0, dtype=torch.int64),
    } | change
    with pytest.raises(ValueError, match=message):
        paged_attention(**arguments, scale=1.0)
