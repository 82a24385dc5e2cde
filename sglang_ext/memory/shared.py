"""Layers of a request that are stored in pairs: which they are, and how they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from kvpolicy.kernels.attention.paged_attention import TOGETHER, Apart
from kvpolicy.kernels.entries import pairs
from kvpolicy.kernels.entries.pairs import BELOW, OWN
from kvpolicy.sglang_ext.face.host import to_device
from kvpolicy.sglang_ext.memory.arena import Arena


@dataclass(frozen=True)
class Shared:
    """Which layers of a request are stored in pairs.

    Attributes:
        uppers: upper layers.
        tokens: N of the prompt.
        paired: int32 [L] on the device, as in the device tables.
    """

    uppers: frozenset[int]
    tokens: int
    paired: torch.Tensor

    @classmethod
    def of(cls, uppers: Sequence[int], tokens: int, arena: Arena) -> Shared:
        """Of a prompt of so many tokens."""
        paired = torch.zeros(arena.layers, dtype=torch.int32)
        paired[list(uppers)] = 1 + OWN
        paired[[upper - 1 for upper in uppers]] = 1 + BELOW
        on_device = to_device(paired, torch.int32, arena.storage.device)
        return cls(frozenset(uppers), tokens, on_device)

    def at(self, layer: int) -> int | None:
        """Which of a pair a layer is; None if it is whole."""
        if layer in self.uppers:
            return OWN
        return BELOW if layer + 1 in self.uppers else None


def separate(
    shared: Mapping[int, Shared],
    layer: int,
    arena: Arena,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    entry_at: Callable[[int, torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, Apart]:
    """Entry lists of a layer where some requests store it in a pair.

    Args:
        shared: such requests among the B, by their index; all their lists at this layer are equally
            long and begin with the N tokens of the prompt.
        indptr: [B * G + 1] int64, on the host.
        indices: [nnz] int64; what stands there for these tokens is not used.
        entry_at: from (a request's index, places [..., G, n] or [n] in its pages) to entries
            [..., G, n].

    Returns:
        indices [nnz], and what `paged_attention` takes besides.
    """
    found = {
        i: (which, each.tokens)
        for i, each in shared.items()
        if (which := each.at(layer)) is not None
    }
    if not found:
        return indices, TOGETHER
    numbers, heads = pairs.numbers(arena.storage), arena.kv_heads
    device = indices.device
    offsets = to_device([0, arena.value_offset], torch.int64, device).view(2, 1, 1)
    entries = indices.repeat(2, 1)  # of keys and of values
    scale = torch.ones(entries.shape, device=device)
    for i, (which, tokens) in found.items():
        block = slice(int(indptr[i * heads]), int(indptr[(i + 1) * heads]))
        rows = pairs.code_rows(tokens, numbers.shape[1])
        codes_at = entry_at(i, torch.arange(which * rows, (which + 1) * rows, device=device))
        codes = numbers[codes_at + offsets].flatten(2)[:, :, :tokens]  # [2, G, N]
        place, by = pairs.decode(codes, torch.arange(tokens, device=device))
        entries[:, block].view(2, heads, -1)[:, :, :tokens] = entry_at(i, 2 * rows + place)
        scale[:, block].view(2, heads, -1)[:, :, :tokens] = by
    return entries[0], Apart(entries[1], scale[0], scale[1])
