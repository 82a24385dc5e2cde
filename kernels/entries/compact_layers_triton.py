"""Compaction of all layers in four launches, whatever is kept.

The number of places for entries is known on the host: S private slots of L pages of G entries.
First a walk over the kept mask, in parts, notes for every place the entry of the pool that it
receives; counts of the parts, taken before, give the place in its list at which a part begins. Then
the places are filled, a tile per program: the grid depends on the number of places, not on the
prompt's length, and neighbouring places are neighbouring memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from kvpolicy.kernels.entries.compact_layers import check
from kvpolicy.kernels.entries.rounding import movable
from kvpolicy.kernels.launch import tuned
from kvpolicy.kernels.launch.kernel import kernel
from kvpolicy.kernels.launch.tiles import rows_of

_PARTS = tl.constexpr(32)  # counts of a list's parts that are added up at a time


def compact_layers(
    storage: torch.Tensor,
    prompt_slots: torch.Tensor,
    kept: torch.Tensor,
    private_slots: torch.Tensor,
    first_page: torch.Tensor,
    *,
    part: int | None = None,
    tile: int | None = None,
) -> None:
    """Copy kept keys and values of all layers into private pages, in position order.

    As `compact_layers.compact_layers`, but the host reads no tensor: lists that need more than the
    S * L pages are not refused, and entries without a page are not written.

    Args:
        storage: [L, 2, padded, G, D] any dtype, contiguous; written in place.
        prompt_slots: [N] int32 or int64 slot of each position.
        kept: [L, G, N] bool.
        private_slots: [S] int32 or int64, S * L pages; none of them is a slot of the prompt.
        first_page: [L, G] int32 or int64; lists do not overlap.
        part: positions that a program walks at a time; a power of two. None: as measured for the
            GPU (see `tuned`), else 4096.
        tile: places that a program fills; a power of two. None: as measured, else `rows_of`.

    Raises:
        TunedError: as `tuned.load`.
    """
    check(storage, prompt_slots, kept, private_slots, first_page)
    layers, _, padded, kv_heads, size = storage.shape
    length, places = prompt_slots.shape[0], private_slots.shape[0] * layers * kv_heads
    if not length or not places:
        return
    row_bytes = size * storage.element_size()
    measured = tuned.choice("compact_layers", kept.device, row_bytes, length)
    part = part or measured.get("part", 4096)
    mask = kept.contiguous().view(torch.uint8)
    parts = triton.cdiv(length, part)
    counts = torch.empty((layers * kv_heads, parts), dtype=torch.int32, device=kept.device)
    # The entry of the pool that goes to each place; places between and after the lists get none.
    sources = torch.full((places,), -1, dtype=torch.int64, device=kept.device)
    _count[(layers * kv_heads, parts)](mask, counts, length, PART=part, num_warps=8)
    _number[(layers * kv_heads, parts)](
        mask, counts, prompt_slots.contiguous(), first_page.contiguous(), sources, length, padded,
        places, KV_HEADS=kv_heads, PART=part, num_warps=8,
    )  # fmt: skip
    width = triton.next_power_of_2(size)
    tile = tile or measured.get("tile") or rows_of(width, storage.element_size())
    _copy[(triton.cdiv(places, tile),)](
        movable(storage), movable(storage[0, 1]), sources, private_slots.contiguous(), places,
        padded, LAYERS=layers, KV_HEADS=kv_heads, SIZE=size,
        PADDED_SIZE=width, TILE=tile,
    )  # fmt: skip


@kernel()
def _count(mask, counts, length, PART: tl.constexpr):
    """Count the entries that a part of a list keeps."""
    list_, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = part * PART + tl.arange(0, PART)
    kept = tl.load(mask + list_ * length + position, mask=position < length, other=0)
    tl.store(counts + list_ * tl.num_programs(1) + part, tl.sum(kept.to(tl.int32)))


@kernel()
def _number(
    mask, counts, prompt_slots, first_page, sources, length, padded, places,
    KV_HEADS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Write to `sources`, at their places, the pool entries that a part of a list keeps."""
    list_, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    part_counts = counts + list_ * tl.num_programs(1)
    offset = 0
    for start in range(0, part, _PARTS):
        part_ids = start + tl.arange(0, _PARTS)
        offset += tl.sum(tl.load(part_counts + part_ids, mask=part_ids < part, other=0))
    position = part * PART + tl.arange(0, PART)
    kept = tl.load(mask + list_ * length + position, mask=position < length, other=0).to(tl.int32)
    first = tl.load(first_page + list_).to(tl.int64) * KV_HEADS + offset
    place = first + tl.cumsum(kept) - 1
    kept = kept > 0
    slot = tl.load(prompt_slots + position, mask=kept, other=0).to(tl.int64)
    layer, head = list_ // KV_HEADS, list_ % KV_HEADS
    entry = (layer * 2 * padded + slot) * KV_HEADS + head
    tl.store(sources + place, entry, mask=kept & (place < places))


@kernel(aligned=["keys", "values"])
def _copy(
    keys, values, sources, private_slots, places, padded,
    LAYERS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Fill a tile of places with their keys and values."""
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    source = tl.load(sources + place, mask=place < places, other=-1)
    filled = source >= 0
    page = place // KV_HEADS
    slot = tl.load(private_slots + page // LAYERS, mask=filled, other=0).to(tl.int64)
    target = ((page % LAYERS) * 2 * padded + slot) * KV_HEADS + place % KV_HEADS
    dims = tl.arange(0, PADDED_SIZE)
    mask = filled[:, None] & (dims < SIZE)[None, :]
    source_offset, target_offset = (
        source[:, None] * SIZE + dims[None, :],
        target[:, None] * SIZE + dims[None, :],
    )
    # Both are read before either is written, so that more reads are under way at once.
    k = tl.load(keys + source_offset, mask=mask)
    v = tl.load(values + source_offset, mask=mask)
    tl.store(keys + target_offset, k, mask=mask)
    tl.store(values + target_offset, v, mask=mask)
