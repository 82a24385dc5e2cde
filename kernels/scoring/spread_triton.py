"""Means, variances and entropies without the tensors that torch makes for every step.

A row is everything that one result is made of. One program reduces a row, or many short rows. A
long row is cut into parts, by its length and the number of rows alone. Every part leaves its sum,
its number of values and its squares about its own mean, and the last launch joins them in order
(Chan, Golub and LeVeque, 1979): nothing cancels, and the same arguments give the same bits. A
variance and an entropy need a sum first: they read values twice, the second time from the GPU's
cache if it holds them. All sums are float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from kvpolicy.kernels.launch.kernel import kernel
from kvpolicy.kernels.scoring.spread import check
from kvpolicy.kernels.scoring.strided import laid_out
from kvpolicy.kernels.scoring.strided_triton import at as place

# Longest row that one program reduces, in values; longer ones are cut. Not measured.
_LONG = 8192
_TILE = 1024
# Most parts of a row, and number of programs that a launch over cut rows should have: about two for
# each multiprocessor of an H200. A constant, so that prompts of all lengths share a kernel.
_PARTS = 256


def mean(x: torch.Tensor, present: torch.Tensor | None, over: Sequence[int]) -> torch.Tensor:
    """The mean of the present values; 0 of none. As `spread.mean`, in one launch or two."""
    return _reduced(x, present, over, 0)


def var(x: torch.Tensor, present: torch.Tensor | None, over: Sequence[int]) -> torch.Tensor:
    """The population variance of the present values. As `spread.var`, in one launch or two."""
    return _reduced(x, present, over, 1)


def entropy(x: torch.Tensor, present: torch.Tensor | None, over: Sequence[int]) -> torch.Tensor:
    """The entropy of the present values' shares. As `spread.entropy`, in one launch or three."""
    return _reduced(x, present, over, 2)


def _reduced(
    x: torch.Tensor, present: torch.Tensor | None, over: Sequence[int], statistic: int
) -> torch.Tensor:
    check(x, present, over)
    shape = [size for dim, size in enumerate(x.shape) if dim not in over]
    result = torch.empty(shape, dtype=torch.float64, device=x.device)
    rows = result.numel()
    if not x.numel():
        return result.zero_()
    size = x.numel() // rows
    kept_dims = [dim for dim in range(x.dim()) if dim not in over]
    x, present, layout = laid_out(x, present, kept_dims, over)
    # layout[12]: stride of x along the innermost reduced dimension.
    block_rows, block = _tile(size, layout[12])
    blocks, parts = _cut(rows, size, block_rows, block)
    groups = triton.cdiv(rows, block_rows)
    part = result if parts == 1 else result.new_empty(4, rows, parts)
    arguments = (x, x if present is None else present, part, rows, size, blocks, *layout)
    options = {
        "MASKED": present is not None, "ROWS": block_rows, "BLOCK": block, "PARTS": _PARTS,
        "num_warps": 8, "maxnreg": None,
    }  # fmt: skip
    if statistic == 2 and parts > 1:
        _spread[(groups, parts)](*arguments, WHAT=0, ALONE=False, **options)
    if statistic == 2:  # left to itself, the compiler takes 64 registers and spills some
        options["maxnreg"] = 128
    _spread[(groups, parts)](*arguments, WHAT=statistic, ALONE=parts == 1, **options)
    if parts > 1:
        _join[(rows,)](part, result, rows, parts, WHAT=statistic, PARTS=_PARTS, num_warps=4)
    return result


def _tile(size: int, inner: int) -> tuple[int, int]:
    """Rows of a tile, and values of each; a few such pairs serve rows of any length.

    Neighbours in memory are neighbours in a tile: values of a row if `inner`, the stride between
    them, is 1, else rows.
    """
    if inner == 1:
        block = next(length for length in (16, 128, _TILE) if size <= length or length == _TILE)
    else:
        # Programs of cut rows hold a number for every part of each row: fewer rows fit.
        block = 8 if size <= _LONG else 128
    return _TILE // block, block


def _cut(rows: int, size: int, block_rows: int, block: int) -> tuple[int, int]:
    """Number of tiles of a part, and of parts of a row."""
    parts = 1
    if size > _LONG:
        groups = triton.cdiv(rows, block_rows)
        parts = min(triton.cdiv(size, 4 * block), triton.cdiv(_PARTS, groups))
    blocks = triton.cdiv(size, parts * block)
    return blocks, triton.cdiv(size, blocks * block)


@triton.jit
def _number(x):
    """Replace NaN by 0."""
    return tl.where(x == x, x, 0.0)


@triton.jit
def _at(
    own, mask, inside_row, k, size, k1, k2, xk0, xk1, xk2, mk0, mk1, mk2, MASKED: tl.constexpr
):  # fmt: skip
    """Where the values at `k` of each row lie, and which of them are present."""
    inside = inside_row[:, None] & (k < size)[None, :]
    if MASKED:
        address = mask[:, None] + place(k, k1, k2, mk0, mk1, mk2)[None, :]
        inside = inside & (tl.load(address, mask=inside, other=0) != 0)
    return own[:, None] + place(k, k1, k2, xk0, xk1, xk2)[None, :], inside


@kernel()
def _spread(
    x, present, out, rows, size, blocks,
    r1, r2, xr0, xr1, xr2, mr0, mr1, mr2,
    k1, k2, xk0, xk1, xk2, mk0, mk1, mk2,
    WHAT: tl.constexpr, ALONE: tl.constexpr, PARTS: tl.constexpr,
    MASKED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Reduce a part of some rows, to a mean (WHAT is 0), a variance (1) or an entropy (2).

    out: [R], a result per row, if the part is a whole row (ALONE); else [4, R, P] for P parts:
    sums, numbers of values, squares, and terms of an entropy, which needs the sums of all parts.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    part, parts = tl.program_id(1), tl.num_programs(1)
    inside_row = row < rows
    row_address = x + place(row, r1, r2, xr0, xr1, xr2)
    mask = present + place(row, r1, r2, mr0, mr1, mr2)
    row = row.to(tl.int64)
    total = tl.zeros((ROWS, BLOCK), tl.float64)
    number = tl.zeros((ROWS, BLOCK), tl.int32)
    plane = row * parts + part
    if WHAT != 2 or ALONE:
        for block in range(blocks):
            k = (part * blocks + block) * BLOCK + tl.arange(0, BLOCK)
            address, inside = _at(
                row_address, mask, inside_row, k, size, k1, k2, xk0, xk1, xk2, mk0, mk1, mk2, MASKED
            )
            total += tl.load(address, mask=inside, other=0.0)
            number += inside.to(tl.int32)
    sums = tl.sum(total, axis=1)
    count = tl.sum(number, axis=1).to(tl.float64)
    if WHAT == 2 and not ALONE:
        part_ids = tl.arange(0, PARTS)
        part_offsets = (row[:, None] * parts) + part_ids[None, :]
        part_mask = inside_row[:, None] & (part_ids < parts)[None, :]
        sums = tl.sum(tl.load(out + part_offsets, mask=part_mask, other=0.0), axis=1)
    middle = sums / tl.maximum(count, 1.0)
    divisor = _number(sums) + 0.0
    terms = tl.zeros((ROWS, BLOCK), tl.float64)
    if WHAT != 0:
        for block in range(blocks):
            k = (part * blocks + block) * BLOCK + tl.arange(0, BLOCK)
            address, inside = _at(
                row_address, mask, inside_row, k, size, k1, k2, xk0, xk1, xk2, mk0, mk1, mk2, MASKED
            )
            value = tl.load(address, mask=inside, other=0.0)
            if WHAT == 1:
                value -= middle[:, None]
                terms += tl.where(inside, value * value, 0.0)
            else:
                share = _number(value / divisor[:, None])
                terms += tl.where(inside, _number(share * _number(tl.log(share))), 0.0)
    term_sums = tl.sum(terms, axis=1)
    if ALONE:
        if WHAT == 0:
            tl.store(out + row, _number(middle), mask=inside_row)
        elif WHAT == 1:
            tl.store(out + row, _number(term_sums / tl.maximum(count, 1.0)), mask=inside_row)
        else:
            tl.store(out + row, -_number(term_sums), mask=inside_row)
    else:
        step = rows.to(tl.int64) * parts
        if WHAT != 2:
            tl.store(out + plane, sums, mask=inside_row)
            tl.store(out + step + plane, count, mask=inside_row)
            tl.store(out + 2 * step + plane, term_sums, mask=inside_row)
        else:
            tl.store(out + 3 * step + plane, term_sums, mask=inside_row)


@kernel()
def _join(part, out, rows, parts, WHAT: tl.constexpr, PARTS: tl.constexpr):
    """Join the parts [4, R, P] of a row to its result."""
    row = tl.program_id(0).to(tl.int64)
    part_ids = tl.arange(0, PARTS)
    step = rows.to(tl.int64) * parts
    address = part + row * parts + part_ids
    part_mask = part_ids < parts
    if WHAT == 2:
        terms = tl.sum(tl.load(address + 3 * step, mask=part_mask, other=0.0))
        tl.store(out + row, -_number(terms))
    else:
        sums = tl.load(address, mask=part_mask, other=0.0)
        counts = tl.load(address + step, mask=part_mask, other=0.0)
        number = tl.maximum(tl.sum(counts), 1.0)
        middle = tl.sum(sums) / number
        if WHAT == 0:
            tl.store(out + row, _number(middle))
        else:
            deviation = sums / tl.maximum(counts, 1.0) - middle
            squares = tl.load(address + 2 * step, mask=part_mask, other=0.0)
            squares += tl.where(counts > 0, counts * deviation * deviation, 0.0)
            tl.store(out + row, _number(tl.sum(squares) / number))
