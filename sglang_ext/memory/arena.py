"""The KV pool as one array of entries, and how private pages are numbered in it.

SGLang's pool gives a token one slot: a row `[G, D]` of K and one of V in every layer. All layers
are views of one tensor `[L, 2, padded slots, G, D]`, so the same memory is also an array of
entries `[E, D]` (E = L * 2 * padded * G), and G consecutive entries are a page. A slot taken for
compressed entries yields L pages, one in each layer's rows. A page holds G entries of ONE (layer,
KV head), and not necessarily of the layer in whose rows it lies: S slots are L * S pages, filled in
order by the lists of layer 0 head 0, layer 0 head 1, ..., so budgets may differ between layers and
heads and cost what they hold.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Arena:
    """The pool's memory seen as entries and pages."""

    storage: torch.Tensor  # [L, 2, padded, G, D]

    @property
    def layers(self) -> int:
        """L."""
        return self.storage.shape[0]

    @property
    def kv_heads(self) -> int:
        """G, also the number of entries of a page."""
        return self.storage.shape[3]

    @property
    def value_offset(self) -> int:
        """Entries from a key to its value."""
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

    def key_base(self, layer: int) -> int:
        """First key entry of a layer."""
        return layer * 2 * self.value_offset

    def pages(self, slots: torch.Tensor) -> torch.Tensor:
        """[S] slots -> [S * L] int64 page numbers, in the order in which they are filled.

        Slot by slot, so that giving back surplus slots from the end renumbers nothing.
        """
        rows = torch.arange(self.layers, device=slots.device) * (2 * self.storage.shape[2])
        return (slots.to(torch.int64)[:, None] + rows[None, :]).reshape(-1)

    def slots_for(self, pages: int) -> int:
        """Slots that yield so many pages."""
        return -(-pages // self.layers)

    def most_slots(self, entries: int) -> int:
        """Slots that suffice for so many entries, however they are spread over layers and heads."""
        lists, page = self.layers * self.kv_heads, self.kv_heads
        return self.slots_for((entries + min(lists, entries) * (page - 1)) // page)


def create_arena(
    layers: int, slots: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str
) -> Arena:
    """Allocate the pool: zeros, as SGLang's own buffers are."""
    return Arena(torch.zeros((layers, 2, slots, kv_heads, head_dim), dtype=dtype, device=device))
