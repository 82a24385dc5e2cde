"""The log-sum-exp that a prefill's attention hands over, from SGLang's own backends.

`forward_extend` is SGLang's. FlashInfer's wrappers and FlashAttention's function, which need a GPU,
are attention written out, with the signatures of flashinfer 0.7.2 and of SGLang's `sgl_kernel`.

Dimensions: H query heads, G KV heads, D head size.
"""

import importlib
import inspect
import math
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is an extra; authors check policies without it")

from kvpolicy.sglang_ext.attention import backend as backends
from kvpolicy.sglang_ext.face import compat
from kvpolicy.sglang_ext.memory.arena import create_arena
from sglang.srt.layers.attention import flashinfer_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend, PrefillMetadata
from sglang.srt.layers.radix_attention import RadixAttention

HEADS, KV_HEADS, SIZE, SLOTS = 6, 2, 16, 64
SCALE = SIZE**-0.5
# Of each request: tokens before the forward, and its rows in it.
BATCHES = {
    "new prompts": [(0, 7), (0, 1), (0, 12)],
    "after prefixes": [(5, 7), (9, 1)],
    "one after a prefix": [(0, 4), (11, 3)],
}


def attend(q, keys, values, first):
    """Output [T, H, D] and natural log-sum-exp [T, H]; row t sees the first `first` + t keys."""
    repeat = q.shape[1] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(repeat, 1) for x in (keys, values))
    logits = torch.einsum("thd,nhd->thn", q.double(), keys) * SCALE
    seen = torch.arange(len(keys)) < first + torch.arange(len(q))[:, None]
    logits = logits.masked_fill(~seen[:, None], -torch.inf)
    lse = logits.logsumexp(-1)
    weights = (logits - lse.nan_to_num(neginf=0.0)[..., None]).exp()
    return torch.einsum("thn,nhd->thd", weights, values), lse


class Batch:
    """Requests of an extend forward in a pool with NaN elsewhere."""

    def __init__(self, requests, dtype=torch.float32):
        random = torch.Generator().manual_seed(len(requests))
        self.requests, self.lists = requests, []
        self.arena = create_arena(1, SLOTS, KV_HEADS, SIZE, dtype, "cpu")
        pool = self.arena.storage[0]
        pool.fill_(torch.nan)
        free = (1 + torch.randperm(SLOTS - 1, generator=random)).tolist()
        for prefix, new in requests:
            slots = torch.tensor([free.pop() for _ in range(prefix + new)])
            pool[:, slots] = torch.randn(2, len(slots), KV_HEADS, SIZE, generator=random).to(dtype)
            self.lists.append(slots)
        self.new = torch.cat([own[prefix:] for own, (prefix, _) in self.both()])
        self.k, self.v = (each[self.new].flatten(1) for each in pool)
        rows = sum(new for _, new in requests)
        self.q = torch.randn(rows, HEADS, SIZE, generator=random).to(dtype)

    def both(self):
        return zip(self.lists, self.requests, strict=True)

    def rows(self):
        """Each request's rows, slots, and number of tokens before."""
        end = 0
        for own, (prefix, new) in self.both():
            start, end = end, end + new
            yield slice(start, end), own, prefix

    def attended(self):
        keys, values = self.arena.storage[0]
        made = [attend(self.q[r], keys[own], values[own], n + 1) for r, own, n in self.rows()]
        return torch.cat([each[0] for each in made]), torch.cat([each[1] for each in made])


class Ragged:
    """FlashInfer's BatchPrefillWithRaggedKVCacheWrapper: only the tokens of the forward."""

    def __init__(self, batch):
        self.batch, self.calls = batch, []

    def forward(
        self, q, k, v, causal=False, pos_encoding_mode="NONE", use_fp16_qk_reduction=False,
        window_left=-1, logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None,
    ):  # fmt: skip
        self.calls.append("forward")
        return self._made(q, k, v, causal, sm_scale)[0]

    def forward_return_lse(
        self, q, k, v, causal=False, pos_encoding_mode="NONE", use_fp16_qk_reduction=False,
        window_left=-1, logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None,
    ):  # fmt: skip
        self.calls.append("forward_return_lse")
        return self._made(q, k, v, causal, sm_scale)

    def _made(self, q, k, v, causal, sm_scale):
        assert causal
        assert sm_scale == SCALE
        made = [attend(q[r], k[r], v[r], 1) for r, _, _ in self.batch.rows()]
        return tuple(map(torch.cat, _base_two(made, q.dtype)))


class Paged:
    """FlashInfer's BatchPrefillWithPagedKVCacheWrapper: whole lists or prefixes, as planned."""

    def __init__(self, batch):
        self.batch, self.calls = batch, []

    def forward(
        self, q, paged_kv_cache, causal=False, pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False, k_scale=None, v_scale=None, window_left=-1,
        logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None,
    ):  # fmt: skip
        self.calls.append("forward")
        return self._made(q, paged_kv_cache, causal, sm_scale)[0]

    def forward_return_lse(
        self, q, paged_kv_cache, causal=False, pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False, k_scale=None, v_scale=None, window_left=-1,
        logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None,
    ):  # fmt: skip
        self.calls.append("forward_return_lse")
        return self._made(q, paged_kv_cache, causal, sm_scale)

    def _made(self, q, pools, causal, sm_scale):
        assert sm_scale == SCALE
        made = []
        for rows, own, prefix in self.batch.rows():
            own = own if causal else own[:prefix]
            first = prefix + 1 if causal else prefix + len(q)  # the whole prefix
            made.append(attend(q[rows], *(pool[own] for pool in pools), first))
        return tuple(map(torch.cat, _base_two(made, q.dtype)))


def _base_two(made, dtype):
    out, lse = zip(*made, strict=True)
    return [x.to(dtype) for x in out], [x.float() / math.log(2) for x in lse]


def merge_state(v_a, s_a, v_b, s_b):
    """FlashInfer's, of two base-2 log-sum-exps."""
    total = s_a.logaddexp2(s_b)
    a, b = ((s - total).exp2()[..., None] for s in (s_a, s_b))
    return (v_a * a + v_b * b).to(v_a.dtype), total


class Stock(AttentionBackend):
    """A backend that hands over no log-sum-exp."""


def services_of(batch, reads_lse=True):
    """Services of a forward in which a policy reads every row; and the rows it is shown."""
    shown = []
    prefill = SimpleNamespace(
        reads_lse=reads_lse, observe=lambda layer, queries: shown.append(queries)
    )
    nothing = SimpleNamespace(overwrite=lambda *_: None, observe=lambda *_: None)
    step = SimpleNamespace(prefill=prefill, resume=nothing, decoding=None)
    return SimpleNamespace(step=step, arena=batch.arena), shown


def pool_of(batch):
    keys, values = batch.arena.storage[0]
    return SimpleNamespace(get_kv_buffer=lambda _: (keys, values), set_kv_buffer=lambda *_: None)


def layer_of():
    return RadixAttention(HEADS, SIZE, SCALE, KV_HEADS, layer_id=0)


@pytest.fixture
def flashinfer(monkeypatch):
    """SGLang's backend for FlashInfer, with wrappers written out in torch."""
    monkeypatch.setattr(flashinfer_backend, "_safe_merge_state", merge_state, raising=False)

    def make(batch, ragged):
        backend = object.__new__(FlashInferAttnBackend)
        whole = all(prefix == 0 for prefix, _ in batch.requests)
        backend.forward_metadata = PrefillMetadata([Paged(batch)], ragged, whole)
        backend.prefill_wrapper_ragged = Ragged(batch)
        backend.num_wrappers, backend.is_dllm_model = 1, False
        backend.prefill_uses_dequant_workspace = False
        backend.token_to_kv_pool = pool_of(batch)
        backend.kv_cache_quant_method = SimpleNamespace(needs_global_scale=lambda: True)
        backend.indices_updater_decode = SimpleNamespace(call_begin_forward=None)  # plans none
        return backend

    return make


@pytest.fixture
def fa3(monkeypatch):
    """SGLang's backend for FlashAttention 3, whose function is written out in torch."""
    monkeypatch.setitem(sys.modules, "sgl_kernel", SimpleNamespace(merge_state_v2=None))
    name = "sglang.srt.layers.attention.flashattention_backend"
    if name not in sys.modules:
        monkeypatch.setitem(sys.modules, name, importlib.import_module(name))
    module, calls = sys.modules[name], []
    signature = inspect.signature(module.flash_attn_with_kvcache)

    def function(**given):
        calls.append(given["return_softmax_lse"])
        signature.bind(**given)
        assert (given["causal"], given["softmax_scale"]) == (True, SCALE)
        q, made = given["q"], []
        starts, lengths = given["cu_seqlens_q"].tolist(), given["cache_seqlens"].tolist()
        pools = [given[f"{x}_cache"].flatten(0, 1) for x in "kv"]
        for i, (table, length) in enumerate(zip(given["page_table"], lengths, strict=True)):
            own, rows = table[:length].long(), slice(starts[i], starts[i + 1])
            first = length - (rows.stop - rows.start) + 1
            made.append(attend(q[rows], *(pool[own] for pool in pools), first))
        out, lse = (torch.cat(each) for each in zip(*made, strict=True))
        out = out.to(q.dtype)
        return (out, lse.float().T) if given["return_softmax_lse"] else out

    monkeypatch.setattr(module, "flash_attn_with_kvcache", function)

    def make(batch):
        lengths = torch.tensor([len(own) for own in batch.lists], dtype=torch.int32)
        table = torch.zeros(len(lengths), int(lengths.max()), dtype=torch.int32)
        for row, own in zip(table, batch.lists, strict=True):
            row[: len(own)] = own
        rows = torch.tensor([0, *(new for _, new in batch.requests)])
        metadata = module.FlashAttentionMetadata()
        metadata.page_table, metadata.cache_seqlens_int32 = table, lengths
        metadata.cu_seqlens_q = rows.cumsum(0).int()
        metadata.cu_seqlens_k = torch.nn.functional.pad(lengths, (1, 0)).cumsum(0).int()
        metadata.max_seq_len_q = int(rows.max())
        backend = object.__new__(module.FlashAttentionBackend)
        backend.forward_metadata, backend.token_to_kv_pool = metadata, pool_of(batch)
        given = {
            "use_mla": False, "fa_skip_kv_cache": False, "kv_cache_is_mxfp8": False,
            "fa_impl_ver": 3, "kv_cache_dtype_str": "auto", "local_attn_builder": None, "topk": 0,
            "page_size": 1, "num_splits": 0, "use_sliding_window_kv_pool": False,
            "full_cg_prefill_metadata": None, "has_local_attention": False,
        }  # fmt: skip
        for name, value in given.items():
            setattr(backend, name, value)
        return backend

    return make, calls


def forward(backend, batch):
    """SGLang's extend forward of the batch's rows at one layer."""
    mode = SimpleNamespace(
        is_context_parallel_extend=lambda: False, is_target_verify=lambda: False,
        is_draft_extend_v2=lambda: False,
    )  # fmt: skip
    view = SimpleNamespace(
        out_cache_loc=batch.new, forward_mode=mode, batch_size=len(batch.requests),
        out_cache_loc_is_physical=False, attn_attend_prefix_cache=None,
    )  # fmt: skip
    return backend.forward_extend(batch.q.flatten(1), batch.k, batch.v, layer_of(), view)


def assert_shown(shown, out, batch):
    """Checks attention and its natural log-sum-exp, per row and head."""
    wanted, lse = batch.attended()
    [queries] = shown
    assert torch.equal(queries.heads, batch.q)
    assert queries.lse.dtype == torch.float32
    bar = 1e-5 if batch.q.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.view(wanted.shape).double(), wanted, atol=bar, rtol=bar)
    torch.testing.assert_close(queries.lse.double(), lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("requests", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("ragged", [True, False])
def test_flashinfer_hands_it_over(flashinfer, requests, ragged):
    batch = Batch(requests)
    stock = flashinfer(batch, ragged)
    services, shown = services_of(batch)
    wrappers = (stock.prefill_wrapper_ragged, *stock.forward_metadata.prefill_wrappers)
    backend = backends.attach(stock, "flashinfer", services, HEADS, torch.float32)
    assert_shown(shown, forward(backend, batch), batch)
    # They are there again, and each was asked once at most.
    after = (backend.prefill_wrapper_ragged, *backend.forward_metadata.prefill_wrappers)
    assert all(one is other for one, other in zip(wrappers, after, strict=True))
    two = ragged and any(prefix for prefix, _ in requests)
    asked = [each.calls for each in wrappers]
    every = ["forward_return_lse"]
    assert asked == ([every, every] if two else [every, []] if ragged else [[], every])


@pytest.mark.parametrize("requests", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flash_attention_hands_it_over(fa3, requests, dtype):
    make, calls = fa3
    batch = Batch(requests, dtype)
    services, shown = services_of(batch)
    backend = backends.attach(make(batch), "fa3", services, HEADS, dtype)
    assert_shown(shown, forward(backend, batch), batch)
    assert calls == [True]


def test_without_a_policy_that_needs_it_nothing_is_asked_for(flashinfer, fa3):
    batch = Batch(BATCHES["new prompts"])
    stock, (make, calls) = flashinfer(batch, True), fa3
    for name, each in (("flashinfer", stock), ("fa3", make(batch))):
        services, shown = services_of(batch, reads_lse=False)
        forward(backends.attach(each, name, services, HEADS, torch.float32), batch)
        assert [queries.lse for queries in shown] == [None]
    assert stock.prefill_wrapper_ragged.calls == ["forward"]
    assert calls == [False]


@pytest.mark.parametrize("change", ["scale", "dtype"])
def test_it_is_not_taken_of_other_logits_than_policies_see(flashinfer, change, monkeypatch):
    """If the model scales logits differently, or the pool holds keys in another dtype."""
    batch = Batch(BATCHES["new prompts"])
    services, shown = services_of(batch)
    backend = backends.attach(flashinfer(batch, True), "flashinfer", services, HEADS, torch.float32)
    if change == "scale":
        monkeypatch.setattr(compat, "scale", lambda layer: 1.5)
    else:
        storage = batch.arena.storage.to(torch.bfloat16)
        services.arena = SimpleNamespace(storage=storage)
    forward(backend, batch)
    assert [queries.lse for queries in shown] == [None]


def test_wrappers_are_there_again_after_a_failure(flashinfer, monkeypatch):
    batch = Batch(BATCHES["new prompts"])
    stock = flashinfer(batch, True)
    ragged = stock.prefill_wrapper_ragged
    monkeypatch.setattr(ragged, "forward_return_lse", None)
    backend = backends.attach(stock, "flashinfer", services_of(batch)[0], HEADS, torch.float32)
    with pytest.raises(TypeError):
        forward(backend, batch)
    assert backend.prefill_wrapper_ragged is ragged


def test_other_backends_give_none():
    for name in ("triton", "torch_native"):
        assert not compat.gives_lse(name, SimpleNamespace(prefill_wrapper_ragged=Ragged(None)))


def test_the_log_says_who_gives_it(flashinfer, fa3, caplog):
    batch = Batch(BATCHES["new prompts"])
    stocks = {"flashinfer": flashinfer(batch, True), "fa3": fa3[0](batch), "triton": Stock()}
    with caplog.at_level("INFO", logger=backends.__name__):
        for name, stock in stocks.items():
            backends.attach(stock, name, services_of(batch)[0], HEADS, torch.float32)
    said = "KV-cache policies read the log-sum-exp that %s finds in prefills."
    assert caplog.messages == [said % "flashinfer", said % "fa3"]
