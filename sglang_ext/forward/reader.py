"""Reads all entries of one request, in private pages or in ordinary slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from kvpolicy.sglang_ext.face.kernels_in_use import KernelsInUse
from kvpolicy.sglang_ext.memory.arena import Arena
from kvpolicy.sglang_ext.memory.lists import Lists
from kvpolicy.sglang_ext.request.request import RequestState


@dataclass(frozen=True)
class EntryReader:
    """Reads all entries of one request."""

    arena: Arena
    kernels: KernelsInUse

    @staticmethod
    def of(
        arena: Arena, table: torch.Tensor, request: Any, state: RequestState, length: int
    ) -> ListReader | SlotReader:
        """The reader for a request.

        Args:
            table: [rows, context] SGLang's table of slots.
            length: number of the request's tokens.
        """
        kernels = state.served.kernels
        if state.private is not None:
            return ListReader(arena, kernels, Lists(arena, [state.private], [length], table))
        slots = table[request.kv.req_pool_idx, :length].to(torch.int64)
        return SlotReader(arena, kernels, slots)

    def gathered(self, layer: int, held: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the keys and values of a layer, [G, M, D].

        Args:
            held: bool [G, M], which entries each head holds; None: all.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class ListReader(EntryReader):
    """For a request with private pages; `lists` says where its entries are."""

    lists: Lists

    def gathered(self, layer: int, held: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """As of `EntryReader`."""
        lists = self.lists.of(0, layer)
        return self.kernels.gather(self.arena.entries, self.arena.values, *lists, held)


@dataclass(frozen=True)
class SlotReader(EntryReader):
    """For a request that has lost nothing; `slots` are int64 [N] of its tokens."""

    slots: torch.Tensor

    def gathered(self, layer: int, held: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """As of `EntryReader`."""
        if held is not None:
            raise RuntimeError("entries have left a request that has no private pages")
        k, v = self.arena.storage[layer][:, self.slots].transpose(1, 2)
        return k, v
