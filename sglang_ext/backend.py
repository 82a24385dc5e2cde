"""Attention backends that can read compressed entries.

A stock backend instance is kept and its class replaced by a subclass, so that its name, its type
checks and its attributes stay what SGLang expects. `READERS` is the seam: a further backend is
one more function that attends over entry lists.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from kvpolicy.kernels.paged_attention import paged_attention
from kvpolicy.sglang_ext import compat
from kvpolicy.sglang_ext.arena import Arena

if TYPE_CHECKING:
    from kvpolicy.sglang_ext.runtime import Runtime

# Name of a stock backend -> attention over entry lists with the interface of `paged_attention`.
READERS: dict[str, Callable[..., torch.Tensor]] = {"torch_native": paged_attention}


def attach(backend: Any, name: str, runtime: Runtime) -> Any:
    """Make a stock backend instance read compressed entries.

    Args:
        backend: instance of a backend in `READERS`.
        name: its name in SGLang's registry.

    Returns:
        The same instance.
    """
    stock = type(backend)
    read = READERS[name]

    def forward_extend(self, q, k, v, layer, batch, save_kv_cache=True, **options):
        out = stock.forward_extend(self, q, k, v, layer, batch, save_kv_cache, **options)
        step = runtime.step
        if step is not None and step.prefill is not None:
            heads = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
            step.prefill.observe(layer, heads)
            step.resume.overwrite(layer, heads, out.view(heads.shape), read)
            step.resume.observe(layer, heads)
        return out

    def forward_decode(self, q, k, v, layer, batch, save_kv_cache=True, **options):
        step = None if runtime.step is None else runtime.step.decode
        heads = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        if step is None or not step.reads:
            out = stock.forward_decode(self, q, k, v, layer, batch, save_kv_cache, **options)
            if step is not None:
                step.observe(layer, heads)
            return out
        if save_kv_cache and k is not None:
            compat.save_kv(self, layer, batch, k, v)
        out = torch.empty_like(heads)
        if step.plain.numel():
            out[step.plain] = compat.stock_decode_rows(self, layer, batch, heads, step.plain)
        out[step.compressed] = step.attend(layer, heads, read)
        step.observe(layer, heads)
        return out.view(q.shape)

    members = {"forward_extend": forward_extend, "forward_decode": forward_decode}
    backend.__class__ = type(f"KVPolicy{stock.__name__}", (stock,), members)
    return backend


def attend(arena: Arena, lists: Any, layer: Any, queries: torch.Tensor, read: Any) -> torch.Tensor:
    """Attention of [B, T, H, D] queries over the entry lists of a layer."""
    indptr, indices, options = lists.layer(layer.layer_id)
    pool = (arena.entries, arena.values)
    return read(queries, *pool, indptr, indices, scale=layer.scaling, **options)
