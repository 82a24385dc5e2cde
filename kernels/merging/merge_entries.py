"""Merging leaving entries into those that stay, in the pool itself, all lists at once.

No entry is both receiver and source, so receivers may be written in any order.
"""

from __future__ import annotations

import torch
from kvpolicy.kernels.entries.compact_in_place import check_proceed
from kvpolicy.kernels.entries.rounding import movable, rounded
from kvpolicy.kernels.launch.arguments import check_axes, refused
from kvpolicy.kernels.merging.links import Links
from kvpolicy.kernels.merging.merge_rows import check_sums, merge_rows


def merge_entries(
    pool: torch.Tensor,
    ids: torch.Tensor,
    links: Links,
    own: torch.Tensor | None,
    divide: torch.Tensor | None,
    proceed: torch.Tensor,
) -> None:
    """Merge keys or values of R lists as `merge_rows` does, rounded once to the dtype of the pool.

    Args:
        pool: [E, D] any float dtype, each row contiguous; rows of receivers are written in place.
        ids: int64 [R, n], the pool row of each column. Rows of receivers and sources occur once,
            and no receiver is a source.
        links, own, divide: as of `merge_rows`, with R for G.
        proceed: bool [B, P], for R / B consecutive lists each, which are written only if all P are
            True.

    Raises:
        ValueError: names the argument, the expected and the actual shape.
    """
    check(pool, ids, links, own, divide, proceed)
    lists = len(ids) // max(len(proceed), 1)
    writes = (links[2].diff() > 0) & proceed.all(1).repeat_interleave(lists)[:, None]
    for number in writes.any(1).nonzero()[:, 0].tolist():
        span = slice(number, number + 1)
        sources, weights, offsets = (x[span] for x in links)
        sums = (None if x is None else x[span] for x in (own, divide))
        merged = merge_rows(pool[ids[span]], (sources, weights, offsets), *sums)[0]
        receivers = writes[number]
        rows = rounded(merged[receivers], pool.dtype)
        movable(pool).index_copy_(0, ids[number, receivers], movable(rows))


def check(
    pool: torch.Tensor,
    ids: torch.Tensor,
    links: Links,
    own: torch.Tensor | None,
    divide: torch.Tensor | None,
    proceed: torch.Tensor,
) -> None:
    """Refuse wrong shapes and dtypes; read no tensor."""
    if pool.dim() != 2 or not pool.is_floating_point() or pool.stride(1) != 1:
        raise refused("pool", pool, "floats [E, D], rows contiguous")
    check_axes("ids", ids, torch.int64, "[R, n]")
    check_sums(links, own, divide, ids.shape)
    check_proceed(proceed, len(proceed))
    if not len(proceed) or len(ids) % len(proceed):
        raise ValueError(
            f"proceed: expected bool [B, P], B a part of {len(ids)}, got {len(proceed)}"
        )
