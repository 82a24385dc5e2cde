"""Where the entries of decoding requests lie in the pool: one launch for all lists.

A program goes through the candidates of one list in order, a block at a time: the number cached
before a candidate is its place in the list.
"""

from __future__ import annotations

import torch
import triton.language as tl
from kvpolicy.kernels.attention.decode_attention_triton import entry_at
from kvpolicy.kernels.attention.entry_ids import check
from kvpolicy.kernels.entries.requests import Requests
from kvpolicy.kernels.launch.kernel import kernel


def entry_ids(requests: Requests, holds: torch.Tensor, *, block: int = 1024) -> torch.Tensor:
    """Key entries of B requests, as rows of their storage seen as [E, D].

    As `entry_ids.entry_ids`, but the host reads no tensor: the number of True in `holds` is not
    checked, and those beyond the length of a list give 0.

    Args:
        block: candidates that a program reads at a time, a power of two.

    Returns:
        int64 [B * L * G, M].
    """
    check(requests, holds)
    storage, tables, rows, lengths, req_to_token = requests
    layers, _, padded, kv_heads, _ = storage.shape
    result = torch.empty(holds.shape, dtype=torch.int64, device=holds.device)
    if len(holds):
        _ids[(len(holds),)](
            tables.counts, tables.first_page, tables.tail_start, tables.slots_start, tables.slots,
            rows, lengths, req_to_token, holds.contiguous().view(torch.uint8), result,
            padded, req_to_token.stride(0), holds.shape[1],
            LAYERS=layers, KV_HEADS=kv_heads, BLOCK=block,
        )  # fmt: skip
    return result


@kernel()
def _ids(
    counts, first_pages, tail_starts, slots_starts, slots, rows, lengths, req_to_token,
    holds, made, padded, context, width,
    LAYERS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the entries of one list."""
    list_of_batch = tl.program_id(0)
    request, layer_head = list_of_batch // (LAYERS * KV_HEADS), list_of_batch % (LAYERS * KV_HEADS)
    layer, head = layer_head // KV_HEADS, layer_head % KV_HEADS
    row = tl.load(rows + request)
    list_ = row * LAYERS * KV_HEADS + layer_head
    count, tail_start = tl.load(counts + list_), tl.load(tail_starts + row)
    length = count + tl.maximum(tl.load(lengths + request).to(tl.int32) - tail_start, 0)
    first_page, own_slots = tl.load(first_pages + list_), slots + tl.load(slots_starts + row)
    tail_slots = req_to_token + row * context + tail_start
    base, held_count = list_of_batch.to(tl.int64) * width, 0
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        held = tl.load(holds + base + column, mask=column < width, other=0).to(tl.int32)
        place = held_count + tl.cumsum(held) - held
        inside = (held > 0) & (place < length)
        entry = entry_at(
            place, place, count, inside, own_slots, tail_slots, first_page,
            layer, head, padded.to(tl.int64) * 2, LAYERS, KV_HEADS,
        )  # fmt: skip
        tl.store(made + base + column, tl.where(inside, entry, 0), mask=column < width)
        held_count += tl.sum(held)
