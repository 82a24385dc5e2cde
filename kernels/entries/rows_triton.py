"""Rows of several tensors of one length, taken out and put back in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from kvpolicy.kernels.entries.rows import check
from kvpolicy.kernels.launch import tuned
from kvpolicy.kernels.launch.kernel import kernel

# Most tensors of one launch.
_MOST = 4
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def take_rows(
    tensors: Sequence[torch.Tensor],
    rows: torch.Tensor,
    subset: torch.Tensor | None = None,
    *,
    block: int | None = None,
) -> list[torch.Tensor]:
    """Take the same rows of each tensor.

    As `rows.take_rows`, but indices are not checked.

    Args:
        tensors: each [T, ...], any dtype; T is the same for all.
        rows: [m] int64 in 0 .. T - 1, in any order.
        subset: as of `rows.take_rows`.
        block: elements that a program copies; a power of two. None: as measured for the GPU (see
            `tuned`), else 2048.

    Returns:
        For each tensor [m, ...], or [s, ...], contiguous, of its dtype.

    Raises:
        ValueError: names the argument, the expected and the actual shape.
        TunedError: as `tuned.load`.
    """
    check(tensors, rows, subset)
    number = len(rows if subset is None else subset)
    results = [torch.empty((number, *x.shape[1:]), dtype=x.dtype, device=x.device) for x in tensors]
    flat = [_flat(tensor.contiguous()) for tensor in tensors]
    _launch(flat, [_flat(tensor) for tensor in results], rows, subset, block, put=False)
    return results


def put_rows(
    tensors: Sequence[torch.Tensor],
    rows: torch.Tensor,
    sources: Sequence[torch.Tensor],
    subset: torch.Tensor | None = None,
    *,
    block: int | None = None,
) -> None:
    """Write rows of each tensor, in place; the other rows keep what they hold.

    As `rows.put_rows`, but indices are not checked.

    Args:
        tensors: each [T, ...], any dtype, contiguous; T is the same for all.
        rows: [m] int64 in 0 .. T - 1, without duplicates.
        sources: for each tensor [m, ...], or [s, ...], of its dtype and not sharing its memory.
        subset: as of `take_rows`.
        block: elements that a program copies; a power of two. None: as measured for the GPU (see
            `tuned`), else 2048.

    Raises:
        ValueError: names the argument, the expected and the actual shape.
        TunedError: as `tuned.load`.
    """
    check(tensors, rows, subset, sources)
    for place, tensor in enumerate(tensors):
        if not tensor.is_contiguous():
            raise ValueError(f"tensors[{place}]: expected a contiguous tensor")
    flat_sources = [_flat(source.contiguous()) for source in sources]
    _launch(flat_sources, [_flat(tensor) for tensor in tensors], rows, subset, block, put=True)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as integers [T, W]."""
    rows = tensor.detach().view(tensor.shape[0], tensor[:1].numel() if tensor.shape[0] else 0)
    return rows.view(_WHOLE[tensor.element_size()])


def _launch(
    sources: list[torch.Tensor],
    targets: list[torch.Tensor],
    rows: torch.Tensor,
    subset: torch.Tensor | None,
    block: int | None,
    *,
    put: bool,
) -> None:
    pairs = [(x, y) for x, y in zip(sources, targets, strict=True) if x.numel() and y.numel()]
    # Rows of no multiple of 16 bytes are copied apart: others are read 16 bytes at a time.
    narrow = [pair for pair in pairs if _row_bytes(pair[0]) % 16]
    wide = [pair for pair in pairs if not _row_bytes(pair[0]) % 16]
    for function, pair_group in ((_copy_aligned, wide), (_copy_any, narrow)):
        _copied(function, pair_group, rows, subset, block, put=put)


def _row_bytes(tensor: torch.Tensor) -> int:
    return tensor.shape[1] * tensor.element_size()


def _copied(
    function: Any,
    pairs: list[tuple[torch.Tensor, torch.Tensor]],
    rows: torch.Tensor,
    subset: torch.Tensor | None,
    block: int | None,
    *,
    put: bool,
) -> None:
    for start in range(0, len(pairs), _MOST):
        batch = pairs[start : start + _MOST]
        widths = [source.shape[1] for source, _ in batch]
        row_bytes = max(_row_bytes(source) for source, _ in batch)
        measured = tuned.choice("rows", rows.device, row_bytes)
        elements = block or measured.get("block", 2048)
        blocks = [triton.cdiv(width, elements) for width in widths]
        spare = _MOST - len(batch)
        widths, blocks = widths + [0] * spare, blocks + [0] * spare
        absent = [None] * spare
        function[(len(rows if subset is None else subset), sum(blocks))](
            *(source for source, _ in batch), *absent,
            *(target for _, target in batch), *absent, rows.contiguous(),
            None if subset is None else subset.contiguous(),
            *widths, *blocks[:-1], PUT=put, BLOCK=elements,
        )  # fmt: skip


def _copy(
    source_0, source_1, source_2, source_3, target_0, target_1, target_2, target_3, rows, subset,
    width_0, width_1, width_2, width_3, blocks_0, blocks_1, blocks_2,
    PUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy one block of one row of one of four tensors; an absent tensor has no blocks."""
    part = tl.program_id(1)
    if part < blocks_0:
        _copy_part(source_0, target_0, rows, subset, width_0, part, PUT, BLOCK)
    part -= blocks_0
    if source_1 is not None:
        if (part >= 0) & (part < blocks_1):
            _copy_part(source_1, target_1, rows, subset, width_1, part, PUT, BLOCK)
    part -= blocks_1
    if source_2 is not None:
        if (part >= 0) & (part < blocks_2):
            _copy_part(source_2, target_2, rows, subset, width_2, part, PUT, BLOCK)
    part -= blocks_2
    if source_3 is not None:
        if part >= 0:
            _copy_part(source_3, target_3, rows, subset, width_3, part, PUT, BLOCK)


_SIZES = ("source", "target", "width")
_copy_aligned = kernel(aligned=[f"{name}_{i}" for name in _SIZES for i in range(_MOST)])(_copy)
_copy_any = kernel()(_copy)


@triton.jit
def _copy_part(source, target, rows, subset, width, part, PUT: tl.constexpr, BLOCK: tl.constexpr):
    """Copy a block of source[i] to target[row], or without PUT of source[row] to target[i].

    i: program 0's id. row: the i-th of the rows.
    """
    i = tl.program_id(0).to(tl.int64)
    index = i
    if subset is not None:
        index = tl.load(subset + i)
    row = tl.load(rows + index)
    source_row, target_row = (i, row) if PUT else (row, i)
    column = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(source + source_row * width + column, mask=column < width)
    tl.store(target + target_row * width + column, x, mask=column < width)
