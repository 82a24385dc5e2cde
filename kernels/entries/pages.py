"""How lists of entries lie in pages: the definition for all kernels that write them.

A page is G consecutive entries of the pool: page `r` is the entries `r * G .. r * G + G - 1`. The
list of each KV head starts on a new page: the one after the last page of the previous head, or a
given one, as for a list that has pages for more than it holds.
"""

from __future__ import annotations

import torch
from kvpolicy.kernels.launch.arguments import check_axes


def lay_out(
    kept: torch.Tensor, pages: torch.Tensor, first_page: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Entries of the pool for the kept candidates, in order, each KV head's on new pages.

    Args:
        kept: [G, M] bool.
        pages: [P] int64 page numbers to fill, at least the sum over heads of ceil(kept / G).
        first_page: [G] int32 or int64, index in `pages` of each list's first page; lists do not
            overlap. None: one list after the other.

    Returns:
        head, candidate and pool entry of each kept candidate, [nnz], and counts [G]; all int64.

    Raises:
        ValueError: names the argument, the expected and the actual shape.
    """
    check_axes("kept", kept, torch.bool, "[G, N]")
    size = kept.shape[0]
    counts = kept.sum(dim=1)
    page_counts = (counts + size - 1) // size
    if first_page is None:
        first_page = page_counts.cumsum(0) - page_counts
    total = int(torch.where(page_counts > 0, first_page + page_counts, 0).max()) if size else 0
    if pages.dim() != 1 or pages.shape[0] < total:
        raise ValueError(f"pages: expected [>= {total}], got {list(pages.shape)}")

    head, candidate = kept.nonzero(as_tuple=True)
    first_entry = counts.cumsum(0) - counts
    place = torch.arange(head.shape[0], device=kept.device) - first_entry[head]
    entry = pages[first_page.long()[head] + place // size] * size + place % size
    return head, candidate, entry, counts
