"""A request's policy is taken through the decode steps since it was followed last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from kvpolicy.dsl.execute.decode import Memory, Read
from kvpolicy.dsl.execute.kernels import Entries, Keys
from kvpolicy.sglang_ext.face.kernels_in_use import KernelsInUse
from kvpolicy.sglang_ext.forward.fold import Fold, Room
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

    def given(self, layer: int, there: torch.Tensor | None) -> tuple[Keys, Keys]:
        """Keys and values of a layer as policies' programs take them.

        Args:
            there: bool [G, M], or None: all heads hold all.
        """
        if not self.kernels.read_the_pool:
            return self.gathered(layer, there)
        ids = self._ids(layer, there)
        return Entries(self.arena.entries, ids), Entries(self.arena.values, ids)

    def gathered(self, layer: int, there: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the keys and values of a layer, [G, M, D]; arguments as of `given`."""
        raise NotImplementedError

    def _ids(self, layer: int, there: torch.Tensor | None) -> torch.Tensor:
        """int64 [G, M] entries of the pool; where a head holds nothing, any."""
        raise NotImplementedError


@dataclass(frozen=True)
class ListReader(Reader):
    """Of a request with private pages; `lists` says where its entries are."""

    lists: Lists

    def gathered(self, layer: int, there: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """As of `Reader`."""
        where = self.lists.of(0, layer)
        return self.kernels.gather(self.arena.entries, self.arena.values, *where, there)

    def _ids(self, layer: int, there: torch.Tensor | None) -> torch.Tensor:
        indptr, indices = self.lists.of(0, layer)
        if there is None:
            return indices.view(self.arena.kv_heads, -1)
        return indices[(indptr[:-1, None] + there.cumsum(1) - 1).clamp(min=0)]


@dataclass(frozen=True)
class SlotReader(Reader):
    """Of a request of which nothing has left; `slots` int64 [N] of its tokens."""

    slots: torch.Tensor

    def gathered(self, layer: int, there: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """As of `Reader`."""
        _check_whole(there)
        k, v = self.arena.storage[layer][:, self.slots].transpose(1, 2)
        return k, v

    def _ids(self, layer: int, there: torch.Tensor | None) -> torch.Tensor:
        _check_whole(there)
        arena = self.arena
        heads = torch.arange(arena.kv_heads, device=self.slots.device)
        return arena.key_base(layer) + self.slots * arena.kv_heads + heads[:, None]


def _check_whole(there: torch.Tensor | None) -> None:
    if there is not None:
        raise RuntimeError("entries have left a request that has no private pages")


def no_queries(state: State, arena: Arena) -> torch.Tensor:
    """[H, 1, D] zeros: what a policy is shown that reads no queries."""
    shape = state.served.bound.shape
    return arena.storage.new_zeros(shape.heads, 1, shape.head_dim)


@dataclass(frozen=True)
class Following:
    """Decode steps that one request's policy is taken through at once; all tokens are cached.

    Attributes:
        memory: what its policy remembers.
        length: tokens of the request, those of the steps included.
        positions: [T] of the steps' tokens.
        queries: from a layer to [H, T, D], as policies see them.
        reader: of all its entries.
        read: of those up to the last step's; None: these are all.
    """

    request: Any
    state: State
    memory: Memory
    length: int
    positions: Sequence[int]
    queries: Callable[[int], torch.Tensor]
    reader: Reader
    read: Read | None = None

    def go(self, services: Services, *, leaves: bool) -> Fold | None:
        """Take the policy through the steps.

        The host does not wait for the device unless entries are merged.

        Args:
            leaves: whether entries may leave at the last step.

        Returns:
            What is to be written if some do; None if none may.
        """
        check_last_fold(self.request, self.state, self.memory)
        read = self.read or self.reader.given
        choices = self.memory.follow(self.positions, self.queries, read, leaves=leaves)
        if not choices:
            return None
        rows = self.reader.gathered
        return Fold(services, self.request, self.state, self.length, rows, choices)


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
