"""A layer's entries in a `Memory`, as tensors to compare."""

from __future__ import annotations

import torch
from kvpolicy.dsl.execute.decode.lists import Folded
from kvpolicy.dsl.execute.decode.memory import Memory


def remembered(memory: Memory, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The entries of a layer.

    Returns:
        int64 [M], ascending positions that some KV head holds; bool [G, M], which of them each
        KV head holds.
    """
    memory.read_numbers()
    found, place = memory.block
    block, there = (
        (found.block, found.staying) if isinstance(found, Folded) else (found, found.held_mask)
    )
    own = block.part(there, place, layer)
    positions = block.positions[place * block.layers + layer, block.width - own.shape[1] :]
    some = own.any(0)
    return positions[some], own[:, some]
