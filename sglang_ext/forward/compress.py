"""Copying what a policy keeps of a prompt to private pages, or moving it within its slots."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from kvpolicy.dsl.execute.prefill.finished import FinishedPrefill
from kvpolicy.kernels.entries.compact_within import compact_within
from kvpolicy.kernels.entries.rounding import largest
from kvpolicy.sglang_ext.memory.private import Private
from kvpolicy.sglang_ext.request.reasons import Reason
from kvpolicy.sglang_ext.request.request import RequestState, Served

if TYPE_CHECKING:
    from kvpolicy.sglang_ext.forward.services import Services
    from kvpolicy.sglang_ext.memory.arena import Arena
    from kvpolicy.sglang_ext.memory.store import Store


def compress(
    services: Services,
    request: Any,
    state: RequestState,
    slots: torch.Tensor,
    kept: torch.Tensor,
    counts: torch.Tensor,
    finished: FinishedPrefill,
) -> None:
    """Copy a prompt's kept entries to the request's private pages, or give these back.

    They are given back if everything is kept, if there are no slots for the copy, or if it saves
    none and the policy does not go on. If tokens have left the prefill, there must be a copy.

    Args:
        request: SGLang's.
        slots: int64 [N] slots of the prompt.
        kept: bool [l, g, N], of the layers and KV heads that are here.
        counts: int64 [L, G] entries that each list keeps, on all ranks and stages, on the host.
        finished: the policy's prefill of the prompt.

    Raises:
        RuntimeError: tokens have left the prefill, and there are no slots for the copy.
    """
    store, needed = services.store, slots_of_copy(services.store, state, counts)
    if needed is None:
        give_back(services, state)
        return
    row, name = request.kv.req_pool_idx, state.served.name
    first = request.kv.cache_protected_len
    if state.in_place and needed <= state.prompt - first:
        borrowed_slots = slots[first : first + needed].to(torch.int32)
        state.private = private = store.borrow(row, name, borrowed_slots, state.prompt)
        store.fill(private, counts)
        state.uncompressed = None
        first_page, total = private.layout.first_page, int(store.here(counts).sum())
        compact_within(services.arena.storage, slots, kept, total, private.slots, first_page)
        return
    if state.private is None:
        state.private = store.allocate(row, name, 0, state.prompt, services.evict)
    if state.private is None or not store.grow(state.private, needed, services.evict):
        if state.progress.layer is not None:  # its own slots lack what deeper layers never computed
            raise RuntimeError(f"request {request.rid}: no slots are left for what is kept")
        give_back(services, state)
        state.uncompressed = Reason.NO_SLOTS
        state.forget()
        return
    store.fill(state.private, counts)
    state.uncompressed = None
    copy_kept(services, state.served, state.compressed_copy, slots, kept, counts, finished)


def slots_of_copy(store: Store, state: RequestState, counts: torch.Tensor) -> int | None:
    """Slots that a copy of [L, G] entries takes; None if the request is to have no copy."""
    # Where tokens have left the prefill, the prompt's own slots lack entries of deeper layers.
    if state.progress.layer is not None:
        return store.slots_for(counts)
    if int(counts.sum()) == counts.numel() * state.prompt:
        return None
    needed = store.slots_for(counts)
    return needed if state.folds or needed < state.prompt else None


def give_back(services: Services, state: RequestState) -> None:
    """Free the private slots of a request, which goes on without a copy."""
    if state.private is not None:
        services.store.release(state.private)
        state.private = None


def copy_kept(
    services: Services,
    served: Served,
    private: Private,
    slots: torch.Tensor,
    kept: torch.Tensor,
    counts: torch.Tensor,
    finished: FinishedPrefill,
) -> None:
    """Write all layers' kept entries to private pages, merged and turned as the policy says."""
    arena, bound, kernels, layout = services.arena, served.bound, served.kernels, private.layout
    if bound.folded.prefill.merge is None and bound.positions != "slots":
        kernels.compact_layers(arena.storage, slots, kept, private.slots, layout.first_page)
        return
    pages = arena.pages(private.slots)
    leaving = [0] * len(layout.layer_starts)
    if bound.folded.prefill.merge is not None:
        held_counts = [finished.reached(layer).numel() for layer in arena.span]
        leaving = [
            n - int(counts[layer].min()) for n, layer in zip(held_counts, arena.span, strict=True)
        ]
    for place, most in enumerate(leaving):
        if most and finished.merges_need_ranks:
            finished.begin_merge(arena.span[place], *_numbers(arena, place, slots), most)
    for place, (start, most) in enumerate(zip(layout.layer_starts, leaving, strict=True)):
        layer = arena.span[place]
        if most:
            merged = finished.merged(layer, *_numbers(arena, place, slots), most)
            k, v = arena.unscaled(place, *merged)
            if arena.scales is not None:  # the merge knows of the numbers without their scales
                k, v = _storable(arena, place, slots, k, v)
        else:
            k, v = arena.storage[place][:, slots].transpose(1, 2)  # each [G, N, D]
        shift = finished.shift(layer)
        if shift is not None:
            k = services.rotary.move(k, shift, kernels.rotate)
        layer_pages = pages[start:]
        kernels.place(
            arena.entries, k, v, kept[place], layer_pages, value_offset=arena.value_offset
        )


def _storable(
    arena: Arena, place: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> list[torch.Tensor]:
    """Merged keys and values [G, N, D] of a layer; as they were where 8 bits would be infinite."""
    limit = largest(arena.storage.dtype)
    old_vectors = arena.storage[place][:, slots].transpose(1, 2)
    return [
        torch.where((x.abs() <= limit).all(-1, keepdim=True), x, old.to(x.dtype))
        for x, old in zip((k, v), old_vectors, strict=True)
    ]


def _numbers(arena: Arena, place: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [G, N, D] of a layer at slots, times their scales."""
    k, v = arena.at_slots(place, slots)
    return k.dense, v.dense


class timed:
    """Adds the time of a block to a request's compression seconds."""

    def __init__(self, state: RequestState) -> None:
        self._state = state

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._state.reported.seconds += time.perf_counter() - self._started
