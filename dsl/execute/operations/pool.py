"""Pooling along tokens in the torch program.

Dimensions: G KV heads, n candidates of a layer.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from kvpolicy.dsl.execute.tensors.values import Frame, Value, aligned, filled
from kvpolicy.dsl.ir import counts
from kvpolicy.dsl.ir.nodes import Node


def pool(node: Node, frame: Frame, x: Value, width: Value) -> Value:
    """Maximum, or sum divided by the width, of the present neighbours, centred.

    Where KV heads hold different tokens, neighbours are those of the same head.
    """
    size = max(1, counts.whole(float(width.data), 2**31))
    largest = node.op == "maxpool"
    data = filled(x, -math.inf if largest else 0.0)
    dim = x.axes.index("token")
    data = data.transpose(-1, dim)
    if frame.held_mask is None or "kv" not in x.axes:
        pooled = _pooled(data, size, largest)
    else:
        rest = tuple(axis for axis in x.axes if axis != "token")
        # Each head's own entries first, in order.
        order = frame.held_mask.logical_not().long().argsort(dim=-1, stable=True)
        order = aligned(order, ("kv", "token"), (*rest, "token")).expand(data.shape)
        ordered = _pooled(data.gather(-1, order), size, largest)
        pooled = torch.empty_like(ordered).scatter_(-1, order, ordered)
    return Value(pooled.transpose(-1, dim), x.axes, x.mask, x.mask_axes, finite=x.finite)


def _pooled(data: torch.Tensor, size: int, largest: bool) -> torch.Tensor:
    """Pools the last dimension."""
    shape = data.shape
    if not data.numel():
        return data
    # Beyond the ends there is nothing, however wide the pool.
    before, after = min((size - 1) // 2, shape[-1]), min(size // 2, shape[-1])
    filler = -math.inf if largest else 0.0
    flat = F.pad(data.reshape(1, -1, shape[-1]), (before, after), value=filler)
    reach = before + after + 1
    pooled = F.max_pool1d(flat, reach, 1) if largest else F.avg_pool1d(flat, reach, 1)
    if not largest and reach != size:
        pooled = pooled * (reach / size)
    return pooled.reshape(shape)
