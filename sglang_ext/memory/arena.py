"""The KV pool as one array of entries, and how private pages are numbered in it.

SGLang's pool gives a token one slot: a row `[G, D]` of K and one of V in every layer. All layers
are views of one tensor `[L, 2, padded slots, G, D]`, so the same memory is also an array of
entries `[E, D]` (E = L * 2 * padded * G), and G consecutive entries are a page. A slot taken for
compressed entries yields L pages, one in each layer's rows. A page holds G entries of ONE (layer,
KV head), and not necessarily of the layer in whose rows it lies: S slots are L * S pages, filled in
order by the lists of layer 0 head 0, layer 0 head 1, ..., so budgets may differ between layers and
heads and cost what they hold.

Dimensions: L layers of this stage, G KV heads of this rank, D head size, S slots, B requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from kvpolicy.dsl.execute.tensors.kernels import Entries, Slots
from kvpolicy.kernels.entries.rounding import FLOAT8


@dataclass(frozen=True)
class Arena:
    """The pool's memory seen as entries and pages.

    Attributes:
        storage: [L, 2, padded slots, G, D] keys and values, in the pool's dtype.
        scales: float32 [L, 2, G] by which 8-bit keys and values of a layer are multiplied, in
            whatever pages they lie; None if entries have no scales.
        spans: layers of the model in each stage (`--pp-size`).
        stage: index of this stage.
    """

    storage: torch.Tensor
    scales: torch.Tensor | None
    spans: tuple[range, ...]
    stage: int

    @property
    def layers(self) -> int:
        """L."""
        return self.storage.shape[0]

    @property
    def span(self) -> range:
        """Layers of the model that are here."""
        return self.spans[self.stage]

    def place_of(self, layer: int) -> int:
        """Index of a layer of the model among those that are here."""
        return layer - self.span.start

    @property
    def model_layers(self) -> int:
        """Number of layers of the model, those of other stages included."""
        return self.spans[-1].stop

    @property
    def kv_heads(self) -> int:
        """G, which is also the number of entries of a page."""
        return self.storage.shape[3]

    @property
    def value_offset(self) -> int:
        """Distance from a key to its value, in entries."""
        return self.storage.shape[2] * self.kv_heads

    @property
    def entries(self) -> torch.Tensor:
        """[E, D] keys and values."""
        return self.storage.view(-1, self.storage.shape[4])

    @property
    def values(self) -> torch.Tensor:
        """[E - value_offset, D]: row e is the value of key entry e."""
        return self.entries[self.value_offset :]

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot over all layers, keys and values."""
        return self.storage[:, :, 0].numel() * self.storage.element_size()

    def set_scales(self, scales: Sequence[tuple[float, float]]) -> None:
        """Set the scales of 8-bit entries: (key, value) for each of the L layers."""
        if self.scales is not None:
            self.scales.copy_(torch.tensor(scales)[:, :, None])

    def at_slots(self, layer: int, slots: torch.Tensor) -> tuple[Slots, Slots]:
        """Keys and values at int64 [n] slots of a layer, from 0 to L - 1."""
        return self._at_slots(slice(layer, layer + 1), slots)

    def of_all_layers(self, slots: torch.Tensor) -> tuple[Slots, Slots]:
        """Keys and values at int64 [n] slots, of all L layers."""
        return self.of_layers(range(self.layers), slots)

    def of_layers(self, layers: range, slots: torch.Tensor) -> tuple[Slots, Slots]:
        """Keys and values at int64 [n] slots, of layers that follow each other."""
        return self._at_slots(slice(layers.start, layers.stop), slots)

    def _at_slots(self, layers: slice, slots: torch.Tensor) -> tuple[Slots, Slots]:
        k, v = self.storage[layers].unbind(1)
        key_scale = value_scale = None
        if self.scales is not None:
            key_scale, value_scale = (scale.flatten() for scale in self.scales[layers].unbind(1))
        return Slots(k, slots, key_scale), Slots(v, slots, value_scale)

    def at_ids(self, ids: torch.Tensor) -> tuple[Entries, Entries]:
        """Keys and values at int64 [B * L * G, M] entries, the lists of B requests."""
        key_scale = value_scale = None
        if self.scales is not None:
            lists = len(ids) // (self.layers * self.kv_heads)
            key_scale, value_scale = self.scales.transpose(0, 1).flatten(1).repeat(1, lists)
        return Entries(self.entries, ids, key_scale), Entries(self.values, ids, value_scale)

    def unscaled(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        """Keys and values [G, n, D] of a layer divided by its scales, not yet rounded."""
        if self.scales is None:
            return [k, v]
        return [
            x / scale[:, None, None] for x, scale in zip((k, v), self.scales[layer], strict=True)
        ]

    def key_base(self, layer: int) -> int:
        """First key entry of a layer."""
        return layer * 2 * self.value_offset

    def pages(self, slots: torch.Tensor) -> torch.Tensor:
        """[S] slots -> [S * L] int64 page numbers, in the order in which they are filled.

        Slot by slot, so that giving back surplus slots from the end renumbers nothing.
        """
        rows = torch.arange(self.layers, device=slots.device) * (2 * self.storage.shape[2])
        return (slots.to(torch.int64)[:, None] + rows[None, :]).reshape(-1)

    def most_slots(self, entries: int, layers: int) -> int:
        """Slots that suffice for `entries`, however they are spread over layers and heads.

        Args:
            layers: number of layers of the stage whose entries they are.
        """
        lists, page = layers * self.kv_heads, self.kv_heads
        return slots_of((entries + min(lists, entries) * (page - 1)) // page, layers)


def slots_of(pages: int, layers: int) -> int:
    """Slots that hold some pages: a slot has one in each layer's rows."""
    return -(-pages // layers)


def create_arena(
    layers: int,
    slots: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: str,
    region: AbstractContextManager[Any] | None = None,
) -> Arena:
    """Allocate the pool of the only stage: zeros, as SGLang's own buffers are; scales are 1.

    Args:
        region: context in which entries are allocated. SGLang may free its memory for a time
            (`--enable-memory-saver`); scales are allocated outside, because they have to stay.
    """
    scales = None
    if dtype in FLOAT8:
        # Rows are aligned so that kernels may read 16 bytes from their beginnings.
        scales = torch.ones((layers, 2, -(-kv_heads // 4) * 4), device=device)[:, :, :kv_heads]
    with region or nullcontext():
        storage = torch.zeros((layers, 2, slots, kv_heads, head_dim), dtype=dtype, device=device)
    return Arena(storage, scales, spans=(range(layers),), stage=0)
