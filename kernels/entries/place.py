"""Write chosen rows of one layer's dense keys and values into private pages."""

from __future__ import annotations

import torch
from kvpolicy.kernels.entries.pages import lay_out
from kvpolicy.kernels.entries.rounding import movable, rounded
from kvpolicy.kernels.launch.arguments import check_axes


def place(
    entries: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kept: torch.Tensor,
    pages: torch.Tensor,
    *,
    value_offset: int,
    first_page: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write kept rows into pages, in order, each KV head's on new pages.

    Args:
        entries: [E, D] the pool; written in place. Key entry `e` has its value at
            `e + value_offset`.
        k, v: [G, M, D] any float dtype, not memory of the pool; rounded once to the pool's dtype.
            Rows that are not kept are not read.
        kept: [G, M] bool.
        pages: [P] int64 page numbers to fill, at least the sum over heads of ceil(kept / G). They
            may hold the entries that `k` and `v` were gathered from.
        value_offset: number of entries from a key to its value.
        first_page: [G] int32 or int64, index in `pages` of each KV head's first page; lists do not
            overlap. None: one list after the other.

    Returns:
        [G] int64, number of entries that each KV head now has.

    Raises:
        ValueError: names the argument, the expected and the actual shape.
    """
    check(entries, k, v, kept, pages, first_page)
    head, row, target, counts = lay_out(kept, pages, first_page)
    for offset, tensor in ((0, k), (value_offset, v)):
        rows = rounded(tensor[head, row], entries.dtype)
        movable(entries).index_copy_(0, target + offset, movable(rows))
    return counts


def check(
    entries: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kept: torch.Tensor,
    pages: torch.Tensor,
    first_page: torch.Tensor | None,
) -> None:
    """Refuse wrong shapes; read no values."""
    check_axes("kept", kept, torch.bool, "[G, N]")
    if pages.dim() != 1:
        raise ValueError(f"pages: expected [P], got {list(pages.shape)}")
    if first_page is not None and first_page.shape != kept.shape[:1]:
        raise ValueError(f"first_page: expected [{kept.shape[0]}], got {list(first_page.shape)}")
    for name, tensor in (("k", k), ("v", v)):
        if tensor.shape != (*kept.shape, entries.shape[1]):
            expected = [*kept.shape, entries.shape[1]]
            raise ValueError(f"{name}: expected {expected}, got {list(tensor.shape)}")
