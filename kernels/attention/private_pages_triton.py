"""`private_pages` in Triton, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from kvpolicy.kernels.attention.private_pages import check
from kvpolicy.kernels.entries.tables import Tables
from kvpolicy.kernels.launch.kernel import kernel

_BLOCK = 512


def private_pages(
    storage: torch.Tensor,
    tables: Tables,
    rows: torch.Tensor,
    starts: torch.Tensor,
    made: torch.Tensor,
    *,
    longest: int,
) -> None:
    """As the reference; the host reads no tensor."""
    check(storage, tables, rows, starts, made)
    layers, _, padded, kv_heads, _ = storage.shape
    if not rows.shape[0] or not longest:
        return
    _pages[(rows.shape[0] * kv_heads, layers, triton.cdiv(longest, _BLOCK))](
        tables.first_page, tables.slots_start, tables.slots, rows, starts, made,
        padded, starts.stride(0), LAYERS=layers, KV_HEADS=kv_heads, BLOCK=_BLOCK,
    )  # fmt: skip


@kernel()
def _pages(
    first_pages, slots_starts, slots, rows, starts, made, padded, stride,
    LAYERS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a block of one list's pages."""
    list_, layer, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(rows + list_ // KV_HEADS).to(tl.int64)
    address = starts + layer * stride + list_
    begin = tl.load(address).to(tl.int64)
    j = block * BLOCK + tl.arange(0, BLOCK)
    inside = j < tl.load(address + 1) - begin
    page = tl.load(first_pages + (row * LAYERS + layer) * KV_HEADS + list_ % KV_HEADS) + j
    slot = tl.load(slots + tl.load(slots_starts + row) + page // LAYERS, mask=inside, other=0)
    tl.store(made + begin + j, page % LAYERS * 2 * padded + slot, mask=inside)
