"""A request's policy at one decode step: what it is shown, and what leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from kvpolicy.sglang_ext.arena import Arena
from kvpolicy.sglang_ext.fold import Fold, Room
from kvpolicy.sglang_ext.lists import Lists
from kvpolicy.sglang_ext.request import State

if TYPE_CHECKING:
    from kvpolicy.sglang_ext.runtime import Runtime

# From a layer and `there` [G, M] or None to k, v [G, M, D].
Read = Callable[[int, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]


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


class Follower:
    """One request in one decode step."""

    def __init__(
        self, runtime: Runtime, room: Room, request: Any, state: State, length: int, read: Read
    ) -> None:
        """
        Args:
            room: of this forward.
            length: tokens of the request, the new one included.
            read: of its entries, up to the new one.
        """
        self._memory, self._read = state.memory, read
        step = self._memory.generated + 1
        leaves = state.leaves_at(step)
        if leaves and not room.promise(request, state, length):
            runtime.reports.skipped_fold(request, state, step)
            leaves = False
        self._memory.step(length - 1 - state.progress.shift, leaves=leaves)
        self._fold = Fold(runtime, request, state, length) if leaves else None

    @property
    def watches(self) -> bool:
        """Whether it is to observe the layers of this step."""
        return self._fold is not None or self._memory.wants != "nothing"

    def observe(self, layer: int, queries: torch.Tensor) -> None:
        """Show a layer to the policy, after its attention.

        Args:
            queries: [H, 1, D] of the new token, as a policy sees them.
        """
        k = v = None
        there = self._memory.layout(layer).there
        wanted = self._memory.wants == "entries"
        if wanted or self._fold is not None:
            k, v = self._read(layer, there)
        choice = self._memory.observe(layer, queries, *((k, v) if wanted else (None, None)))
        if self._fold is not None:
            self._fold.add(choice, there, k, v)

    def finish(self) -> None:
        """After the forward."""
        if self._fold is not None:
            self._fold.finish()
