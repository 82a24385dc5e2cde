"""Folds: at a decode step entries leave, and what stays is written to private pages.

A fold takes in everything that a request has cached: its private pages, its tail in ordinary slots
and, the first time, a prompt that still lies in the radix cache, of which it makes a copy. All of
it is read before anything is written; then the tail's slots are freed, and the private slots become
as many as are needed.

The host waits for the device where the policy decides (dsl/torch_decode.py: once per layer), and
once after the last layer, for how many entries stay.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from kvpolicy.kernels.rounding import rounded
from kvpolicy.sglang_ext import compat
from kvpolicy.sglang_ext.host import to_host
from kvpolicy.sglang_ext.request import State

if TYPE_CHECKING:
    from kvpolicy.sglang_ext.runtime import Runtime


class Room:
    """Slots that the folds of one forward may take, found before anything is chosen.

    A policy cannot take back what it let leave, so a fold is begun only if it can be finished.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._promised = 0

    def promise(self, request: Any, state: State, length: int) -> bool:
        """Whether there are slots for a fold even if nothing leaves; they count as taken then.

        Args:
            length: tokens of the request, the new one included.
        """
        store, tree = self._runtime.store, self._runtime.tree
        need = store.slots_for(self._all(state, length))
        if state.private is not None:
            need -= state.private.slots.numel()
        free = store.allocator.available_size() + tree.evictable_size()
        if state.published:
            end = length // tree.page_size * tree.page_size
            need -= max(end - max(request.kv.cache_protected_len, state.prompt), 0)
            free += compat.locked_alone(tree, request)
        need = max(need, 0)
        if self._promised + need > free:
            return False
        self._promised += need
        return True

    def _all(self, state: State, length: int) -> torch.Tensor:
        """[L, G] entries that are cached now, on the host."""
        private, arena = state.private, self._runtime.arena
        if private is None:
            return torch.full((arena.layers, arena.kv_heads), length)
        return torch.tensor(private.laid_out) + (length - private.tail_start)


@dataclass(frozen=True)
class _Rows:
    """One layer's candidates.

    Attributes:
        k, v: [G, M, D] in the pool's dtype.
        kept: [G, M] bool.
        counts: [2, G] int64, how many were there and how many are kept.
    """

    k: torch.Tensor
    v: torch.Tensor
    kept: torch.Tensor
    counts: torch.Tensor


class Fold:
    """What stays of one request, from its first layer to the end of the forward."""

    def __init__(self, runtime: Runtime, request: Any, state: State, length: int) -> None:
        """
        Args:
            length: tokens of the request, the new one included.
        """
        self._runtime, self._request, self._state = runtime, request, state
        self._length = length
        self._layers: list[_Rows] = []
        self._seconds = 0.0

    def add(
        self, choice: Any, there: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """The next layer.

        Args:
            choice: of the request's memory; None if nothing leaves at this layer.
            there: [G, M] bool of the candidates; None: all heads hold all.
            k, v: [G, M, D] as they are cached.
        """
        started = time.perf_counter()
        if there is None:
            there = torch.ones(k.shape[:2], dtype=torch.bool, device=k.device)
        kept = there
        if choice is not None:
            kept = choice.kept
            k = k if choice.k is None else choice.k
            v = v if choice.v is None else choice.v
            if choice.shift is not None:
                rotate = self._state.served.kernels.rotate
                k = self._runtime.rotary.move(k, choice.shift, rotate)
        dtype = self._runtime.arena.storage.dtype
        counts = torch.stack([there.sum(dim=1), kept.sum(dim=1)])
        self._layers.append(_Rows(rounded(k, dtype), rounded(v, dtype), kept, counts))
        self._seconds += time.perf_counter() - started

    def finish(self) -> None:
        """After the forward: write what stays; if nothing left, all stays where it is."""
        started = time.perf_counter()
        there, counts = to_host([torch.stack([x.counts for x in self._layers])])[0].unbind(1)
        dropped = int((there - counts).sum())
        if dropped == 0:
            return
        runtime, state = self._runtime, self._state
        store = runtime.store
        if state.private is None:
            row = self._request.kv.req_pool_idx
            state.private = store.allocate(row, state.served.name, 0, self._length, runtime.evict)
        state.private.tail_start = self._length
        runtime.detach(self._request, state)
        if not store.grow(state.private, store.slots_for(counts), runtime.evict):
            raise RuntimeError(f"request {self._request.rid}: the slots for its fold are gone")
        store.fill(state.private, counts)
        self._write()
        state.folded += 1
        state.dropped += dropped
        seconds = self._seconds + time.perf_counter() - started
        runtime.reports.finished_fold(self._request, state, seconds)

    def _write(self) -> None:
        private, arena = self._state.private, self._runtime.arena
        place, offset = self._state.served.kernels.place, arena.value_offset
        pages = arena.pages(private.slots)
        for rows, start in zip(self._layers, private.layer_starts, strict=True):
            place(arena.entries, rows.k, rows.v, rows.kept, pages[start:], value_offset=offset)
