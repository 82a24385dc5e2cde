"""Rows of several tensors of one length, taken out and put back together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from kvpolicy.kernels.entries.rounding import movable
from kvpolicy.kernels.launch.arguments import check_axes, check_tensors


def take_rows(
    tensors: Sequence[torch.Tensor], rows: torch.Tensor, subset: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Take the same rows of each tensor.

    Args:
        tensors: each [T, ...], any dtype; T is the same for all.
        rows: [m] int64 in 0 .. T - 1, in any order.
        subset: [s] int64 in 0 .. m - 1, indices in `rows` of those to take. None: all.

    Returns:
        For each tensor [m, ...], or [s, ...], contiguous, of its dtype.

    Raises:
        ValueError: names the argument, the expected and the actual shape.
    """
    check(tensors, rows, subset)
    rows = rows if subset is None else rows[subset]
    return [movable(x).index_select(0, rows).view(x.dtype) for x in tensors]


def put_rows(
    tensors: Sequence[torch.Tensor],
    rows: torch.Tensor,
    sources: Sequence[torch.Tensor],
    subset: torch.Tensor | None = None,
) -> None:
    """Write rows of each tensor, in place; the other rows keep what they hold.

    Args:
        tensors: each [T, ...], any dtype; T is the same for all.
        rows: [m] int64 in 0 .. T - 1, without duplicates.
        sources: for each tensor [m, ...], or [s, ...], of its dtype and not sharing its memory.
        subset: as of `take_rows`.

    Raises:
        ValueError: names the argument, the expected and the actual shape.
    """
    check(tensors, rows, subset, sources)
    rows = rows if subset is None else rows[subset]
    for tensor, source in zip(tensors, sources, strict=True):
        movable(tensor).index_copy_(0, rows, movable(source))


def check(
    tensors: Sequence[torch.Tensor],
    rows: torch.Tensor,
    subset: torch.Tensor | None,
    sources: Sequence[torch.Tensor] | None = None,
) -> None:
    """Refuse wrong shapes and dtypes; read no values."""
    for name, indices in (("rows", rows), ("subset", subset)):
        check_axes(name, indices, torch.int64, "[m]")
    lengths = [tensor.shape[0] if tensor.dim() else 0 for tensor in tensors]
    if len(set(lengths)) > 1:
        raise ValueError(f"tensors: expected one length, got {lengths}")
    if sources is None:
        return
    if len(sources) != len(tensors):
        raise ValueError(f"sources: expected {len(tensors)} tensors, got {len(sources)}")
    for place, (tensor, source) in enumerate(zip(tensors, sources, strict=True)):
        expected = (len(rows if subset is None else subset), *tensor.shape[1:])
        check_tensors([(f"sources[{place}]", source, tensor.dtype, expected)])
