"""Paged attention by FlashInfer: what it is given, what it refuses, on a GPU what it answers."""

import sys
from types import SimpleNamespace

import pytest
import torch
from kvpolicy.kernels import paged_attention_flashinfer
from kvpolicy.kernels.paged_attention import paged_attention

LENGTHS = [5, 0, 63, 1000, 1, 64]  # of 3 requests with 2 KV heads


def inputs(heads, size=64, dtype=torch.float16, device="cpu"):
    """Lists in a pool of keys then values, as in an arena; what is not listed is NaN."""
    generator = torch.Generator().manual_seed(heads)
    indptr = torch.tensor([0, *LENGTHS]).cumsum(0)
    indices = torch.randperm(1200, generator=generator)[: int(indptr[-1])]
    pool = torch.full((2400, size), float("nan"), dtype=dtype)
    pool[indices], pool[indices + 1200] = torch.randn(
        2, len(indices), size, generator=generator
    ).to(dtype)
    q = torch.randn(3, 1, heads, size, generator=generator).to(dtype)
    return [t.to(device) for t in (q, pool, pool[1200:], indptr, indices)]


class Wrapper:
    """What FlashInfer documents of its wrapper, answered by the reference."""

    def __init__(self, workspace, kv_layout="NHD", *, use_tensor_cores=False):
        assert workspace.dtype == torch.uint8
        assert kv_layout == "NHD"
        self.use_tensor_cores = use_tensor_cores

    def plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        *,
        q_data_type,
        kv_data_type,
        sm_scale,
    ):
        assert indptr.dtype == indices.dtype == last_page_len.dtype == torch.int32
        pages = indptr.diff()
        length = (pages - 1).clamp(min=0) * page_size + last_page_len
        assert torch.equal(length, pages)  # one token per page
        assert (num_kv_heads, page_size, q_data_type) == (1, 1, kv_data_type)
        self.shape = (len(pages), num_qo_heads, head_dim)
        self.planned = indptr.long(), indices.long(), sm_scale

    def run(self, q, paged_kv_cache):
        keys, values = paged_kv_cache
        assert q.shape == self.shape
        assert keys.shape == values.shape == (len(keys), 1, 1, self.shape[2])
        indptr, indices, scale = self.planned
        flat = keys[:, 0, 0], values[:, 0, 0]
        out = paged_attention(q[:, None], *flat, indptr, indices, scale=scale)[:, 0]
        out[indptr.diff() == 0] = float("nan")  # nothing is promised of an empty sequence
        return out


@pytest.fixture
def flashinfer(monkeypatch):
    made = []

    def make(*arguments, **options):
        made.append(Wrapper(*arguments, **options))
        return made[-1]

    module = SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=make)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    paged_attention_flashinfer._wrapper.cache_clear()
    yield made
    paged_attention_flashinfer._wrapper.cache_clear()


@pytest.mark.parametrize(("heads", "tensor_cores"), [(2, False), (8, True)])
def test_flashinfer_is_given_one_sequence_per_list(flashinfer, heads, tensor_cores):
    given = inputs(heads)
    wanted = paged_attention(*given, scale=0.2)
    for _ in range(2):
        got = paged_attention_flashinfer.paged_attention(*given, scale=0.2)
        assert torch.equal(got, wanted)
    assert [w.use_tensor_cores for w in flashinfer] == [tensor_cores]  # one, kept


def test_a_part_of_longer_lists(flashinfer):
    q, keys, values, indptr, indices = inputs(4)
    wanted = paged_attention(q, keys, values, indptr, indices, scale=0.2)
    part = paged_attention_flashinfer.paged_attention(
        q[1:2], keys, values, indptr[2:5], indices, scale=0.2
    )
    torch.testing.assert_close(part[0], wanted[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(3, 2, 4, 64).half()}, "q: FlashInfer decodes 1 token .*, got 2"),
        ({"value_indices": torch.zeros(1133).long()}, "value_indices: FlashInfer reads"),
        ({"key_scale": torch.ones(1133)}, "key_scale: FlashInfer reads keys and values"),
        ({"value_scale": torch.ones(1133)}, "value_scale: FlashInfer reads keys and values"),
    ],
)
def test_what_it_cannot_do_is_refused(flashinfer, change, message):
    given = dict(zip(("q", "keys", "values", "indptr", "indices"), inputs(4), strict=True))
    with pytest.raises(ValueError, match=message):
        paged_attention_flashinfer.paged_attention(**given | change, scale=1.0)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"dtype": torch.float32}, "fp16 and bf16, got torch.float32"),
        ({"size": 80}, r"head sizes \(64, 128, 256\), got 80"),
    ],
)
def test_shapes_it_has_no_kernel_for_are_refused(flashinfer, shape, message):
    with pytest.raises(ValueError, match=message):
        paged_attention_flashinfer.paged_attention(*inputs(4, **shape), scale=1.0)


def test_without_flashinfer_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    paged_attention_flashinfer._wrapper.cache_clear()
    with pytest.raises(ImportError, match="needs the package flashinfer-python"):
        paged_attention_flashinfer.paged_attention(*inputs(4), scale=1.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("heads", [2, 4, 8, 16])
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_equals_the_reference(heads, size, dtype):
    pytest.importorskip("flashinfer")
    paged_attention_flashinfer._wrapper.cache_clear()
    given = inputs(heads, size, dtype, "cuda")
    wanted = paged_attention(*given, scale=size**-0.5).double()
    got = paged_attention_flashinfer.paged_attention(*given, scale=size**-0.5).double()
    # Either rounds weights and result to the dtype: 2 eps of sum of weight x |value| each, and
    # that sum is at most the largest |value|.
    largest = given[2][given[4]].abs().max().double()
    assert bool(((got - wanted).abs() <= 4 * torch.finfo(dtype).eps * largest).all())
