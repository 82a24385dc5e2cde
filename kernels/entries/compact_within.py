"""Move the chosen entries of a prompt to private pages within the prompt's own slots."""

from __future__ import annotations

import torch
from kvpolicy.kernels.entries.compact_layers import check
from kvpolicy.kernels.entries.rounding import movable


def compact_within(
    storage: torch.Tensor,
    prompt_slots: torch.Tensor,
    kept: torch.Tensor,
    total: int,
    private_slots: torch.Tensor,
    first_page: torch.Tensor,
) -> None:
    """As `compact_layers`, but private slots may be slots of the prompt.

    Everything is read before anything is written, so that the kept entries exist a second time
    meanwhile, outside the pool. It is a few torch operations on any device, whatever the number of
    layers, and the host does not wait for the device.

    Args:
        total: number of entries kept in all lists together.

    Raises:
        ValueError: as of `compact_layers`.
    """
    check(storage, prompt_slots, kept, private_slots, first_page)
    layers, _, padded, kv_heads, size = storage.shape
    layer, head, position = torch.nonzero_static(kept, size=total).unbind(1)
    counts = kept.sum(dim=2).flatten()
    list_ = layer * kv_heads + head
    place = torch.arange(total, device=kept.device) - (counts.cumsum(0) - counts)[list_]
    source = (layer * 2 * padded + prompt_slots.long()[position]) * kv_heads + head
    page = first_page.flatten()[list_].long() + place // kv_heads
    row_of_slot = (page % layers) * 2 * padded + private_slots.long()[page // layers]
    target = row_of_slot * kv_heads + place % kv_heads
    entries = movable(storage).view(-1, size)
    copies = [entries.index_select(0, source + offset) for offset in (0, padded * kv_heads)]
    for offset, rows in zip((0, padded * kv_heads), copies, strict=True):
        entries.index_copy_(0, target + offset, rows)
