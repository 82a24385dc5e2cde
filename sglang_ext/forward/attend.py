"""Attention over the entry lists of a layer, for requests that are read one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from kvpolicy.sglang_ext.memory.arena import Arena
from kvpolicy.sglang_ext.memory.lists import Lists


def attend(
    arena: Arena, layer: Any, read: Callable[..., torch.Tensor], lists: Lists, queries: torch.Tensor
) -> torch.Tensor:
    """Attention of [B, T, H, D] queries over the entry lists of a layer.

    Args:
        read: `paged_attention`.
    """
    indptr, indices, apart = lists.layer(layer.layer_id)
    pool = (arena.entries, arena.values)
    return read(queries, *pool, indptr, indices, scale=layer.scaling, apart=apart)
