"""Layers of a request that are stored in pairs: which layers, and how they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from kvpolicy.kernels.entries import layer_pairs
from kvpolicy.kernels.entries.layer_pairs import BELOW, OWN
from kvpolicy.sglang_ext.face.host import to_device
from kvpolicy.sglang_ext.memory.arena import Arena


@dataclass(frozen=True)
class PairedLayers:
    """Which layers of a request are stored in pairs.

    Attributes:
        uppers: the upper layer of each pair.
        tokens: N of the prompt.
        paired: int32 [L] on the device, as in `Tables`.
    """

    uppers: frozenset[int]
    tokens: int
    paired: torch.Tensor

    @classmethod
    def of(cls, uppers: Sequence[int], tokens: int, arena: Arena) -> PairedLayers:
        """For a prompt of `tokens` tokens."""
        paired = torch.zeros(arena.layers, dtype=torch.int32)
        paired[list(uppers)] = 1 + OWN
        paired[[upper - 1 for upper in uppers]] = 1 + BELOW
        on_device = to_device(paired, torch.int32, arena.storage.device)
        return cls(frozenset(uppers), tokens, on_device)

    def at(self, layer: int) -> int | None:
        """`OWN` for the upper layer of a pair, `BELOW` for the lower one, None for other layers."""
        if layer in self.uppers:
            return OWN
        return BELOW if layer + 1 in self.uppers else None

    def listed(
        self, which: int, arena: Arena, entry_at: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """How one layer of a pair reads the prompt's tokens.

        Args:
            which: as of `at`.
            entry_at: from places [..., G, n] or [n] in the pair's lists to entries [..., G, n].

        Returns:
            int64 [2, G, N] entries of keys and of values, and float32 [2, G, N] scales by which
            they are multiplied.
        """
        numbers, tokens = layer_pairs.numbers(arena.storage), self.tokens
        device = numbers.device
        offsets = to_device([0, arena.value_offset], torch.int64, device).view(2, 1, 1)
        rows = layer_pairs.code_rows(tokens, numbers.shape[1])
        codes_at = entry_at(torch.arange(which * rows, (which + 1) * rows, device=device))
        codes = numbers[codes_at + offsets].flatten(2)[:, :, :tokens]
        place, scale = layer_pairs.decode(codes, torch.arange(tokens, device=device))
        return entry_at(2 * rows + place), scale
