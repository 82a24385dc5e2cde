"""Copy the chosen entries of a prompt into private pages, all layers at once.

The pool is `storage` [L, 2, padded, G, D]: keys and values of each slot, layer by layer. G
consecutive entries `[D]` of it are a page, and a private slot yields L pages, one in the rows of
each layer: page p is in slot `private_slots[p // L]`, in the rows of layer `p % L`. A page holds
entries of one (layer, KV head), not necessarily of the layer in whose rows it lies.
"""

from __future__ import annotations

import torch
from kvpolicy.kernels.entries.rounding import movable
from kvpolicy.kernels.launch.arguments import refused


def compact_layers(
    storage: torch.Tensor,
    prompt_slots: torch.Tensor,
    kept: torch.Tensor,
    private_slots: torch.Tensor,
    first_page: torch.Tensor,
) -> None:
    """Copy kept keys and values of all layers into private pages, in position order.

    The j-th kept entry of layer l and KV head g goes to page `first_page[l, g] + j // G`, at place
    `j % G`.

    Args:
        storage: [L, 2, padded, G, D] any dtype, contiguous; written in place.
        prompt_slots: [N] int32 or int64 slot of each position.
        kept: [L, G, N] bool.
        private_slots: [S] int32 or int64, S * L pages; none of them is a slot of the prompt.
        first_page: [L, G] int32 or int64; lists do not overlap and end within the S * L pages.

    Raises:
        ValueError: names the argument, the expected and the actual shape or number of pages.
    """
    check(storage, prompt_slots, kept, private_slots, first_page)
    layers, _, padded, kv_heads, size = storage.shape
    pages = private_slots.shape[0] * layers
    counts = kept.sum(dim=2)
    end = torch.where(counts > 0, first_page + (counts + kv_heads - 1) // kv_heads, 0)
    if end.numel() and int(end.max()) > pages:
        raise ValueError(f"private_slots: expected [>= {int(end.max())}] pages, got {pages}")

    entries = movable(storage).view(-1, size)
    sources, targets = prompt_slots.long(), private_slots.long()
    # Layer by layer, so that the entries kept by all layers are never copied at once.
    for layer, (layer_kept, first_pages) in enumerate(zip(kept, first_page.long(), strict=True)):
        head, position = layer_kept.nonzero(as_tuple=True)
        place = (layer_kept.cumsum(dim=1) - 1)[layer_kept]
        page = first_pages[head] + place // kv_heads
        row_of_slot = (page % layers) * 2 * padded + targets[page // layers]
        source = (layer * 2 * padded + sources[position]) * kv_heads + head
        target = row_of_slot * kv_heads + place % kv_heads
        for offset in (0, padded * kv_heads):
            entries.index_copy_(0, target + offset, entries.index_select(0, source + offset))


def check(
    storage: torch.Tensor,
    prompt_slots: torch.Tensor,
    kept: torch.Tensor,
    private_slots: torch.Tensor,
    first_page: torch.Tensor,
) -> None:
    """Refuse wrong shapes and dtypes; read no values."""
    if storage.dim() != 5 or storage.shape[1] != 2 or not storage.is_contiguous():
        raise ValueError(
            f"storage: expected contiguous [L, 2, padded, G, D], got {list(storage.shape)}"
        )
    layers, kv_heads = storage.shape[0], storage.shape[3]
    length = prompt_slots.shape[0]
    if kept.dtype != torch.bool or kept.shape != (layers, kv_heads, length):
        raise refused("kept", kept, f"bool [{layers}, {kv_heads}, {length}]")
    if first_page.shape != (layers, kv_heads):
        raise ValueError(
            f"first_page: expected [{layers}, {kv_heads}], got {list(first_page.shape)}"
        )
    for name, slots in (("prompt_slots", prompt_slots), ("private_slots", private_slots)):
        if slots.dim() != 1 or slots.dtype not in (torch.int32, torch.int64):
            raise refused(name, slots, "int32 or int64 [S]")
