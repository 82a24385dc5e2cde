"""Ordinary slots that several requests give up in one operation.

SGLang would free them request by request, and copy its list of free slots each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from kvpolicy.sglang_ext.face.host import to_device


def no_slot(tree: Any) -> int:
    """What stands in SGLang's table of slots for tokens whose slots have been given up.

    It is the padding page's last slot, which nobody is given: pages of the row end as they did,
    which SGLang's allocator checks if SGLANG_DEBUG_MEMORY_POOL is set.
    """
    return int(tree.page_size) - 1


class Tail(NamedTuple):
    """Tokens `first` to `end - 1` of a row of SGLang's table of slots, whole pages."""

    row: int
    first: int
    end: int


def free_tails(tree: Any, tails: Sequence[Tail]) -> None:
    """Give tails back to the allocator; the table forgets their slots.

    Args:
        tree: SGLang's radix cache, which has both.
    """
    table: torch.Tensor = tree.req_to_token_pool.req_to_token
    rows, first, end = np.array(tails, np.int64).reshape(-1, 3).T
    counts = end - first
    offsets = counts.cumsum() - counts
    places = np.repeat(rows * table.shape[1] + first - offsets, counts) + np.arange(counts.sum())
    if not len(places):
        return
    slots, index = table.view(-1), to_device(places.tolist(), torch.int64, table.device)
    # Since pages are whole, slots of several requests may be freed as if they were one's.
    tree.token_to_kv_pool_allocator.free_segment(slots.index_select(0, index), start_pos=0)
    slots.index_fill_(0, index, no_slot(tree))
