"""Inner products and cosines of leaving entries and their receivers, which merges compare."""

from __future__ import annotations

import torch
from kvpolicy.kernels.entries.rounding import movable
from kvpolicy.kernels.launch.arguments import check_tensors
from kvpolicy.kernels.merging.nearest import check_vectors


def inner_products(
    x: torch.Tensor,
    dropped: torch.Tensor,
    present: torch.Tensor,
    receivers: torch.Tensor,
    receivers_present: torch.Tensor,
    ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Inner products and cosines of P pairs of vectors in each of G lists.

    Args:
        x: [G, n, D] any float dtype; with ids [E, D], the rows of a pool.
        dropped, receivers: int64 [G, P], columns of the first and of the second of each pair.
        present, receivers_present: bool [G, P], whether the first and the second of each pair
            exist; a vector that does not counts as zeros.
        ids: int64 [G, n], the pool row of each column.

    Returns:
        [4, G, P] float64: the first with itself, the first with the second, the second with itself,
        and the cosine of both, 0 where it is NaN.

    Raises:
        ValueError: names the argument, the expected and the actual shape.
    """
    check(x, dropped, present, receivers, receivers_present, ids)
    first, second = (
        torch.where(exists[..., None], _rows(x, torch.where(exists, columns, 0), ids), 0.0)
        for columns, exists in ((dropped, present), (receivers, receivers_present))
    )
    first_square, product, second_square = (
        (a * b).sum(-1) for a, b in ((first, first), (first, second), (second, second))
    )
    cosine = product / (first_square.sqrt() * second_square.sqrt())
    return torch.stack(
        [first_square, product, second_square, torch.where(cosine.isnan(), 0.0, cosine)]
    )


def _rows(x: torch.Tensor, columns: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
    if ids is not None:
        return x[ids.gather(1, columns)].double()
    rows = movable(x).gather(1, columns[..., None].expand(-1, -1, x.shape[2]))
    return rows.view(x.dtype).double()


def check(
    x: torch.Tensor,
    dropped: torch.Tensor,
    present: torch.Tensor,
    receivers: torch.Tensor,
    receivers_present: torch.Tensor,
    ids: torch.Tensor | None,
) -> None:
    """Refuse wrong shapes and dtypes; read no tensor."""
    check_vectors(x, ids)
    lists = len(x) if ids is None else len(ids)
    arguments = [
        ("dropped", dropped, torch.int64, (lists, *dropped.shape[1:2])),
        ("present", present, torch.bool, dropped.shape),
        ("receivers", receivers, torch.int64, dropped.shape),
        ("receivers_present", receivers_present, torch.bool, dropped.shape),
    ]
    check_tensors(arguments)
