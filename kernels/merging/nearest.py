"""For each dropped entry the kept entry with the highest cosine, per KV head."""

from __future__ import annotations

import torch
from kvpolicy.kernels.launch.arguments import check_axes, check_tensors, refused

# Cosines of a tile: no matrix of all dropped by all kept entries is made.
_TILE = 1 << 20


def nearest(
    x: torch.Tensor,
    dropped: torch.Tensor,
    present: torch.Tensor,
    kept: torch.Tensor,
    ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the kept vector that has the highest cosine with each dropped one.

    Cosines are of unit vectors in float64, compared as float32; of equal ones the first in the
    list wins. The unit vector of zero, and of a vector with NaN or infinity, is zero.

    Args:
        x: [G, n, D] any float dtype; with ids [E, D], the rows of a pool. Only dropped and kept
            entries are read.
        dropped: int64 [G, P], columns of dropped entries.
        present: bool [G, P], which of these exist.
        kept: bool [G, n], entries that each list keeps.
        ids: int64 [G, n], the pool row of each column.

    Returns:
        int64 [G, P], the column of the nearest kept entry, 0 where there is none, and bool [G, P],
        whether there is one: the dropped entry exists, and its list keeps any.

    Raises:
        ValueError: names the argument, the expected and the actual shape.
    """
    check(x, dropped, present, kept, ids)
    receivers, receivers_present = torch.zeros_like(dropped), present & kept.any(1, keepdim=True)
    for head in receivers_present.any(1).nonzero()[:, 0].tolist():
        columns, rows = kept[head].nonzero()[:, 0], receivers_present[head].nonzero()[:, 0]
        pool_rows = None if ids is None else ids[head]
        kept_units = _unit(_rows(x, pool_rows, head, columns)).T
        tile = max(1, _TILE // max(len(columns), 1))
        for part in rows.split(tile):
            match = (_unit(_rows(x, pool_rows, head, dropped[head, part])) @ kept_units).float()
            best = match == match.amax(-1, keepdim=True)
            order = torch.arange(len(columns), device=x.device)
            receivers[head, part] = columns[torch.where(best, order, len(columns)).amin(-1)]
    return receivers, receivers_present


def _rows(
    x: torch.Tensor, ids: torch.Tensor | None, head: int, columns: torch.Tensor
) -> torch.Tensor:
    return x[head, columns] if ids is None else x[ids[columns]]


def _unit(rows: torch.Tensor) -> torch.Tensor:
    rows = rows.double()
    size = (rows * rows).sum(-1, keepdim=True).sqrt()
    return (rows / size).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def check(
    x: torch.Tensor,
    dropped: torch.Tensor,
    present: torch.Tensor,
    kept: torch.Tensor,
    ids: torch.Tensor | None,
) -> None:
    """Refuse wrong shapes and dtypes; read no tensor."""
    check_vectors(x, ids)
    columns = x.shape[:2] if ids is None else ids.shape
    arguments = [
        ("kept", kept, torch.bool, columns),
        ("dropped", dropped, torch.int64, (columns[0], *dropped.shape[1:2])),
        ("present", present, torch.bool, dropped.shape),
    ]
    check_tensors(arguments)


def check_vectors(x: torch.Tensor, ids: torch.Tensor | None) -> None:
    """Refuse what is neither vectors [G, n, D] nor a pool [E, D] with rows [G, n] of it."""
    if x.ndim != (3 if ids is None else 2) or not x.is_floating_point():
        raise refused("x", x, "floats [G, n, D]" if ids is None else "floats [E, D]")
    if ids is not None:
        check_axes("ids", ids, torch.int64, "[G, n]")
