"""Attention over the entry lists of a layer, for requests that are read one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from kvpolicy.sglang_ext.face import compat
from kvpolicy.sglang_ext.memory.arena import Arena
from kvpolicy.sglang_ext.memory.lists import Lists


def attend(
    arena: Arena, layer: Any, read: Callable[..., torch.Tensor], lists: Lists, queries: torch.Tensor
) -> torch.Tensor:
    """Attention of [B, T, H, D] queries over the entry lists of a layer.

    Args:
        read: `paged_attention`, of torch or Triton.
    """
    indptr, indices, reading = lists.layer(arena.place_of(layer.layer_id))
    key_scale, value_scale = scales_of(arena, layer)
    arguments = (queries, arena.entries, arena.values, indptr, indices)
    out = read(*arguments, scale=layer.scaling * key_scale, reading=reading)
    return out if value_scale == 1.0 else out * value_scale


def scales_of(arena: Arena, layer: Any) -> tuple[float, float]:
    """Scales of a layer's keys and values, numbers of the host, inside a capture too."""
    return (1.0, 1.0) if arena.scales is None else compat.kv_scales(layer)
