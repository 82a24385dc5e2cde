"""The nearest kept entry by tiles of cosines, none of which leaves the chip.

Exact cosines of all pairs would need float64, for which tensor cores are 15 times slower than for
bfloat16. So float32 decides most rows (a row is a dropped entry):

1. Cosines of tiles of dropped by kept entries are summed in float32. Every lane of a row keeps its
   two highest. The row is decided if no other cosine is near its highest: within what the errors of
   both and one unit of float32 can add up to.
2. For the undecided rows, a few of a hundred if vectors differ, the tiles are computed again; every
   cosine near the highest is computed as the reference does, and these are compared.

So the choice is that of the reference, ties included. The order in which rows come to the second
step changes nothing, since each is decided by itself.

The error E of a float32 cosine (times |a|, the length of the dropped vector, if vectors are not
normalised before): products of two halves are exact, each of at most D additions loses at most
2^-22 of sum |a_i b_i| <= |a| |b| (twice a unit, for tensor cores that truncate), and rounding the
product with 1 / |b| some 2^-22 more. Other types are normalised before, which rounds each component
once, and multiplied in three parts of 11 bits, which loses at most 12 * 2^-22 of each product, even
if the parts are truncated. Together E < (D + 16) 2^-22. Two cosines further apart than 2 E + 2^-23
are in the same order in float32 as in the reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from kvpolicy.kernels.entries.rounding import FLOAT8
from kvpolicy.kernels.entries.rounding_triton import widened
from kvpolicy.kernels.launch import tuned
from kvpolicy.kernels.launch.kernel import kernel
from kvpolicy.kernels.launch.occupancy import is_hopper
from kvpolicy.kernels.merging.nearest import check

_NOTHING = tl.constexpr(2**31 - 1)
# Lengths for which squares and products of halves stay far from float32's limits.
_LEAST, _MOST = tl.constexpr(2.0**-40), tl.constexpr(2.0**40)


def nearest(
    x: torch.Tensor,
    dropped: torch.Tensor,
    present: torch.Tensor,
    kept: torch.Tensor,
    ids: torch.Tensor | None = None,
    *,
    rows: int | None = None,
    columns: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the kept vector that has the highest cosine with each dropped one.

    As `nearest.nearest`; the host does not wait for the device. P and n decide the launches; how
    many entries are dropped and kept decides the work.

    Args:
        x: [G, n, D] or [E, D] any float dtype; the last axis contiguous, or it is copied.
        dropped, present, kept, ids: as of the reference.
        rows: dropped entries of a program, a power of two from 16; None: as measured for the GPU
            (see `tuned`), else 16 if P is no more, else as many vectors as registers hold.
        columns: kept entries of a tile, a power of two from 16; None: as measured, else 32 or 64 by
            the size of a vector.

    Returns:
        int64 [G, P] and bool [G, P].

    Raises:
        TunedError: as `tuned.load`.
    """
    check(x, dropped, present, kept, ids)
    (heads, width), others, size = dropped.shape, kept.shape[1], x.shape[-1]
    device = x.device
    receivers = torch.zeros((heads, width), dtype=torch.int64, device=device)
    receivers_present = torch.zeros((heads, width), dtype=torch.bool, device=device)
    if not width or not others or not heads:
        return receivers, receivers_present
    if x.stride(-1) != 1:
        x = x.contiguous()
    halves = x.dtype in (torch.float16, torch.bfloat16, *FLOAT8)
    block = max(triton.next_power_of_2(size), 16)
    # Rows of 256 bytes, 512, and more that registers hold; without Hopper's products half of them.
    size_of_row = block * max(x.element_size(), 2)
    max_rows = 128 if size_of_row <= 256 and halves else 64 if size_of_row <= 512 else 16
    max_rows = max_rows if is_hopper(device) else max(max_rows // 2, 16)
    measured = tuned.choice("nearest", device, x.dtype, size, width)
    rows = rows or measured.get("rows") or (16 if width <= 16 else max_rows)
    columns = columns or measured.get("columns")
    columns = columns or min(64, max(32, max_rows if halves else rows))
    # Kept columns, and their number; lengths of their vectors; flags per head: whether float32
    # cannot serve some of these, and the number of undecided rows; these rows, and for each the
    # cosine from which on cosines are computed exactly.
    order = torch.empty((heads, others), dtype=torch.int32, device=device)
    number = torch.empty(heads, dtype=torch.int32, device=device)
    lengths = torch.empty((heads, others), dtype=torch.float64, device=device)
    flags = torch.zeros((2, heads), dtype=torch.int32, device=device)
    open_rows = torch.empty((heads, width), dtype=torch.int32, device=device)
    near = torch.empty((heads, width), dtype=torch.float32, device=device)
    pool_rows = None if ids is None else ids.contiguous()
    vectors = (x, pool_rows, order, number, lengths, flags)
    by_row = (dropped.contiguous(), receivers, open_rows, near)
    strides = (0 if ids is not None else x.stride(0), x.stride(-2), others, width)
    options = {
        "D": size,
        "HALVES": halves,
        # The interpreter cannot multiply matrices of bfloat16.
        "UPCAST": not x.is_cuda,
        "BLOCK_D": block,
    }
    _order[(heads,)](kept.contiguous().view(torch.uint8), order, number, others, BLOCK=1024)
    _lengths[(triton.cdiv(others, columns), heads)](
        *vectors, *strides[:3], D=size, HALVES=halves, BLOCK_N=columns, BLOCK_D=block,
    )  # fmt: skip
    marks = (present.contiguous().view(torch.uint8), receivers_present.view(torch.uint8))
    _highest[(triton.cdiv(width, rows), heads)](
        *vectors, *by_row, *marks, *strides, (2 * size + 36) * 2.0**-22,
        **options, BLOCK_M=rows, BLOCK_N=columns, num_warps=8 if rows >= 64 else 4,
        num_stages=3 if halves else 2,
    )  # fmt: skip
    _exact[(triton.cdiv(width, 16), heads)](
        *vectors, *by_row, *strides, **options, BLOCK_M=16, BLOCK_N=columns, num_warps=4,
        num_stages=2,
    )  # fmt: skip
    return receivers, receivers_present


@kernel()
def _order(kept, order, number, others, BLOCK: tl.constexpr):
    """List the columns that a head keeps, in order, and count them."""
    head = tl.program_id(0).to(tl.int64)
    count = 0
    for first in range(0, others, BLOCK):
        column = first + tl.arange(0, BLOCK)
        stays = tl.load(kept + head * others + column, mask=column < others, other=0).to(tl.int32)
        place = count + tl.cumsum(stays) - stays
        tl.store(order + head * others + place, column, mask=stays > 0)
        count += tl.sum(stays)
    tl.store(number + head, count)


@triton.jit
def _read(x, ids, places, there, stride, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load rows [*, BLOCK_D] of one head; 0 beyond D and where `there` is False."""
    column = tl.arange(0, BLOCK_D)
    places = places.to(tl.int64)
    if ids is not None:
        places = tl.load(ids + places, mask=there, other=0)
    mask = there[:, None] & (column < D)[None, :]
    rows = tl.load(x + places[:, None] * stride + column[None, :], mask=mask, other=0.0)
    if rows.dtype.primitive_bitwidth == 8:  # exact, and multiplied as halves are
        rows = widened(rows).to(tl.float16)
    return rows


@triton.jit
def _double(rows, HALVES: tl.constexpr):
    if HALVES:
        rows = rows.to(tl.float32)
    return rows.to(tl.float64)


@triton.jit
def _length(rows):
    """Euclidean lengths of float64 rows; 0 for rows with NaN or infinity."""
    total = tl.sum(rows * rows, axis=1)
    return tl.where(total < float("inf"), tl.sqrt(total), 0.0)


@triton.jit
def _direction(rows, length):
    """Unit vectors of float64 rows; zero where the length is 0."""
    has_length = length > 0
    return tl.where(has_length[:, None], rows / tl.where(has_length, length, 1.0)[:, None], 0.0)


@triton.jit
def _cosines(
    a, x, ids, places, there, length, stride, D: tl.constexpr, HALVES: tl.constexpr,
    UPCAST: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Cosines float32 [M, N] of a with some rows; with HALVES times the lengths of a."""
    rows = _read(x, ids, places, there, stride, D, BLOCK_D)
    inverse = tl.where(length > 0, 1.0 / tl.where(length > 0, length, 1.0), 0.0)
    if HALVES:
        if UPCAST:
            rows = rows.to(tl.float32)
        match = tl.dot(a, tl.trans(rows), input_precision="ieee")
        match = match * inverse.to(tl.float32)[None, :]
    else:
        unit = tl.where((length > 0)[:, None], rows.to(tl.float64) * inverse[:, None], 0.0)
        match = tl.dot(a, tl.trans(unit.to(tl.float32)), input_precision="tf32x3")
    return match


@kernel(aligned=["x", "stride_head", "stride"])
def _lengths(
    x, ids, order, count, lengths, flags, stride_head, stride, others, D: tl.constexpr,
    HALVES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    number = tl.load(count + head)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = column < number
    if tl.program_id(0) * BLOCK_N < number:
        places = tl.load(order + head * others + column, mask=exists, other=0)
        if ids is not None:
            ids += head * others
        rows = _read(x + head * stride_head, ids, places, exists, stride, D, BLOCK_D)
        rows = _double(rows, HALVES)
        length = _length(rows)
        tl.store(lengths + head * others + column, length, mask=exists)
        if HALVES:
            # float32 has no cosine for vectors with NaN or infinity; for zero vectors it has.
            zero = tl.sum((rows != 0).to(tl.int32), axis=1) == 0
            tame = ((length >= _LEAST) & (length <= _MOST)) | zero
            if tl.max((exists & ~tame).to(tl.int32), axis=0) > 0:
                tl.store(flags + head, 1)


@kernel(aligned=["x", "stride_head", "stride"])
def _highest(
    x, ids, order, count, lengths, flags, dropped, receivers, open_rows, near, present,
    receivers_present,
    stride_head, stride, others, width, bound, D: tl.constexpr, HALVES: tl.constexpr,
    UPCAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    heads = tl.num_programs(1)
    kept_count = tl.load(count + head)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = tl.load(present + head * width + row, mask=row < width, other=0) > 0
    if (tl.max(row_mask.to(tl.int32), axis=0) == 0) | (kept_count <= 0):
        return
    x += head * stride_head
    if ids is not None:
        ids += head * others
    places = tl.load(dropped + head * width + row, mask=row_mask, other=0)
    a = _read(x, ids, places, row_mask, stride, D, BLOCK_D)
    exact = _double(a, HALVES)
    size = _length(exact)
    if HALVES:
        wild = ((size < _LEAST) | (size > _MOST)) | (tl.load(flags + head) > 0)
        scale = size.to(tl.float32)
        if UPCAST:
            a = a.to(tl.float32)
    else:
        wild = size < 0
        scale = tl.full([BLOCK_M], 1.0, tl.float32)
        a = _direction(exact, size).to(tl.float32)

    lane = tl.arange(0, BLOCK_N)
    best = tl.full([BLOCK_M, BLOCK_N], float("-inf"), tl.float32)
    second = best
    tile = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for start in range(0, kept_count, BLOCK_N):
        column_mask = start + lane < kept_count
        offset = head * others + start + lane
        length = tl.load(lengths + offset, mask=column_mask, other=0.0)
        column = tl.load(order + offset, mask=column_mask, other=0)
        match = _cosines(a, x, ids, column, column_mask, length, stride, D, HALVES, UPCAST, BLOCK_D)
        match = tl.where(column_mask[None, :], match, float("-inf"))
        tile = tl.where(match > best, start, tile)
        second = tl.maximum(second, tl.minimum(best, match))
        best = tl.maximum(best, match)

    highest = tl.max(best, axis=1)
    floor = highest - bound * scale
    close = (best >= floor[:, None]).to(tl.int32) + (second >= floor[:, None]).to(tl.int32)
    place = tl.min(tl.where(best == highest[:, None], tile + lane[None, :], _NOTHING), axis=1)
    # All cosines of a zero vector are equal: it gets the first kept entry.
    directed = row_mask & (size > 0)
    place = tl.where(directed, place, 0)
    column = tl.load(order + head * others + place, mask=row_mask, other=0)
    tl.store(receivers + head * width + row, column.to(tl.int64), mask=row_mask)
    tl.store(receivers_present + head * width + row, tl.full([BLOCK_M], 1, tl.uint8), mask=row_mask)
    undecided = (directed & ((tl.sum(close, axis=1) > 1) | wild)).to(tl.int32)
    total = tl.sum(undecided, axis=0)
    if total > 0:
        # Integers are added, and each row is decided by itself: no result depends on the order.
        index = tl.atomic_add(flags + heads + head, total) + tl.cumsum(undecided, axis=0) - 1
        tl.store(open_rows + head * width + index, row, mask=undecided > 0)
        floor = tl.where(wild, float("-inf"), floor)
        tl.store(near + head * width + index, floor, mask=undecided > 0)


@kernel(aligned=["x", "stride_head", "stride"])
def _exact(
    x, ids, order, count, lengths, flags, dropped, receivers, open_rows, near,
    stride_head, stride, others, width, D: tl.constexpr, HALVES: tl.constexpr,
    UPCAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    number = tl.load(flags + tl.num_programs(1) + head)
    first = tl.program_id(0) * BLOCK_M
    if first >= number:
        return
    kept_count = tl.load(count + head)
    x += head * stride_head
    if ids is not None:
        ids += head * others
    entry = head * width + first + tl.arange(0, BLOCK_M)
    row_mask = first + tl.arange(0, BLOCK_M) < number
    row = tl.load(open_rows + entry, mask=row_mask, other=0)
    floor = tl.load(near + entry, mask=row_mask, other=0.0)
    places = tl.load(dropped + head * width + row, mask=row_mask, other=0)
    a = _read(x, ids, places, row_mask, stride, D, BLOCK_D)
    dropped_unit = _double(a, HALVES)
    dropped_unit = _direction(dropped_unit, _length(dropped_unit))
    if HALVES:
        if UPCAST:
            a = a.to(tl.float32)
    else:
        a = dropped_unit.to(tl.float32)

    lane = tl.arange(0, BLOCK_N)
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    place = tl.zeros([BLOCK_M], tl.int32)
    for start in range(0, kept_count, BLOCK_N):
        ordinal = start + lane
        column_mask = ordinal < kept_count
        length = tl.load(lengths + head * others + ordinal, mask=column_mask, other=0.0)
        column = tl.load(order + head * others + ordinal, mask=column_mask, other=0)
        match = _cosines(a, x, ids, column, column_mask, length, stride, D, HALVES, UPCAST, BLOCK_D)
        # NaN, of vectors that float32 cannot serve, counts as near.
        pairs = (row_mask[:, None] & column_mask[None, :] & ~(match < floor[:, None])).to(tl.int32)
        while tl.max(tl.max(pairs, axis=1), axis=0) > 0:
            candidate = tl.min(tl.where(pairs > 0, ordinal[None, :], _NOTHING), axis=1)
            valid = candidate < _NOTHING
            offset = head * others + candidate
            kept_column = tl.load(order + offset, mask=valid, other=0)
            kept_unit = _double(_read(x, ids, kept_column, valid, stride, D, BLOCK_D), HALVES)
            kept_unit = _direction(kept_unit, tl.load(lengths + offset, mask=valid, other=0.0))
            cosine = tl.sum(dropped_unit * kept_unit, axis=1).to(tl.float32)
            # Places ascend, so the first of equal cosines stays.
            better = valid & (cosine > best)
            best = tl.where(better, cosine, best)
            place = tl.where(better, candidate, place)
            pairs = tl.where(ordinal[None, :] == candidate[:, None], 0, pairs)
    column = tl.load(order + head * others + place, mask=row_mask, other=0)
    tl.store(receivers + head * width + row, column.to(tl.int64), mask=row_mask)
