"""Requests that decode: whether entries may leave, and who reads those of one alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from kvpolicy.dsl.execute.decode import Memory
from kvpolicy.sglang_ext.face.kernels_in_use import KernelsInUse
from kvpolicy.sglang_ext.forward.fold import Room
from kvpolicy.sglang_ext.memory.arena import Arena
from kvpolicy.sglang_ext.memory.lists import Lists
from kvpolicy.sglang_ext.request.request import State

if TYPE_CHECKING:
    from kvpolicy.sglang_ext.forward.services import Services


@dataclass(frozen=True)
class Reader:
    """Reads all entries of one request, wherever they lie."""

    arena: Arena
    kernels: KernelsInUse

    @staticmethod
    def of(
        arena: Arena, table: torch.Tensor, request: Any, state: State, length: int
    ) -> ListReader | SlotReader:
        """
        Args:
            table: [rows, context] SGLang's table of slots.
            length: tokens of the request.
        """
        kernels = state.served.kernels
        if state.private is not None:
            return ListReader(arena, kernels, Lists(arena, [state.private], [length], table))
        slots = table[request.kv.req_pool_idx, :length].to(torch.int64)
        return SlotReader(arena, kernels, slots)

    def gathered(self, layer: int, there: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the keys and values of a layer, [G, M, D].

        Args:
            there: bool [G, M], or None: all heads hold all.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class ListReader(Reader):
    """Of a request with private pages; `lists` says where its entries are."""

    lists: Lists

    def gathered(self, layer: int, there: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """As of `Reader`."""
        where = self.lists.of(0, layer)
        return self.kernels.gather(self.arena.entries, self.arena.values, *where, there)


@dataclass(frozen=True)
class SlotReader(Reader):
    """Of a request of which nothing has left; `slots` int64 [N] of its tokens."""

    slots: torch.Tensor

    def gathered(self, layer: int, there: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """As of `Reader`."""
        if there is not None:
            raise RuntimeError("entries have left a request that has no private pages")
        k, v = self.arena.storage[layer][:, self.slots].transpose(1, 2)
        return k, v


def check_last_fold(request: Any, state: State, memory: Memory) -> None:
    """Raise unless the last fold kept what it was reckoned to keep, if it did not wait."""
    landed, private = memory.land(), state.private
    if landed is None or not landed.finite or private is None or not private.full:
        return
    if landed.kept.tolist() != private.laid_out:
        raise RuntimeError(f"request {request.rid}: a fold kept other numbers of entries")


def may_leave(services: Services, room: Room, request: Any, state: State, length: int) -> bool:
    """Whether entries leave at the decode step of a request's last token.

    If they should, and there is no room for what might stay, the step is noted as skipped.

    Args:
        room: of this forward.
        length: tokens of the request, that one included.
    """
    step = length - state.prompt
    if not state.leaves_at(step):
        return False
    if room.promise(request, state, length):
        return True
    services.reports.skipped_fold(request, state, step)
    return False
