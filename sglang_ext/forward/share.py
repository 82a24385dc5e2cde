"""Requests that store some layers in pairs: section `share` of a policy (MiniCache).

An upper layer and the one below it store one direction per token, KV head and tensor (key, value),
and a length for each layer, all in one list of private pages per KV head
(`kernels/entries/layer_pairs.py`). Tokens of `except` keep both originals. Keys and values are
excepted independently, so one entry may hold a direction as key and an original as value; the list
has as many further entries as keys or values are excepted, whichever number is larger. Layers
without a pair are copied whole. Later tokens lie in ordinary slots, whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from kvpolicy.dsl.execute.prefill.finished import FinishedPrefill
from kvpolicy.dsl.execute.tensors.heads import Heads
from kvpolicy.kernels.entries import layer_pairs
from kvpolicy.kernels.entries.rounding import largest
from kvpolicy.sglang_ext.face.host import to_device, to_host
from kvpolicy.sglang_ext.memory.arena import Arena
from kvpolicy.sglang_ext.memory.paired_layers import PairedLayers

if TYPE_CHECKING:
    from kvpolicy.sglang_ext.forward.services import Services
    from kvpolicy.sglang_ext.request.request import RequestState

_TENSORS = ("key", "value")


def compress(
    services: Services, state: RequestState, slots: torch.Tensor, finished: FinishedPrefill
) -> None:
    """Store a prompt's layers in pairs in its private pages, or give these back.

    They are given back if so many tokens are excepted that no slot is saved, or if the model's
    tensors are not finite.

    Args:
        slots: int64 [N] slots of the prompt.
        finished: the policy's prefill of the prompt.
    """
    private, store, arena = state.compressed_copy, services.store, services.arena
    kernels, uppers = state.served.kernels, state.served.upper_layers
    unpaired = [n for n in range(arena.layers) if n not in uppers and n + 1 not in uppers]
    heads = services.ranks.heads
    lists = torch.zeros((arena.layers, store.kv_heads), dtype=torch.int64)
    lists[unpaired] = state.prompt
    pages = arena.pages(private.slots)
    # One pair at a time, so that only one is held twice.
    for layer in uppers:
        rows = None if finished.not_finite else paired(arena, slots, layer, finished, heads)
        if rows is not None:
            lists[layer] = rows.entries
        if rows is None or store.slots_for(lists) >= state.prompt:
            store.release(private)
            state.private = None
            return
        first_page = store.lay_out(lists)
        list_pages = pages[int(first_page[layer, 0]) :]
        kernels.place(arena.entries, *rows.dense, list_pages, value_offset=arena.value_offset)
        _put_codes(arena, pages, first_page[layer], rows.codes)
    private.shared = PairedLayers.of(uppers, state.prompt, arena)
    store.fill(private, lists)
    size = (arena.layers, arena.kv_heads, state.prompt)
    kept = torch.zeros(size, dtype=torch.bool, device=slots.device)
    for layer in unpaired:
        kept[layer] = True
    layout = private.layout
    kernels.compact_layers(arena.storage, slots, kept, private.slots, layout.first_page)
    for upper in uppers:
        layout.first_page[upper - 1] = layout.first_page[upper]
    private.layout = replace(layout, counts=torch.full_like(layout.counts, state.prompt))


@dataclass(frozen=True)
class _PairRows:
    """A pair's list before it is written.

    Attributes:
        entries: int64 [G] on the host, entries of each KV head's list, on all ranks.
        dense: k, v [g, M, D] and, bool [g, M], which rows a list has; rows of codes are zeros.
        codes: float32 [2, g, 2K, F] of (key, value).
    """

    entries: torch.Tensor
    dense: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    codes: torch.Tensor


def paired(
    arena: Arena, slots: torch.Tensor, layer: int, finished: FinishedPrefill, heads: Heads
) -> _PairRows:
    """The list of an upper layer and the one below it; the host waits for its length."""
    storage, tokens = arena.storage, slots.numel()
    upper = storage[layer][:, slots].transpose(1, 2)  # [2, G, N, D]
    below = storage[layer - 1][:, slots].transpose(1, 2)
    (below_k, below_v), (k, v) = (arena.at_slots(place, slots) for place in (layer - 1, layer))
    shared = finished.shared(layer, (below_k.dense, below_v.dense), (k.dense, v.dense))
    excepted = torch.stack([shared[name].excepted for name in _TENSORS])
    if arena.scales is not None:  # directions have none: they are stored as they are
        limit = largest(storage.dtype)
        directions = [shared[name].direction.abs().amax(-1) for name in _TENSORS]
        excepted = excepted | (torch.stack(directions) > limit)
    # Of entries without their scales: reading a layer multiplies all of it by its scale.
    lengths = torch.stack([below, upper]).double().norm(dim=-1).float()  # [2, 2, G, N]
    floats = layer_pairs.floats_of_row(storage.shape[4], storage.dtype)
    encoded = [layer_pairs.encode(lengths[:, i], excepted[i]) for i in range(2)]
    codes = torch.stack([layer_pairs.rows_of(layer_codes, floats) for layer_codes in encoded])
    entries = codes.shape[2] + tokens + excepted.sum(dim=2).amax(dim=0)
    (list_lengths,) = to_host(heads.gathered([(entries, 0)]))
    longest = int(heads.part(list_lengths, 0).max())
    holds = torch.arange(longest, device=slots.device) < entries[:, None]
    code_rows, extra = codes.shape[2], holds.shape[1] - codes.shape[2] - tokens
    keys, values = (
        torch.nn.functional.pad(
            _list(direction, upper[i], below[i], excepted[i], extra), (0, 0, code_rows, 0)
        )
        for i, direction in enumerate(shared[name].direction for name in _TENSORS)
    )
    return _PairRows(list_lengths, (keys, values, holds), codes)


def _put_codes(
    arena: Arena, pages: torch.Tensor, first_page: torch.Tensor, codes: torch.Tensor
) -> None:
    """Write codes to the front of a pair's lists, bit by bit.

    Args:
        pages: int64, of the request.
        first_page: [g] of the lists, on the host.
        codes: float32 [2, g, 2K, F].
    """
    first = to_device(first_page, torch.int64, pages.device)
    place = torch.arange(codes.shape[2], device=pages.device)
    number = first[:, None] + place // arena.kv_heads
    entries = pages[number] * arena.kv_heads + place % arena.kv_heads
    numbers = layer_pairs.numbers(arena.storage)
    numbers[entries], numbers[entries + arena.value_offset] = codes


def _list(
    direction: torch.Tensor,
    upper: torch.Tensor,
    below: torch.Tensor,
    excepted: torch.Tensor,
    extra: int,
) -> torch.Tensor:
    """[g, N + extra, D] rows of one tensor: the tokens', then the lower layer's excepted ones."""
    rows = torch.where(excepted[:, :, None], upper.to(direction.dtype), direction)
    first = (~excepted).to(torch.uint8).argsort(dim=1, stable=True)[:, :extra]
    lower = below.to(rows.dtype).gather(1, first[:, :, None].expand(-1, -1, below.shape[2]))
    return torch.cat([rows, lower], dim=1)
