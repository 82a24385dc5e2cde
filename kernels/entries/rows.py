"""Rows of several tensors of one length, taken out and put back together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from kvpolicy.kernels.entries.rounding import movable


def take_rows(tensors: Sequence[torch.Tensor], rows: torch.Tensor) -> list[torch.Tensor]:
    """The same rows of each tensor.

    Args:
        tensors: each [T, ...], any dtype; T is the same for all.
        rows: [m] int64 in 0 .. T - 1, in any order.

    Returns:
        Of each tensor [m, ...], contiguous, of its dtype.

    Raises:
        ValueError: names the argument, the expected and the actual shape.
    """
    check(tensors, rows)
    return [movable(x).index_select(0, rows).view(x.dtype) for x in tensors]


def put_rows(
    tensors: Sequence[torch.Tensor], rows: torch.Tensor, sources: Sequence[torch.Tensor]
) -> None:
    """Write rows of each tensor, in place; the other rows keep what they hold.

    Args:
        tensors: each [T, ...], any dtype; T is the same for all.
        rows: [m] int64 in 0 .. T - 1, no one twice.
        sources: for each tensor [m, ...] of its dtype, not memory of it.

    Raises:
        ValueError: names the argument, the expected and the actual shape.
    """
    check(tensors, rows, sources)
    for tensor, source in zip(tensors, sources, strict=True):
        movable(tensor).index_copy_(0, rows, movable(source))


def check(
    tensors: Sequence[torch.Tensor],
    rows: torch.Tensor,
    sources: Sequence[torch.Tensor] | None = None,
) -> None:
    """Refuses wrong shapes and dtypes; reads no values.

    Raises:
        ValueError: names the argument, the expected and the actual shape.
    """
    if rows.dim() != 1 or rows.dtype != torch.int64:
        raise ValueError(f"rows: expected int64 [m], got {rows.dtype} {list(rows.shape)}")
    lengths = [tensor.shape[0] if tensor.dim() else 0 for tensor in tensors]
    if len(set(lengths)) > 1:
        raise ValueError(f"tensors: expected one length, got {lengths}")
    if sources is None:
        return
    if len(sources) != len(tensors):
        raise ValueError(f"sources: expected {len(tensors)} tensors, got {len(sources)}")
    for place, (tensor, source) in enumerate(zip(tensors, sources, strict=True)):
        expected = (rows.shape[0], *tensor.shape[1:])
        if source.shape != expected or source.dtype != tensor.dtype:
            raise ValueError(
                f"sources[{place}]: expected {tensor.dtype} {list(expected)}, "
                f"got {source.dtype} {list(source.shape)}"
            )
