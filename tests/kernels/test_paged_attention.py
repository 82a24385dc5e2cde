"""Paged attention against attention for one query at a time in float64."""

import pytest
import torch
from kvpolicy.kernels.attention import paged_attention_triton
from kvpolicy.kernels.attention.paged_attention import UNPAIRED, PairReading, paged_attention
from kvpolicy.kernels.attention.paged_attention_tiles_triton import Workspace
from kvpolicy.kernels.entries.rounding import FLOAT8

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def paged_triton(*tensors, **options):
    """The kernel on its device, with tensors from and to the CPU."""

    def moved_there(x):
        return x.to(DEVICE) if isinstance(x, torch.Tensor) else x

    given = [moved_there(t) for t in tensors]
    moved = {name: moved_there(x) for name, x in options.items()}
    if "reading" in options:
        moved["reading"] = PairReading(*map(moved_there, options["reading"]))
    return paged_attention_triton.paged_attention(*given, **moved).cpu()


BOTH = pytest.mark.parametrize("attention", [paged_attention, paged_triton])


def lists_of(lengths, entries, generator):
    """Random disjoint lists of these lengths: indptr, indices."""
    order = torch.randperm(entries, generator=generator)
    indptr = torch.tensor([0, *lengths]).cumsum(0)
    return indptr, order[: int(indptr[-1])]


def exact(q, keys, values, indptr, indices, *, scale, reading=UNPAIRED):
    """One softmax per (request, token, head) in float64, and how far float32 may be off.

    Relative to the sum of weight x |value|: a score is off by (D + 4) roundings of float32 relative
    to scale x |q|.|k|, which enters a weight twice (its own and the sum's); sums over n entries, in
    tiles, are off by 512 + n / 64 roundings in any implementation; weights and result are rounded
    to the dtype: 2 eps. Weights in float16 also underflow: 2^-25 against a largest one of 1.
    """
    requests, tokens, heads, size = q.shape
    kv_heads = (len(indptr) - 1) // requests
    rounding, eps = torch.finfo(torch.float32).eps / 2, torch.finfo(q.dtype).eps
    one = torch.ones(len(indices))
    k_scale, lengths = [
        (one if each is None else each)[:, None].double()
        for each in (reading.key_scale, reading.value_scale)
    ]
    k = keys[indices].double() * k_scale
    v = values[indices if reading.value_indices is None else reading.value_indices].double()
    out, bound = torch.zeros(2, *q.shape, dtype=torch.float64)
    for b in range(requests):
        for head in range(heads):
            at = b * kv_heads + head // (heads // kv_heads)
            begin, end = indptr[at : at + 2].tolist()
            for t in range(tokens):
                seen = slice(begin, max(end - (tokens - 1 - t), begin))
                if seen.start == seen.stop:
                    continue
                query, own = q[b, t, head].double(), v[seen] * lengths[seen]
                weights = (k[seen] @ query * scale).softmax(0)
                out[b, t, head] = weights @ own
                score = (size + 4) * rounding * scale * (k[seen].abs() @ query.abs()).max()
                relative = 2 * score + (512 + len(own) / 64) * rounding + 2 * eps
                bound[b, t, head] = relative * (weights @ own.abs())
                if q.dtype == torch.float16:
                    bound[b, t, head] += 2**-25 * weights.max() * v[seen].abs().sum(0)
    return out, bound


def assert_exact(got, *inputs, **options):
    wanted, bound = exact(*inputs, **options)
    error = (got.double() - wanted).abs()
    assert got.dtype == inputs[0].dtype
    assert bool((error <= bound).all()), f"{(error / bound).nan_to_num(9e9).max()} of the bound"


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 2), (4, 4), (8, 2)])
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_attention_written_out(attention, heads, kv_heads, tokens, dtype):
    generator = torch.Generator().manual_seed(heads + tokens)
    requests, size = 3, 16
    lengths = torch.randint(tokens, 40, (requests * kv_heads,), generator=generator).tolist()
    lengths[0] = tokens  # a list with nothing but the queries' own tokens
    indptr, indices = lists_of(lengths, 400, generator)
    keys, values = torch.randn(2, 400, size, generator=generator).to(dtype)
    q = torch.randn(requests, tokens, heads, size, generator=generator).to(dtype)
    inputs = (q, keys, values, indptr, indices)
    assert_exact(attention(*inputs, scale=0.25), *inputs, scale=0.25)


@BOTH
@pytest.mark.parametrize("stored", FLOAT8)
@pytest.mark.parametrize(("tokens", "dtype"), [(1, torch.float32), (5, torch.bfloat16)])
def test_entries_of_8_bits(attention, stored, tokens, dtype):
    generator = torch.Generator().manual_seed(tokens)
    lengths = [tokens, 63, 9, 40]
    indptr, indices = lists_of(lengths, 200, generator)
    keys, values = torch.full((2, 200, 20), float("nan"))
    keys[indices], values[indices] = torch.randn(2, len(indices), 20, generator=generator)
    q = torch.randn(2, tokens, 6, 20, generator=generator).to(dtype)
    inputs = (q, keys.to(stored), values.to(stored), indptr, indices)
    assert_exact(attention(*inputs, scale=0.25), *inputs, scale=0.25)


SHAPES = [  # lengths of the lists of two requests, tokens, heads, kv_heads, size, dtype
    ([0, 1, 63, 64], 1, 2, 2, 64, torch.float32),
    ([700, 1301], 1, 4, 1, 128, torch.bfloat16),
    ([65, 130, 0, 1301], 1, 16, 2, 80, torch.float16),
    ([150, 63], 40, 2, 1, 96, torch.float32),
    ([500, 70, 40, 64], 33, 4, 2, 128, torch.float16),
    ([200, 0], 7, 7, 1, 256, torch.bfloat16),
]


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize(("lengths", "tokens", "heads", "kv_heads", "size", "dtype"), SHAPES)
@pytest.mark.parametrize("separate", [False, True])
def test_lists_of_many_lengths(attention, lengths, tokens, heads, kv_heads, size, dtype, separate):
    generator = torch.Generator().manual_seed(size)
    entries = sum(lengths) + 9
    indptr, indices = lists_of(lengths, entries, generator)
    _, value_indices = lists_of(lengths, entries, generator)
    keys, values = torch.full((2, entries, size), float("nan"), dtype=dtype)
    keys[indices] = torch.randn(len(indices), size, generator=generator).to(dtype)
    values[value_indices] = torch.randn(len(indices), size, generator=generator).to(dtype)
    key_scale, value_scale = 2 * torch.rand(2, len(indices), generator=generator)
    q = torch.randn(2, tokens, heads, size, generator=generator).to(dtype)
    inputs = (q, keys, values, indptr, indices)
    scales = (key_scale, value_scale) if separate else ()
    options = {"scale": size**-0.5, "reading": PairReading(value_indices, *scales)}
    assert_exact(attention(*inputs, **options), *inputs, **options)


@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 2, 7])
@pytest.mark.parametrize("tokens", [1, 4])
def test_splits_agree_and_requests_do_not_depend_on_each_other(splits, tokens):
    """Bitwise: the same request alone, in another batch, and with any workspace."""
    generator = torch.Generator().manual_seed(splits)
    indptr, indices = lists_of([5, 200, 64, 0, 129, 17], 600, generator)
    keys, values = torch.randn(2, 600, 32, generator=generator)
    q = torch.randn(3, tokens, 4, 32, generator=generator)
    inputs, options = (q, keys, values, indptr, indices), {"scale": 0.2, "splits": splits}
    together = paged_triton(*inputs, **options)
    assert_exact(together, *inputs, scale=0.2)
    workspace = Workspace.empty((9 * q.numel() * splits, 6 * 3), DEVICE)
    workspace.partial.fill_(float("nan"))
    assert torch.equal(paged_triton(*inputs, **options, workspace=workspace), together)
    for b in range(3):
        own = indptr[2 * b : 2 * b + 3]
        assert torch.equal(paged_triton(q[b : b + 1], keys, values, own, indices, **options)[0],
                           together[b])  # fmt: skip


@BOTH
def test_an_empty_list_gives_zero(attention):
    keys = torch.full((4, 8), float("nan"))
    indptr = torch.zeros(3, dtype=torch.int64)
    nothing = torch.zeros(0, dtype=torch.int64)
    out = attention(torch.ones(1, 1, 4, 8), keys, keys, indptr, nothing, scale=1.0)
    assert torch.equal(out, torch.zeros_like(out))


@BOTH
def test_what_is_no_number_shows(attention):
    """A broken model's answer must not look sound."""
    generator = torch.Generator().manual_seed(0)
    indptr, indices = lists_of([7, 3, 0, 12], 60, generator)
    keys, values = torch.randn(2, 60, 8, generator=generator)
    q = torch.randn(2, 1, 4, 8, generator=generator)
    keys[indices[2]] = float("nan")  # in the first list, of two heads
    out = attention(q, keys, values, indptr, indices, scale=0.3)
    assert out[0, 0, :2].isnan().all()
    assert not out[0, 0, 2:].isnan().any()
    assert not out[1].isnan().any()


@BOTH
def test_nothing_outside_the_lists_is_touched(attention):
    generator = torch.Generator().manual_seed(0)
    indptr, indices = lists_of([7, 0, 3, 12], 60, generator)
    keys, values = torch.randn(2, 60, 8, generator=generator)
    q = torch.randn(2, 1, 4, 8, generator=generator)
    wanted = attention(q, keys, values, indptr, indices, scale=0.3)
    unused = torch.ones(60, dtype=torch.bool)
    unused[indices] = False
    keys[unused], values[unused] = float("nan"), float("inf")
    assert torch.equal(attention(q, keys, values, indptr, indices, scale=0.3), wanted)


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
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(1, 1, 3), (6, 3, 5), (8, 2, 128)])
@pytest.mark.parametrize("tokens", [1, 3])
def test_keys_and_values_from_separate_lists_with_lengths(heads, kv_heads, size, tokens, dtype):
    """Equals attention over entries that hold the products, in lists of their own."""
    generator = torch.Generator().manual_seed(size)
    lengths = torch.randint(tokens, 30, (2 * kv_heads,), generator=generator).tolist()
    lengths[1 % len(lengths)] = 0  # an empty list
    indptr, indices = lists_of(lengths, 200 * kv_heads, generator)
    _, value_indices = lists_of(lengths, 200 * kv_heads, generator)
    count = indices.shape[0]
    stored_k = torch.full((200 * kv_heads, size), float("nan"), dtype=dtype)
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
        reading=PairReading(value_indices, key_scale, value_scale),
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
        reading=PairReading(indices, ones, ones),
    )
    assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 4, 8)}, r"q: expected \[B, T, H, D\], got \[2, 4, 8\]"),
        ({"keys": torch.zeros(9, 7)}, r"keys: expected \[E, 8\], got \[9, 7\]"),
        (
            {"values": torch.zeros(9, 8).half()},
            "values: expected torch.float32 or 8-bit floats, got torch.float16",
        ),
        ({"indptr": torch.zeros(6)}, r"indptr: expected \[2 \* G \+ 1\] with G dividing 4"),
        ({"reading": PairReading(torch.arange(3))}, r"value_indices: expected \[0\], got \[3\]"),
        (
            {"reading": PairReading(key_scale=torch.ones(2))},
            r"key_scale: expected \[0\], got \[2\]",
        ),
        ({"indptr": torch.zeros(7)}, r"indptr: expected \[2 \* G \+ 1\] with G dividing 4"),
    ],
)
@BOTH
def test_wrong_arguments_are_named(attention, change, message):
    arguments = {
        "q": torch.zeros(2, 1, 4, 8),
        "keys": torch.zeros(9, 8),
        "values": torch.zeros(9, 8),
        "indptr": torch.zeros(5, dtype=torch.int64),
        "indices": torch.zeros(0, dtype=torch.int64),
    } | change
    with pytest.raises(ValueError, match=message):
        attention(**arguments, scale=1.0)
