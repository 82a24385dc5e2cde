"""Paged attention by FlashInfer and by FlashAttention 3: what they are given, what is refused.

On a CPU stand-ins answer, made from what the packages document; on a GPU the packages themselves.
"""

import sys
from types import SimpleNamespace

import pytest
import torch
from kvpolicy.kernels.attention import paged_attention_fa3, paged_attention_flashinfer
from kvpolicy.kernels.attention.paged_attention import Apart, paged_attention

LENGTHS = [5, 0, 63, 1000, 1, 64]  # of 3 requests with 2 KV heads
MODULES = [paged_attention_flashinfer, paged_attention_fa3]
NAMES = {paged_attention_flashinfer: "FlashInfer", paged_attention_fa3: "FlashAttention 3"}


def inputs(heads, size=64, dtype=torch.float16, device="cpu", lengths=LENGTHS):
    """Lists in a pool of keys then values, as in an arena; what is not listed is NaN."""
    generator = torch.Generator().manual_seed(heads)
    indptr = torch.tensor([0, *lengths]).cumsum(0)
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


def flash_attn_with_kvcache(
    q, k_cache, v_cache, *, cache_seqlens, page_table, softmax_scale, causal
):
    """What FlashAttention 3 documents of it for a paged cache, answered by the reference."""
    assert cache_seqlens.dtype == page_table.dtype == torch.int32
    assert causal
    batch, tokens, _, size = q.shape
    blocks, page, kv_heads, _ = k_cache.shape
    assert (tokens, page, kv_heads, v_cache.shape) == (1, 1, 1, k_cache.shape)
    assert page_table.shape == (batch, int(cache_seqlens.max()))
    assert page_table.min() >= 0  # also where nothing is to be read
    assert page_table.max() < blocks
    rows = [row[:n].long() for row, n in zip(page_table, cache_seqlens, strict=True)]
    indptr = torch.nn.functional.pad(cache_seqlens.long().cumsum(0), (1, 0))
    flat = k_cache.view(-1, size), v_cache.view(-1, size)
    out = paged_attention(q, *flat, indptr, torch.cat(rows), scale=softmax_scale)
    out[cache_seqlens == 0] = float("nan")  # nothing is promised of an empty sequence
    return out


def forget():
    """What a process has found once is looked for again."""
    paged_attention_flashinfer.shared_wrapper.cache_clear()
    paged_attention_fa3.package.cache_clear()


@pytest.fixture
def packages(monkeypatch):
    """Both packages as stand-ins; gives the wrappers that FlashInfer was asked for."""
    made = []

    def make(*arguments, **options):
        made.append(Wrapper(*arguments, **options))
        return made[-1]

    flashinfer = SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=make)
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    fa3 = SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache)
    monkeypatch.setitem(sys.modules, "sgl_kernel", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_attn", fa3)
    forget()
    yield made
    forget()


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("heads", [2, 8])
def test_each_list_is_a_sequence_of_its_own(packages, module, heads):
    given = inputs(heads)
    wanted = paged_attention(*given, scale=0.2)
    for _ in range(2):
        assert torch.equal(module.paged_attention(*given, scale=0.2), wanted)


@pytest.mark.parametrize(("heads", "tensor_cores"), [(2, False), (8, True)])
def test_flashinfer_is_asked_for_one_wrapper(packages, heads, tensor_cores):
    for _ in range(2):
        paged_attention_flashinfer.paged_attention(*inputs(heads), scale=0.2)
    assert [w.use_tensor_cores for w in packages] == [tensor_cores]


@pytest.mark.parametrize("module", MODULES)
def test_a_part_of_longer_lists(packages, module):
    q, keys, values, indptr, indices = inputs(4)
    wanted = paged_attention(q, keys, values, indptr, indices, scale=0.2)
    part = module.paged_attention(q[1:2], keys, values, indptr[2:5], indices, scale=0.2)
    torch.testing.assert_close(part[0], wanted[1])


@pytest.mark.parametrize("module", MODULES)
def test_a_plan_serves_other_queries_and_entries(packages, module):
    q, keys, values, indptr, indices = inputs(4)
    attend = module.plan(indptr, indices, heads=2, size=64, dtype=q.dtype, scale=0.2)
    for factor in (1, -2):
        given = (q * factor, keys * factor, values * factor)
        wanted = paged_attention(*given, indptr, indices, scale=0.2)
        assert torch.equal(attend(*given), wanted)


def test_a_plan_with_a_workspace_of_its_own_stays_good(packages):
    q, keys, values, indptr, indices = inputs(4)
    options = {"heads": 2, "size": 64, "dtype": q.dtype}
    plans = [
        paged_attention_flashinfer.plan(
            indptr,
            indices,
            scale=scale,
            workspace=paged_attention_flashinfer.new_workspace(q.device),
            **options,
        )
        for scale in (0.1, 0.2)
    ]
    for scale, attend in zip((0.1, 0.2), plans, strict=True):
        wanted = paged_attention(q, keys, values, indptr, indices, scale=scale)
        assert torch.equal(attend(q, keys, values), wanted)


@pytest.mark.parametrize("lengths", [[0] * 6, [0, 0, 0, 0, 0, 3], [3, 0, 0, 0, 0, 0]])
def test_fa3_with_next_to_nothing_listed(packages, lengths):
    given = inputs(4, lengths=lengths)
    wanted = paged_attention(*given, scale=0.2)
    assert torch.equal(paged_attention_fa3.paged_attention(*given, scale=0.2), wanted)


def test_fa3_of_flash_attention_itself(packages, monkeypatch):
    """Where SGLang's package is not there."""
    monkeypatch.setitem(sys.modules, "flash_attn_interface", sys.modules["sgl_kernel.flash_attn"])
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_attn", None)
    given = inputs(4)
    wanted = paged_attention(*given, scale=0.2)
    assert torch.equal(paged_attention_fa3.paged_attention(*given, scale=0.2), wanted)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(3, 2, 4, 64).half()}, "q: {} decodes 1 token .*, got 2"),
        ({"apart": Apart(torch.zeros(1133).long())}, "value_indices: {} reads keys and values"),
        ({"apart": Apart(key_scale=torch.ones(1133))}, "key_scale: {} reads keys and values"),
        ({"apart": Apart(value_scale=torch.ones(1133))}, "value_scale: {} reads keys and values"),
    ],
)
def test_what_it_cannot_do_is_refused(packages, module, change, message):
    given = dict(zip(("q", "keys", "values", "indptr", "indices"), inputs(4), strict=True))
    with pytest.raises(ValueError, match=message.format(NAMES[module])):
        module.paged_attention(**given | change, scale=1.0)


@pytest.mark.parametrize(
    ("module", "shape", "message"),
    [
        (paged_attention_flashinfer, {"dtype": torch.float32}, "fp16 and bf16, got torch.float32"),
        (paged_attention_flashinfer, {"size": 80}, r"head sizes \(64, 128, 256\), got 80"),
        (paged_attention_fa3, {"dtype": torch.float32}, "fp16 and bf16, got torch.float32"),
        (paged_attention_fa3, {"size": 264}, "up to 256 that are multiples of 8, got 264"),
        (paged_attention_fa3, {"size": 20}, "up to 256 that are multiples of 8, got 20"),
    ],
)
def test_shapes_it_has_no_kernel_for_are_refused(packages, module, shape, message):
    with pytest.raises(ValueError, match=message):
        module.paged_attention(*inputs(4, **shape), scale=1.0)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (paged_attention_flashinfer, "needs the package flashinfer-python"),
        (paged_attention_fa3, "needs the package sglang-kernel or flash-attn-3"),
    ],
)
def test_without_the_package_it_says_what_to_install(monkeypatch, module, message):
    for name in ("flashinfer", "sgl_kernel.flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "sgl_kernel", SimpleNamespace())
    forget()
    with pytest.raises(ImportError, match=message):
        module.paged_attention(*inputs(4), scale=1.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("heads", [2, 4, 8, 16])
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_equals_the_reference(module, heads, size, dtype):
    forget()
    given = inputs(heads, size, dtype, "cuda")
    wanted = paged_attention(*given, scale=size**-0.5).double()
    try:
        got = module.paged_attention(*given, scale=size**-0.5).double()
    except (ImportError, NotImplementedError) as error:
        pytest.skip(str(error))
    # Either rounds weights and result to the dtype: 2 eps of sum of weight x |value| each, and
    # that sum is at most the largest |value|.
    largest = given[2][given[4]].abs().max().double()
    assert bool(((got - wanted).abs() <= 4 * torch.finfo(dtype).eps * largest).all())
