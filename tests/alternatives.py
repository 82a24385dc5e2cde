"""What others' decode attention is asked for by the benchmark; a script for test_benchmarks.py.

FlashInfer and FlashAttention are stand-ins, made from what they document: attention over pages.
SGLang's kernel is its own, in Triton's interpreter. Each must give what float64 gives of its lists.
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import cases_attention
import cases_tuning
from attention_pool import TAIL, Cache
from cases import Bench, Model
from kvpolicy.dsl.ir.nodes import ModelShape
from timing import Clock


def attend(q, pools, pages, length, scale):
    """[H, D] from q [H, D] and pools of keys and values [pages, page, G, D]."""
    keys, values = (pool[pages.long()].flatten(0, 1)[:length] for pool in pools)
    group = q.shape[0] // keys.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
    weights = (torch.einsum("hd,nhd->hn", q, keys) * scale).softmax(-1)
    return torch.einsum("hn,nhd->hd", weights, values)


class Wrapper:
    """FlashInfer's BatchDecodeWithPagedKVCacheWrapper."""

    def __init__(self, workspace, layout, *, use_tensor_cores, backend="auto"):
        assert (workspace.dtype, layout) == (torch.uint8, "NHD")
        assert backend in ("auto", "fa2")

    def plan(self, indptr, indices, last, heads, kv, size, page, **options):
        assert {indptr.dtype, indices.dtype, last.dtype} == {torch.int32}
        assert options.keys() == {"sm_scale", "q_data_type", "kv_data_type"}
        self.shape, self.scale = (page, kv, size), options["sm_scale"]
        lists = zip(indptr[:-1], indptr[1:], last, strict=True)
        self.lists = [(indices[a:b], (int(b - a) - 1) * page + int(n)) for a, b, n in lists]

    def run(self, q, pools):
        assert pools[0].shape[1:] == pools[1].shape[1:] == self.shape
        made = [
            attend(row, pools, pages, length, self.scale)
            for row, (pages, length) in zip(q, self.lists, strict=True)
        ]
        return torch.stack(made)


def flash_attn_with_kvcache(q, k, v, *, page_table, cache_seqlens, softmax_scale, causal):
    """FlashAttention 3's, for one token per request."""
    rows = zip(q[:, 0], page_table, cache_seqlens, strict=True)
    made = [attend(row, (k, v), pages, int(n), softmax_scale) for row, pages, n in rows]
    return torch.stack(made)[:, None]


def main() -> None:
    sys.modules["flashinfer"] = SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=Wrapper)
    fa3 = SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache)
    sys.modules |= {"sgl_kernel": SimpleNamespace(), "sgl_kernel.flash_attn": fa3}
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=4)
    model = Model(ModelShape(2, 4, 2, 64), torch.device("cpu"), torch.float16, 64, 128)
    cache = Cache(model, 90, 2, 11, whole=True)
    calls = {
        label: cases_attention.by_flashinfer(cache, cache.uniform, page)
        for page, label in cases_attention.PAGED
    }
    calls[cases_attention.WHOLE] = cases_attention.by_flashinfer(cache, cache.tokens + TAIL, 1)
    for label, module in cases_attention.RAGGED.items():
        calls[label] = cases_attention.by_ragged(cache, module)
    calls["SGLang"] = cases_attention.by_sglang(cache)
    calls["FlashAttention"] = cases_attention.by_flash_attention(cache)
    print(cases_attention.checked(cache, calls))
    # Both are readers that tuning may choose for a server's eager batches.
    bench = Bench(model, Clock(model.device, 0), {})
    readers = cases_tuning.reader_case(bench, 90, 2, toy=True)
    assert not readers.note
    assert [each["reader"] for each in readers.tuning.knobs.values()] == ["flashinfer", "fa3"]
    print(readers.check(readers.calls))


if __name__ == "__main__":
    main()
