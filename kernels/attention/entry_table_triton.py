"""The entries that a decode batch reads, written out as a table, as readers of pages want them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from kvpolicy.kernels.attention.decode_attention import check
from kvpolicy.kernels.attention.decode_attention_triton import entry_at
from kvpolicy.kernels.entries.tables import Tables
from kvpolicy.kernels.launch.kernel import kernel


def entry_table(
    q: torch.Tensor,
    storage: torch.Tensor,
    tables: Tables,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    req_to_token: torch.Tensor,
    *,
    layer: int,
    longest: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of the keys in the pool [E, D] that `storage` is, list by list, in one launch.

    Args:
        q, storage, tables, rows, lengths, req_to_token, layer: as of `decode_attention`; no layer
            is stored in a pair.
        longest: columns, at least as many as the longest list has entries. What a list has beyond
            is not written; the host does not look.

    Returns:
        int32 [B * G, longest], 0 behind a list's end; int32 [B * G] lengths.

    Raises:
        ValueError: as `decode_attention`; layers may be stored in pairs; or entries cannot be
            numbered in int32.
    """
    check(q, storage, tables, rows, lengths, req_to_token, layer)
    if tables.paired.numel():
        raise ValueError("tables.paired: lists of layers in pairs cannot be written as numbers")
    if storage.numel() // storage.shape[4] > 2**31:
        raise ValueError(f"storage: expected at most 2^31 entries, got {list(storage.shape)}")
    layers, _, padded, groups, _ = storage.shape
    lists = rows.shape[0] * groups
    made = torch.empty((lists, longest), dtype=torch.int32, device=storage.device)
    entries = torch.empty(lists, dtype=torch.int32, device=storage.device)
    if lists:
        _table[(lists, max(triton.cdiv(longest, 1024), 1))](
            tables.counts, tables.first_page, tables.tail_start, tables.slots_start, tables.slots,
            rows, lengths, req_to_token, made, entries, layer, padded, req_to_token.stride(0),
            longest, LAYERS=layers, GROUPS=groups, BLOCK=1024,
        )  # fmt: skip
    return made, entries


@kernel()
def _table(
    counts, first_pages, tail_starts, slots_starts, slots, rows, lengths, req_to_token,
    made, entries, layer, padded, context, longest,
    LAYERS: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of one list's numbers."""
    this, block = tl.program_id(0), tl.program_id(1)
    group = this % GROUPS
    row = tl.load(rows + this // GROUPS).to(tl.int64)
    list_ = (row * LAYERS + layer) * GROUPS + group
    count, tail_start = tl.load(counts + list_), tl.load(tail_starts + row)
    tail = tl.maximum(tl.load(lengths + this // GROUPS).to(tl.int32) - tail_start, 0)
    length = count + tail
    if block == 0:
        tl.store(entries + this, length)
    j = block * BLOCK + tl.arange(0, BLOCK)
    inside = j < tl.minimum(length, longest)
    entry = entry_at(
        j, j, count, inside, slots + tl.load(slots_starts + row),
        req_to_token + row * context + tail_start, tl.load(first_pages + list_),
        layer, group, padded.to(tl.int64) * 2, LAYERS, GROUPS,
    )  # fmt: skip
    at = this.to(tl.int64) * longest + j
    tl.store(made + at, tl.where(inside, entry, 0).to(tl.int32), mask=j < longest)
