"""A request's policy is taken through the decode steps since it was followed last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from kvpolicy.sglang_ext.arena import Arena
from kvpolicy.sglang_ext.fold import Fold, Read, Room
from kvpolicy.sglang_ext.lists import Lists
from kvpolicy.sglang_ext.request import State

if TYPE_CHECKING:
    from kvpolicy.sglang_ext.runtime import Runtime


def read_lists(arena: Arena, lists: Lists, index: int, gather: Callable[..., Any]) -> Read:
    """Reads the entries of one of the requests of entry lists.

    Args:
        gather: as in `kernels.gather`.
    """

    def read(layer: int, there: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        return gather(arena.entries, arena.values, *lists.of(index, layer), there)

    return read


def read_slots(arena: Arena, slots: torch.Tensor) -> Read:
    """Reads the entries of a request that has no private pages: slots [N] int64."""

    def read(layer: int, there: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        if there is not None and not bool(there.all()):
            raise RuntimeError("entries have left a request that has no private pages")
        k, v = arena.storage[layer][:, slots].transpose(1, 2)
        return k, v

    return read


def read_request(
    arena: Arena, table: torch.Tensor, request: Any, state: State, length: int
) -> tuple[Lists | None, Read]:
    """Reads all entries of a request, wherever they lie.

    Args:
        table: [rows, context] SGLang's table of slots.
        length: tokens of the request.

    Returns:
        Where its entries are, if some are in private pages; and what reads them.
    """
    if state.private is None:
        slots = table[request.kv.req_pool_idx, :length].to(torch.int64)
        return None, read_slots(arena, slots)
    lists = Lists(arena, [state.private], [length], table)
    return lists, read_lists(arena, lists, 0, state.served.kernels.gather)


def no_queries(state: State, arena: Arena) -> torch.Tensor:
    """[H, 1, D] zeros: what a policy is shown that reads no queries."""
    shape = state.served.bound.shape
    return arena.storage.new_zeros(shape.heads, 1, shape.head_dim)


@dataclass(frozen=True)
class Following:
    """Decode steps that one request's policy is taken through at once; all tokens are cached.

    Attributes:
        length: tokens of the request, those of the steps included.
        positions: [T] of the steps' tokens.
        queries: from a layer to [H, T, D], as policies see them.
        read: of its entries, up to the last step's.
    """

    request: Any
    state: State
    length: int
    positions: Sequence[int]
    queries: Callable[[int], torch.Tensor]
    read: Read

    def go(self, runtime: Runtime, *, leaves: bool) -> None:
        """Take the policy through the steps, and fold what stays.

        Args:
            leaves: whether entries may leave at the last step.
        """
        choices = self.state.memory.follow(self.positions, self.queries, self.read, leaves=leaves)
        if choices:
            Fold(runtime, self.request, self.state, self.length, self.read).finish(choices)


def may_leave(runtime: Runtime, room: Room, request: Any, state: State, length: int) -> bool:
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
    runtime.reports.skipped_fold(request, state, step)
    return False
