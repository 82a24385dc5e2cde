"""What leaving entries add to those that stay, in the pool itself, all lists at once.

No entry both receives and is added to another, so that all reads precede all writes in any order.
"""

from __future__ import annotations

import torch
from kvpolicy.kernels.entries.compact_in_place import check_proceed
from kvpolicy.kernels.entries.rounding import movable, rounded
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
    """Merge keys or values of R lists: as `merge_rows`, rounded once to the type of the pool.

    Args:
        pool: [E, D] any float dtype; rows of receivers are written in place.
        ids: int64 [R, n], the rows of each list. Of those with links, and of sources, none stands
            there twice; no receiver is anyone's source.
        links, own, divide: as of `merge_rows`, with R for G.
        proceed: bool [B, P], of R / B lists each; where one is false, nothing of these is written.

    Raises:
        ValueError: names the argument, the expected and the actual shape.
    """
    check(pool, ids, links, own, divide, proceed)
    lists = len(ids) // max(len(proceed), 1)
    writes = (links[2].diff() > 0) & proceed.all(1).repeat_interleave(lists)[:, None]
    for number in writes.any(1).nonzero()[:, 0].tolist():
        each = slice(number, number + 1)
        sources, weights, offsets = (x[each] for x in links)
        sums = (None if x is None else x[each] for x in (own, divide))
        made = merge_rows(pool[ids[each]], (sources, weights, offsets), *sums)[0]
        some = writes[number]
        rows = rounded(made[some], pool.dtype)
        movable(pool).index_copy_(0, ids[number, some], movable(rows))


def check(
    pool: torch.Tensor,
    ids: torch.Tensor,
    links: Links,
    own: torch.Tensor | None,
    divide: torch.Tensor | None,
    proceed: torch.Tensor,
) -> None:
    """Refuses wrong shapes and dtypes; reads no tensor.

    Raises:
        ValueError: names the argument, the expected and the actual shape.
    """
    if pool.dim() != 2 or not pool.is_floating_point() or pool.stride(1) != 1:
        raise ValueError(
            f"pool: expected floats [E, D], rows contiguous, got {pool.dtype} {list(pool.shape)}"
        )
    if ids.dtype != torch.int64 or ids.dim() != 2:
        raise ValueError(f"ids: expected int64 [R, n], got {ids.dtype} {list(ids.shape)}")
    check_sums(links, own, divide, ids.shape)
    check_proceed(proceed, len(proceed))
    if not len(proceed) or len(ids) % len(proceed):
        raise ValueError(
            f"proceed: expected bool [B, P], B a part of {len(ids)}, got {len(proceed)}"
        )
