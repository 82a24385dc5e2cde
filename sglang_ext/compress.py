"""Copying what a policy keeps of a prompt to private pages."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from kvpolicy.kernels.compact import compact
from kvpolicy.kernels.place import place
from kvpolicy.sglang_ext import request
from kvpolicy.sglang_ext.request import State

if TYPE_CHECKING:
    from kvpolicy.sglang_ext.runtime import Runtime


def compress(
    runtime: Runtime, state: State, row: int, slots: torch.Tensor, kept: torch.Tensor, run: Any
) -> None:
    """Copy a prompt's kept entries to the request's private pages, or give these back.

    They are given back where everything is kept, and where the copy saves no slots, unless the
    policy goes on while decoding from what it has kept.

    Args:
        row: of the request in SGLang's request pool.
        slots: [N] int64 slots of the prompt.
        kept: [L, G, N] bool.
        run: of the policy's program, finished.
    """
    store, counts = runtime.store, kept.sum(dim=2)
    # Where tokens have left the prefill, the prompt's own slots lack entries of deeper layers.
    left = state.progress.layer is not None
    if kept.all() and not left:
        _give_back(runtime, state)
        return
    if state.private is None:
        state.private = store.allocate(row, state.served.name, 0, state.prompt, runtime.evict)
    if not state.folds and not left and not store.saves(state.private, counts):
        _give_back(runtime, state)
        return
    if not store.grow(state.private, store.slots_for(counts), runtime.evict):
        _give_back(runtime, state)
        state.uncompressed = request.NO_SLOTS
        state.forget()
        return
    store.fill(state.private, counts)
    state.uncompressed = None
    pages = runtime.arena.pages(state.private.slots)
    for layer, start in enumerate(state.private.first_page[:, 0].tolist()):
        _copy(runtime, layer, slots, kept[layer], pages[start:], run)


def _give_back(runtime: Runtime, state: State) -> None:
    if state.private is not None:
        runtime.store.release(state.private)
        state.private = None


def _copy(
    runtime: Runtime,
    layer: int,
    slots: torch.Tensor,
    kept: torch.Tensor,
    pages: torch.Tensor,
    run: Any,
) -> None:
    """Write one layer's kept entries, merged and rotated where the policy says so."""
    arena, bound = runtime.arena, run.program.bound
    shift = run.shift(layer) if bound.positions == "slots" else None
    if bound.rules.merge is None and shift is None:
        compact(
            arena.entries,
            slots,
            kept,
            pages,
            key_base=arena.key_base(layer),
            value_offset=arena.value_offset,
        )
        return
    k, v = arena.storage[layer][:, slots].transpose(1, 2)  # each [G, N, D]
    if bound.rules.merge is not None:
        k, v = run.merged(layer, k, v)
    if shift is not None:
        k = runtime.rotary.move(k, shift)
    place(arena.entries, k, v, kept, pages, value_offset=arena.value_offset)


class timed:
    """Adds the time of a block to a request's compression seconds."""

    def __init__(self, state: State) -> None:
        self._state = state

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._state.seconds += time.perf_counter() - self._started
