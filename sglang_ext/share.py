"""Requests of which some layers are stored in pairs: section `share` of a policy (MiniCache).

An upper layer and the one below it store one direction per token, KV head and tensor (key, value)
in the pool, and a length for each layer beside it. Tokens of `except` keep both originals. The
pair and a KV head share one list of pages, of N + E entries:

entry t, t < N   the direction of token t, or the upper layer's original where t is excepted
entry N + r      the lower layer's original of the r-th excepted token

Keys and values are excepted independently, so in one entry the key may be a direction and the value
an original; E is the larger of both numbers. Layers without a pair are copied whole. What is
decoded later lies in ordinary slots, whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from kvpolicy.dsl.bind import Bound
from kvpolicy.sglang_ext.host import to_host

if TYPE_CHECKING:
    from kvpolicy.sglang_ext.request import State
    from kvpolicy.sglang_ext.runtime import Runtime

BELOW, OWN = 0, 1
KEY, VALUE = 0, 1


@dataclass(frozen=True)
class Pair:
    """What one list of a pair does not hold.

    Attributes:
        lengths: [2, 2, G, N] float32 of (below, own) and (key, value), by which an entry is
            multiplied when it is read; 1 where it is an original.
        excepted: [2, G, N] bool of (key, value).
    """

    lengths: torch.Tensor
    excepted: torch.Tensor

    @property
    def entries(self) -> torch.Tensor:
        """[G] int64 entries of each KV head's list."""
        return self.excepted.shape[2] + self.excepted.sum(dim=2).amax(dim=0)

    def places(self, tensor: int) -> torch.Tensor:
        """[G, N] int64, where the lower layer's tokens stand in the list."""
        tokens = self.excepted.shape[2]
        excepted = self.excepted[tensor]
        own = torch.arange(tokens, device=excepted.device)
        return torch.where(excepted, tokens - 1 + excepted.cumsum(dim=1), own)


@dataclass
class Shared:
    """The pairs of one request, by upper layer."""

    pairs: dict[int, Pair] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Memory outside the pool."""
        tensors = (t for p in self.pairs.values() for t in (p.lengths, p.excepted))
        return sum(t.numel() * t.element_size() for t in tensors)

    def at(self, layer: int) -> tuple[Pair, int] | None:
        """The pair that a layer belongs to and which of the two it is; None if it is whole."""
        if layer in self.pairs:
            return self.pairs[layer], OWN
        return (self.pairs[layer + 1], BELOW) if layer + 1 in self.pairs else None


def upper_layers(bound: Bound) -> list[int]:
    """Layers that are stored with the one below, from the bottom."""
    if bound.share is None:
        return []
    return [n for n in range(bound.shape.layers) if bound.number(bound.share.when, 1, n)]


def unserved(bound: Bound) -> str | None:
    """Why sharing would save nothing, in one sentence; None if it does or is not asked for."""
    if bound.share is None:
        return None
    if not upper_layers(bound):
        layers = bound.shape.layers
        return (
            f"`share.when` holds at none of the model's {layers} layers; nothing would be shared."
        )
    if set(bound.share.apply) != {"key", "value"}:
        return "`share.apply` leaves out keys or values; a server shares both or saves nothing."
    return None


def compress(runtime: Runtime, state: State, slots: torch.Tensor, run: Any) -> None:
    """Store a prompt's layers in pairs in its private pages, or give these back.

    They are given back where so many tokens are excepted that no slot is saved, or where the
    model's tensors are not finite.

    Args:
        slots: [N] int64 slots of the prompt.
        run: of the policy's program, finished.
    """
    private, store, arena = state.private, runtime.store, runtime.arena
    kernels, uppers = state.served.kernels, state.served.upper_layers
    whole = [n for n in range(arena.layers) if n not in uppers and n + 1 not in uppers]
    lists = torch.zeros((arena.layers, arena.kv_heads), dtype=torch.int64)
    lists[whole] = state.prompt
    shared, pages = Shared(), arena.pages(private.slots)
    # The pairs one by one, so that only one of them is held twice.
    for layer in uppers:
        rows = None if run.not_finite else _paired(arena.storage, slots, layer, run)
        if rows is not None:
            shared.pairs[layer], lists[layer] = rows.pair, rows.entries
        if rows is None or not store.saves(private, lists):
            store.release(private)
            state.private = None
            return
        first = int((-(-lists[:layer] // arena.kv_heads)).sum())
        kernels.place(arena.entries, *rows.dense, pages[first:], value_offset=arena.value_offset)
    store.fill(private, lists)
    kept = torch.zeros((*lists.shape, state.prompt), dtype=torch.bool, device=slots.device)
    for layer in whole:
        kept[layer] = True
    kernels.compact_layers(arena.storage, slots, kept, private.slots, private.first_page)
    for upper in uppers:
        private.first_page[upper - 1] = private.first_page[upper]
    private.counts = torch.full_like(private.counts, state.prompt)
    private.shared = shared


@dataclass(frozen=True)
class _Rows:
    """A pair's list before it is written.

    Attributes:
        entries: [G] int64 on the host, M of each KV head.
        dense: k, v [G, M, D] and which rows there are [G, M].
    """

    pair: Pair
    entries: torch.Tensor
    dense: tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _paired(storage: torch.Tensor, slots: torch.Tensor, layer: int, run: Any) -> _Rows:
    """The list of an upper layer and the one below it; the host waits for its length."""
    own = storage[layer][:, slots].transpose(1, 2)  # [2, G, N, D]
    below = storage[layer - 1][:, slots].transpose(1, 2)
    found = run.shared(layer, *below, *own)
    excepted = torch.stack([found.except_k, found.except_v])
    lengths = torch.stack([below, own]).double().norm(dim=-1).float()
    pair = Pair(lengths.masked_fill(excepted, 1.0), excepted)
    entries = pair.entries
    (on_host,) = to_host([entries])
    place_of_row = torch.arange(int(on_host.max()), device=slots.device)
    dense = [
        _list(direction, own[i], below[i], excepted[i], place_of_row.numel())
        for i, direction in enumerate((found.direction_k, found.direction_v))
    ]
    there = place_of_row < entries[:, None]
    return _Rows(pair, on_host, (dense[KEY], dense[VALUE], there))


def _list(
    direction: torch.Tensor,
    own: torch.Tensor,
    below: torch.Tensor,
    excepted: torch.Tensor,
    entries: int,
) -> torch.Tensor:
    """[G, entries, D] rows of one tensor: the tokens', then the lower layer's excepted ones."""
    tokens = excepted.shape[1]
    rows = torch.where(excepted[:, :, None], own.to(direction.dtype), direction)
    first = (~excepted).to(torch.uint8).argsort(dim=1, stable=True)[:, : entries - tokens]
    lower = below.gather(1, first[:, :, None].expand(-1, -1, below.shape[2]))
    return torch.cat([rows, lower.to(rows.dtype)], dim=1)


def separate(
    shared: Mapping[int, Shared],
    layer: int,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    entry_at: Callable[[int, torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Entry lists of a layer where some requests store it in a pair.

    Args:
        shared: such requests among the B, by their index; all their lists at this layer are equally
            long and begin with the N tokens of the prompt.
        indptr: [B * G + 1] int64, on the host.
        indices: [nnz] int64, in which these lists begin with the first N entries of the pair's.
        entry_at: from (index of a request, places [G, N] in its lists' pages) to entries.

    Returns:
        indices [nnz], and what `paged_attention` takes besides: `value_indices`, `key_scale` and
        `value_scale`.
    """
    pairs = {i: found for i, s in shared.items() if (found := s.at(layer)) is not None}
    if not pairs:
        return indices, {}
    by_tensor = [indices.clone(), indices.clone()]
    scale = torch.ones((2, indices.numel()), device=indices.device)
    for i, (pair, which) in pairs.items():
        heads, tokens = pair.excepted.shape[1:]
        block = slice(int(indptr[i * heads]), int(indptr[(i + 1) * heads]))
        for tensor, entries in enumerate(by_tensor):
            scale[tensor, block].view(heads, -1)[:, :tokens] = pair.lengths[which, tensor]
            if which == BELOW:
                entries[block].view(heads, -1)[:, :tokens] = entry_at(i, pair.places(tensor))
    options = {"value_indices": by_tensor[VALUE], "key_scale": scale[KEY]}
    return by_tensor[KEY], options | {"value_scale": scale[VALUE]}
