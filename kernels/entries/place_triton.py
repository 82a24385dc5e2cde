"""Writing chosen rows into private pages: a prefix count and one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from kvpolicy.kernels.entries.place import check
from kvpolicy.kernels.entries.rounding_triton import rounded
from kvpolicy.kernels.launch import tuned
from kvpolicy.kernels.launch.kernel import kernel
from kvpolicy.kernels.launch.tiles import rows_of


def place(
    entries: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kept: torch.Tensor,
    pages: torch.Tensor,
    *,
    value_offset: int,
    first_page: torch.Tensor | None = None,
    tile: int | None = None,
) -> torch.Tensor:
    """Write kept rows into pages, in order, each KV head's on new pages.

    As `place.place`, but the host reads no tensor: too few pages are not refused, and rows without
    a page are not written.

    Args:
        entries: [E, D] the pool, contiguous; written in place. Key entry `e` has its value at
            `e + value_offset`.
        k, v: [G, M, D] any float dtype, not memory of the pool; rounded once to the pool's dtype.
            Rows that are not kept are not read.
        kept: [G, M] bool.
        pages: [P] int64 page numbers to fill, at least the sum over heads of ceil(kept / G).
        value_offset: number of entries from a key to its value.
        first_page: [G] int32 or int64, index in `pages` of each KV head's first page; lists do not
            overlap. None: one list after the other.
        tile: rows that a program writes; a power of two. None: as measured for the GPU (see
            `tuned`), else `rows_of`.

    Returns:
        [G] int64, number of rows that each KV head keeps, those without a page included.

    Raises:
        ValueError: names the argument, the expected and the actual shape.
        TunedError: as `tuned.load`.
    """
    check(entries, k, v, kept, pages, first_page)
    if not entries.is_contiguous():
        raise ValueError("entries: expected contiguous [E, D]")
    kv_heads, length = kept.shape
    size = entries.shape[1]
    if not length:
        return torch.zeros(kv_heads, dtype=torch.int64, device=kept.device)
    # [G, M]: number of kept rows of a head up to each row, this one included.
    order = kept.cumsum(1, dtype=torch.int32)
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    width = triton.next_power_of_2(size)
    element = max(k.element_size(), v.element_size())
    measured = tuned.choice("place", k.device, size * element, length)
    tile = tile or measured.get("tile") or rows_of(width, element)
    _place[(triton.cdiv(length, tile), kv_heads)](
        entries, k, v, kept.contiguous().view(torch.uint8), order, pages.contiguous(),
        None if first_page is None else first_page.contiguous(),
        length, pages.shape[0], value_offset, *k.stride()[:2], *v.stride()[:2],
        KV_HEADS=kv_heads, KV_HEADS_P=triton.next_power_of_2(kv_heads), SIZE=size,
        PADDED_SIZE=width, TILE=tile,
    )  # fmt: skip
    return order[:, -1].to(torch.int64)


@kernel(aligned=["entries", "k", "v", "k_head", "k_row", "v_head", "v_row"])
def _place(
    entries, k, v, kept, order, pages, first_pages,
    length, pages_there, value_offset, k_head, k_row, v_head, v_row,
    KV_HEADS: tl.constexpr, KV_HEADS_P: tl.constexpr, SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the kept rows of a tile of one KV head."""
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    chosen = tl.load(kept + head * length + row, mask=row < length, other=0) > 0
    if first_pages is None:
        heads = tl.arange(0, KV_HEADS_P).to(tl.int64)
        is_earlier = heads < head
        counts = tl.load(order + heads * length + length - 1, mask=is_earlier, other=0)
        first_page = tl.sum((counts + KV_HEADS - 1) // KV_HEADS)
    else:
        first_page = tl.load(first_pages + head).to(tl.int32)
    index = tl.load(order + head * length + row, mask=chosen, other=1) - 1
    page = first_page + index // KV_HEADS
    chosen = chosen & (page < pages_there)
    target = tl.load(pages + page, mask=chosen, other=0) * KV_HEADS + index % KV_HEADS
    dims = tl.arange(0, PADDED_SIZE)
    mask = chosen[:, None] & (dims < SIZE)[None, :]
    dtype: tl.constexpr = entries.dtype.element_ty
    keys = tl.load(k + head * k_head + row[:, None] * k_row + dims[None, :], mask=mask)
    values = tl.load(v + head * v_head + row[:, None] * v_row + dims[None, :], mask=mask)
    address = entries + target[:, None] * SIZE + dims[None, :]
    tl.store(address, rounded(keys, dtype), mask=mask)
    # The distance to the values may exceed what 32 bits hold.
    address = entries + (target + value_offset)[:, None] * SIZE + dims[None, :]
    tl.store(address, rounded(values, dtype), mask=mask)
