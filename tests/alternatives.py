"""Runs the benchmark's other decode attentions on a CPU; a script for test_benchmarks.py.

FlashInfer and FlashAttention are stand-ins for attention over pages, made from their documentation.
SGLang's kernel is its own, in Triton's interpreter. Each must agree with float64 over its lists.
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import flashinfer_stand_in
from cases import attention, tuning
from cases.attention_pool import TAIL, Cache
from cases.case import Bench, Model
from kvpolicy.dsl.ir.nodes import ModelShape
from timing import Clock


def attend(q, pools, pages, length, scale):
    """Attention [H, D] from q [H, D] and pools of keys and values [pages, page, G, D]."""
    keys, values = (pool[pages.long()].flatten(0, 1)[:length] for pool in pools)
    group = q.shape[0] // keys.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
    weights = (torch.einsum("hd,nhd->hn", q, keys) * scale).softmax(-1)
    return torch.einsum("hn,nhd->hd", weights, values)


def flash_attn_with_kvcache(q, k, v, *, page_table, cache_seqlens, softmax_scale, causal):
    """Stand-in for FlashAttention 3's function, for one token per request."""
    rows = zip(q[:, 0], page_table, cache_seqlens, strict=True)
    made = [attend(row, (k, v), pages, int(n), softmax_scale) for row, pages, n in rows]
    return torch.stack(made)[:, None]


def main() -> None:
    sys.modules |= flashinfer_stand_in.modules()
    fa3 = SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache)
    sys.modules |= {"sgl_kernel": SimpleNamespace(), "sgl_kernel.flash_attn": fa3}
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=4)
    model = Model(ModelShape(2, 4, 2, 64), torch.device("cpu"), torch.float16, 64, 128)
    cache = Cache(model, 90, 2, 11, whole=True)
    calls = {
        label: attention.by_flashinfer(cache, cache.uniform, page)
        for page, label in attention.PAGED
    }
    calls[attention.WHOLE] = attention.by_flashinfer(cache, cache.tokens + TAIL, 1)
    calls[attention.PAGES] = attention.by_pages(cache)
    calls[attention.ROWS] = attention.by_rows(cache)
    calls["SGLang"] = attention.by_sglang(cache)
    calls["FlashAttention"] = attention.by_flash_attention(cache)
    print(attention.checked(cache, calls))
    # A reader that tuning may choose for a server.
    bench = Bench(model, Clock(model.device, 0), {})
    readers = tuning.reader_case(bench, 90, 2, toy=True)
    assert not readers.note
    assert [each["reader"] for each in readers.tuning.knobs.values()] == ["flashinfer"]
    print(readers.check(readers.calls))


if __name__ == "__main__":
    main()
