"""Copy the chosen entries of one layer's prompt into private pages.

An entry is one key vector and one value vector of one layer, KV head and position. The pool is one
array of entries: key entry `e` has its value at `e + value_offset`.
"""

from __future__ import annotations

import torch
from kvpolicy.kernels.pages import lay_out


def compact(
    entries: torch.Tensor,
    prompt_slots: torch.Tensor,
    kept: torch.Tensor,
    pages: torch.Tensor,
    *,
    key_base: int,
    value_offset: int,
) -> torch.Tensor:
    """Copy kept keys and values into pages, in position order, each KV head from a new page on.

    Unlike `place` it reads the pool itself, and of it only what is kept.

    Args:
        entries: [E, D] any dtype; written in place.
        prompt_slots: [N] int64; position n of KV head g is the entry
            `key_base + prompt_slots[n] * G + g`.
        kept: [G, N] bool.
        pages: [P] int64 page numbers to fill, at least the sum over heads of ceil(kept / G); none
            of them may hold an entry of the prompt.
        key_base: first key entry of the layer.
        value_offset: from a key entry to its value.

    Returns:
        [G] int64, how many entries each KV head now has.

    Raises:
        ValueError: names the argument, the expected and the actual shape.
    """
    head, position, target, counts = lay_out(kept, pages)
    group, length = kept.shape
    if prompt_slots.shape != (length,):
        raise ValueError(f"prompt_slots: expected [{length}], got {list(prompt_slots.shape)}")
    source = key_base + prompt_slots[position] * group + head
    for offset in (0, value_offset):
        entries.index_copy_(0, target + offset, entries.index_select(0, source + offset))
    return counts
