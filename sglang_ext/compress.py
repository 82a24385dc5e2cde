"""Copying what a policy keeps to private pages."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from kvpolicy.kernels.compact import compact
from kvpolicy.sglang_ext.request import State

if TYPE_CHECKING:
    from kvpolicy.sglang_ext.runtime import Runtime


def compress(runtime: Runtime, state: State, slots: torch.Tensor, kept: torch.Tensor) -> None:
    """Copy a prompt's kept entries to the request's private pages, or give these back.

    Args:
        slots: [N] int64 slots of the prompt.
        kept: [L, G, N] bool.
    """
    private, store, arena = state.private, runtime.store, runtime.arena
    counts = kept.sum(dim=2)
    if not store.saves(private, counts):
        store.release(private)
        state.private = None
        return
    store.fill(private, counts)
    pages = arena.pages(private.slots)
    starts = private.first_page[:, 0].tolist()
    for layer, start in enumerate(starts):
        compact(
            arena.entries,
            slots,
            kept[layer],
            pages[start:],
            key_base=arena.key_base(layer),
            value_offset=arena.value_offset,
        )


class timed:
    """Adds the time of a block to a request's compression seconds."""

    def __init__(self, state: State) -> None:
        self._state = state

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._state.seconds += time.perf_counter() - self._started
