"""Reading ragged lists of entries into dense tensors: a prefix count and one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from kvpolicy.kernels.entries.gather import check
from kvpolicy.kernels.entries.rounding import movable
from kvpolicy.kernels.launch import tuned
from kvpolicy.kernels.launch.kernel import kernel
from kvpolicy.kernels.launch.tiles import rows_of


def gather(
    entries: torch.Tensor,
    values: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    holds: torch.Tensor | None = None,
    *,
    width: int | None = None,
    tile: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of listed entries, laid out by candidate.

    As `gather.gather`, but the host reads no tensor and lengths of lists are not checked: entries
    that a list lacks are zero, those that it has too many are not read.

    Args:
        entries, values: [E, D] any dtype, contiguous; entry e is entries[e] and values[e].
        indptr: [G + 1] int64; KV head g owns indices[indptr[g] : indptr[g + 1]].
        indices: [nnz] int64.
        holds: [G, M] bool; the j-th entry of head g's list goes to its j-th True. None: all lists
            have length M.
        width: M where `holds` is None. None: nnz // G, which is wrong if `indptr` is a slice of a
            longer one.
        tile: rows that a program reads; a power of two. None: as measured for the GPU (see
            `tuned`), else `rows_of`.

    Returns:
        k, v: [G, M, D], dtypes of entries and of values; zero where `holds` is False.

    Raises:
        ValueError: names the argument, the expected and the actual shape.
        TunedError: as `tuned.load`.
    """
    check(entries, values, indptr, holds)
    heads, size = indptr.shape[0] - 1, entries.shape[1]
    if not (entries.is_contiguous() and values.is_contiguous()):
        raise ValueError("entries, values: expected contiguous [E, D]")
    if holds is not None:
        width = holds.shape[1]
    elif width is None:
        width = indices.shape[0] // heads
    k = torch.empty((heads, width, size), dtype=entries.dtype, device=entries.device)
    v = torch.empty((heads, width, size), dtype=values.dtype, device=values.device)
    if not width:
        return k, v
    # [G, M]: number of True in a head's row up to each candidate, this one included.
    order = None if holds is None else holds.cumsum(1, dtype=torch.int32)
    mask = None if holds is None else holds.contiguous().view(torch.uint8)
    padded = triton.next_power_of_2(size)
    element = max(entries.element_size(), values.element_size())
    measured = tuned.choice("gather", entries.device, size * element, width)
    tile = tile or measured.get("tile") or rows_of(padded, element)
    _gather[(triton.cdiv(width, tile), heads)](
        movable(entries), movable(values), indptr.contiguous(), indices.contiguous(), mask, order,
        movable(k), movable(v), width,
        SIZE=size, PADDED_SIZE=padded, TILE=tile,
    )  # fmt: skip
    return k, v


@kernel(aligned=["entries", "values", "k", "v"])
def _gather(
    entries, values, indptr, indices, holds, order, k, v, width,
    SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Read the entries of a tile of one KV head's candidates."""
    head = tl.program_id(1).to(tl.int64)
    candidate = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = candidate < width
    first, end = tl.load(indptr + head), tl.load(indptr + head + 1)
    if holds is None:
        index = first + candidate
        listed = inside
    else:
        listed = tl.load(holds + head * width + candidate, mask=inside, other=0) > 0
        index = first + tl.load(order + head * width + candidate, mask=listed, other=1) - 1
    listed = listed & (index < end)
    entry = tl.load(indices + index, mask=listed, other=0)
    dims = tl.arange(0, PADDED_SIZE)
    dim_mask = (dims < SIZE)[None, :]
    mask = listed[:, None] & dim_mask
    source_offset = entry[:, None] * SIZE + dims[None, :]
    key_tile = tl.load(entries + source_offset, mask=mask, other=0)
    value_tile = tl.load(values + source_offset, mask=mask, other=0)
    target_offset = (head * width + candidate)[:, None] * SIZE + dims[None, :]
    tl.store(k + target_offset, key_tile, mask=inside[:, None] & dim_mask)
    tl.store(v + target_offset, value_tile, mask=inside[:, None] & dim_mask)
