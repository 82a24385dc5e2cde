"""Which pages of the pool hold the private lists of a batch, all layers at once.

A page is G entries of one (layer, KV head) that lie side by side, so that to a reader of pages the
pool `[L, 2, padded, G, D]` is `[L * 2 * padded, G, 1, D]`: pages of G tokens with one KV head.
"""

from __future__ import annotations

import torch
from kvpolicy.kernels.entries.tables import Tables
from kvpolicy.kernels.launch.arguments import check_tensors


def private_pages(
    storage: torch.Tensor,
    tables: Tables,
    rows: torch.Tensor,
    starts: torch.Tensor,
    made: torch.Tensor,
    *,
    longest: int,
) -> None:
    """Write the pages of every list to where `starts` says.

    Args:
        storage: [L, 2, padded slots, G, D].
        tables: of R rows; no layer of these requests may be stored in a pair.
        rows: int [B], row of each request in SGLang's request pool.
        starts: int32 [L, N + 1] with N >= B * G, perhaps a part of a larger tensor: the list of
            layer l, request b and KV head g is `made[starts[l, b * G + g] : starts[l, b * G + g +
            1]]`, as many pages as the list has. Lists after the first B * G are ignored.
        made: int32 [C], the numbers of the keys' pages in the pool; written in place.
        longest: most pages of a list, known to the host.

    Raises:
        ValueError: names the argument, what was expected and what was given.
    """
    check(storage, tables, rows, starts, made)
    layers, _, padded, kv_heads, _ = storage.shape
    lists = rows.shape[0] * kv_heads
    row, list_ = rows.long().repeat_interleave(kv_heads), torch.arange(lists, device=rows.device)
    first_page = tables.first_page[row, :, list_ % kv_heads].T.reshape(-1)  # [L * B * G]
    slots_start = tables.slots_start[row].repeat(layers)
    begin, end = starts[:, :lists].reshape(-1), starts[:, 1 : lists + 1].reshape(-1)
    pages = (end - begin).long()
    owner = torch.repeat_interleave(pages)
    index = torch.arange(owner.shape[0], device=rows.device) - (pages.cumsum(0) - pages)[owner]
    page = first_page[owner].long() + index
    slot = tables.slots[slots_start[owner].long() + page // layers].long()
    made[begin[owner].long() + index] = (page % layers * 2 * padded + slot).int()


def check(
    storage: torch.Tensor,
    tables: Tables,
    rows: torch.Tensor,
    starts: torch.Tensor,
    made: torch.Tensor,
) -> None:
    """Raise ValueError as `private_pages` says, from shapes and dtypes only."""
    if storage.dim() != 5 or storage.shape[1] != 2:
        raise ValueError(f"storage: expected [L, 2, slots, G, D], got {list(storage.shape)}")
    layers, _, padded, kv_heads, _ = storage.shape
    if layers * 2 * padded > 2**31:
        raise ValueError(f"storage: expected at most 2^31 pages, got {list(storage.shape)}")
    if rows.dim() != 1:
        raise ValueError(f"rows: expected [B], got {list(rows.shape)}")
    lists = (tables.tail_start.shape[0], layers, kv_heads)
    least, kind = rows.shape[0] * kv_heads + 1, starts.dtype
    if kind != torch.int32 or starts.dim() != 2 or len(starts) != layers or starts.shape[1] < least:
        raise ValueError(
            f"starts: expected int32 [{layers}, {least} or more], got {kind} {list(starts.shape)}"
        )
    if starts.stride(1) != 1:
        raise ValueError("starts: expected rows without gaps")
    check_tensors(
        [
            ("tables.first_page", tables.first_page, torch.int32, lists),
            ("made", made, torch.int32, (made.numel(),)),
        ]
    )
