"""Write chosen rows of one layer's dense keys and values into private pages."""

from __future__ import annotations

import torch
from kvpolicy.kernels.pages import lay_out
from kvpolicy.kernels.rounding import rounded


def place(
    entries: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kept: torch.Tensor,
    pages: torch.Tensor,
    *,
    value_offset: int,
) -> torch.Tensor:
    """Write kept rows into pages, in order, each KV head from a new page on.

    Args:
        entries: [E, D] the pool; written in place. Key entry `e` has its value at
            `e + value_offset`.
        k, v: [G, M, D] any float dtype, not memory of the pool; rounded once to the pool's dtype.
            Rows that are not kept are not read.
        kept: [G, M] bool.
        pages: [P] int64 page numbers to fill, at least the sum over heads of ceil(kept / G). They
            may hold the entries that `k` and `v` were gathered from.
        value_offset: from a key entry to its value.

    Returns:
        [G] int64, how many entries each KV head now has.

    Raises:
        ValueError: names the argument, the expected and the actual shape.
    """
    check(entries, k, v, kept, pages)
    head, row, target, counts = lay_out(kept, pages)
    for offset, tensor in ((0, k), (value_offset, v)):
        entries.index_copy_(0, target + offset, rounded(tensor[head, row], entries.dtype))
    return counts


def check(
    entries: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kept: torch.Tensor,
    pages: torch.Tensor,
) -> None:
    """Refuses wrong shapes; reads no values.

    Raises:
        ValueError: names the argument, the expected and the actual shape.
    """
    if kept.dtype != torch.bool or kept.dim() != 2:
        raise ValueError(f"kept: expected bool [G, N], got {kept.dtype} {list(kept.shape)}")
    if pages.dim() != 1:
        raise ValueError(f"pages: expected [P], got {list(pages.shape)}")
    for name, tensor in (("k", k), ("v", v)):
        if tensor.shape != (*kept.shape, entries.shape[1]):
            expected = [*kept.shape, entries.shape[1]]
            raise ValueError(f"{name}: expected {expected}, got {list(tensor.shape)}")
