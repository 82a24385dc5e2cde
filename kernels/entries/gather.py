"""Read the ragged entry lists of one request into dense tensors."""

from __future__ import annotations

import torch
from kvpolicy.kernels.entries.rounding import movable
from kvpolicy.kernels.launch.arguments import check_axes, refused


def gather(
    entries: torch.Tensor,
    values: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    holds: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of listed entries, laid out by candidate.

    Args:
        entries, values: [E, D] any dtype; entry e is entries[e] and values[e]. Nothing outside the
            lists is read.
        indptr: [G + 1] int64; KV head g owns indices[indptr[g] : indptr[g + 1]]. It may be a slice
            of a longer one, as one request's of a batch.
        indices: [nnz] int64.
        holds: [G, M] bool; the j-th entry of head g's list goes to its j-th True. None: all lists
            have length M.

    Returns:
        k, v: [G, M, D], dtypes of entries and of values; zero where `holds` is False.

    Raises:
        ValueError: names the argument, the expected and the actual lengths.
    """
    check(entries, values, indptr, holds)
    lengths = indptr.diff()
    if holds is None:
        if bool((lengths != lengths[0]).any()):
            raise ValueError(f"indptr: expected lists of one length, got {lengths.tolist()}")
    elif bool((holds.sum(dim=1) != lengths).any()):
        raise ValueError(
            f"holds: expected {lengths.tolist()} True per KV head, got {holds.sum(dim=1).tolist()}"
        )
    listed = indices[indptr[0] : indptr[-1]]
    dense = [
        _dense(movable(x).index_select(0, listed), holds, lengths).view(x.dtype)
        for x in (entries, values)
    ]
    return dense[0], dense[1]


def check(
    entries: torch.Tensor, values: torch.Tensor, indptr: torch.Tensor, holds: torch.Tensor | None
) -> None:
    """Refuse wrong shapes and dtypes; read no tensor."""
    check_axes("indptr", indptr, torch.int64, "[G + 1]")
    heads, size = len(indptr) - 1, entries.shape[-1]
    if heads < 1:
        raise refused("indptr", indptr, "int64 [G + 1], G > 0")
    for name, x in (("entries", entries), ("values", values)):
        if x.dim() != 2 or x.shape[1] != size:
            raise ValueError(f"{name}: expected [E, {size}], got {list(x.shape)}")
    if holds is not None and (holds.dtype != torch.bool or holds.shape[:-1] != (heads,)):
        raise refused("holds", holds, f"bool [{heads}, M]")


def _dense(rows: torch.Tensor, holds: torch.Tensor | None, lengths: torch.Tensor) -> torch.Tensor:
    if holds is None:
        heads, size = lengths.shape[0], rows.shape[1]
        return rows.view(heads, rows.shape[0] // heads, size)
    dense = rows.new_zeros(*holds.shape, rows.shape[1])
    # A mask is filled row by row, and `rows` stand list by list.
    dense[holds] = rows
    return dense
