"""The nearest kept entry by tiles of cosines, none of which leaves the chip.

Exact cosines of all pairs would need float64, for which tensor cores are 15 times slower than for
bfloat16. So most pairs are told apart by float32:

1. Cosines of tiles of dropped by kept entries, summed in float32. Every lane of a tile keeps its
   two highest. At the end a row is decided if no second cosine comes near its highest, near being
   what the errors of both and one unit of float32 can make up.
2. The rows that are left, a few of a hundred where vectors differ, go over their tiles again;
   every cosine near the highest is computed as the reference does it, and these are compared.

So what is chosen is what the reference chooses, ties included. The order in which rows come to the
second step changes nothing, since each is decided by itself.

Error of a float32 cosine, times the dropped vector's length a where vectors are not normalised
before: products of two halves are exact, each of at most D additions loses at most 2^-22 of
sum |a_i b_i| <= |a| |b| (twice a unit, for tensor cores that cut off), and rounding the product
with 1 / |b| some 2^-22 more. Other types are normalised before, which rounds each component once,
and multiplied in three parts of 11 bits, which loses at most 12 * 2^-22 of each product, even if
the parts were cut off and not rounded. Together E < (D + 16) 2^-22. Two cosines further apart than
2 E + 2^-23 are in the same order in float32 as in the reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from kvpolicy.kernels.launch import tuned
from kvpolicy.kernels.merging.nearest import check

_NOTHING = tl.constexpr(2**31 - 1)
# Lengths for which squares and products of halves stay far from float32's limits.
_LEAST, _MOST = tl.constexpr(2.0**-40), tl.constexpr(2.0**40)


def nearest(
    x: torch.Tensor,
    dropped: torch.Tensor,
    dropped_count: torch.Tensor,
    kept: torch.Tensor,
    kept_count: torch.Tensor,
    *,
    rows: int | None = None,
    columns: int | None = None,
) -> torch.Tensor:
    """Which kept vector is most like each dropped one.

    As `nearest.nearest`, without reading a number on the host. Time and launches depend on P, work
    on the counts; columns beyond a count cost nothing.

    Args:
        x: [G, n, D] any float dtype; the last axis contiguous, or it is copied.
        dropped, dropped_count, kept, kept_count: as there.
        rows: dropped entries of a program, a power of two from 16; None: as measured for the GPU
            (see `tuned`), else by P and the size of a vector, as registers allow.
        columns: kept entries of a tile, a power of two from 16; None: as measured, else as above.

    Returns:
        [G, P] int64.

    Raises:
        ValueError: names the argument, the expected and the actual shape.
        TunedError: as `tuned.load`.
    """
    check(x, dropped, dropped_count, kept, kept_count)
    (heads, width), others, size = dropped.shape, kept.shape[1], x.shape[2]
    chosen = torch.zeros((heads, width), dtype=torch.int64, device=x.device)
    if not width or not others or not heads:
        return chosen
    if x.stride(2) != 1:
        x = x.contiguous()
    halves = x.dtype in (torch.float16, torch.bfloat16)
    block = max(triton.next_power_of_2(size), 16)
    # What registers hold of rows of 256 bytes, 512, and more.
    size_of_row = block * x.element_size()
    most = 128 if size_of_row <= 256 and halves else 64 if size_of_row <= 512 else 16
    measured = tuned.choice("nearest", x.device, x.dtype, size, width)
    rows = rows or measured.get("rows") or min(max(triton.next_power_of_2(width), 16), most)
    columns = columns or measured.get("columns") or min(64, max(32, most))
    dropped, kept = dropped.contiguous(), kept.contiguous()
    # Lengths of kept vectors, whether a head has such as float32 cannot serve, how many rows are
    # undecided; which rows, and from which cosine on they are computed exactly.
    lengths = torch.empty((heads, others), dtype=torch.float64, device=x.device)
    flags = torch.zeros((2, heads), dtype=torch.int32, device=x.device)
    open_rows = torch.empty((heads, width), dtype=torch.int32, device=x.device)
    near = torch.empty((heads, width), dtype=torch.float32, device=x.device)
    given = (x, dropped, dropped_count, kept, kept_count, lengths, flags, chosen, open_rows, near)
    strides = (x.stride(0), x.stride(1), width, others)
    options = {
        "D": size,
        "HALVES": halves,
        # The interpreter cannot multiply matrices of bfloat16.
        "UPCAST": not x.is_cuda,
        "BLOCK_D": block,
    }
    _lengths[(triton.cdiv(others, columns), heads)](
        x, kept, kept_count, lengths, flags, *strides[:2], others,
        D=size, HALVES=halves, BLOCK_N=columns, BLOCK_D=block,
    )  # fmt: skip
    _highest[(triton.cdiv(width, rows), heads)](
        *given, *strides, (2 * size + 36) * 2.0**-22,
        **options, BLOCK_M=rows, BLOCK_N=columns, num_warps=8 if rows >= 64 else 4,
        num_stages=3 if halves else 2,
    )  # fmt: skip
    _exact[(triton.cdiv(width, 16), heads)](
        *given, *strides, **options, BLOCK_M=16, BLOCK_N=columns, num_warps=4, num_stages=2
    )
    return chosen


@triton.jit
def _read(x, places, there, stride, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """[*, BLOCK_D] rows of one head, 0 beyond D and where they are not there."""
    column = tl.arange(0, BLOCK_D)
    mask = there[:, None] & (column < D)[None, :]
    return tl.load(x + places[:, None] * stride + column[None, :], mask=mask, other=0.0)


@triton.jit
def _double(rows, HALVES: tl.constexpr):
    if HALVES:
        rows = rows.to(tl.float32)
    return rows.to(tl.float64)


@triton.jit
def _length(rows):
    """Euclidean lengths of float64 rows; 0 where a row has no direction."""
    total = tl.sum(rows * rows, axis=1)
    return tl.where(total < float("inf"), tl.sqrt(total), 0.0)


@triton.jit
def _direction(rows, length):
    """Unit vectors of float64 rows, zero where there is no direction."""
    there = length > 0
    return tl.where(there[:, None], rows / tl.where(there, length, 1.0)[:, None], 0.0)


@triton.jit
def _cosines(
    a, x, places, there, length, stride, D: tl.constexpr, HALVES: tl.constexpr,
    UPCAST: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """[M, N] cosines of a with some rows, in float32; with halves times the length of a."""
    rows = _read(x, places, there, stride, D, BLOCK_D)
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


@triton.jit
def _lengths(
    x, kept, kept_count, lengths, flags, stride_head, stride, others, D: tl.constexpr,
    HALVES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    number = tl.load(kept_count + head).to(tl.int32)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    there = column < number
    if tl.program_id(0) * BLOCK_N < number:
        places = tl.load(kept + head * others + column, mask=there, other=0)
        rows = _read(x + head * stride_head, places, there, stride, D, BLOCK_D)
        rows = _double(rows, HALVES)
        length = _length(rows)
        tl.store(lengths + head * others + column, length, mask=there)
        if HALVES:
            # Of a vector with NaN or infinity float32 knows no cosine; of zero it does.
            zero = tl.sum((rows != 0).to(tl.int32), axis=1) == 0
            tame = ((length >= _LEAST) & (length <= _MOST)) | zero
            if tl.max((there & ~tame).to(tl.int32), axis=0) > 0:
                tl.store(flags + head, 1)


@triton.jit
def _highest(
    x, dropped, dropped_count, kept, kept_count, lengths, flags, chosen, open_rows, near,
    stride_head, stride, width, others, bound, D: tl.constexpr, HALVES: tl.constexpr,
    UPCAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    heads = tl.num_programs(1)
    number = tl.load(dropped_count + head).to(tl.int32)
    among = tl.load(kept_count + head).to(tl.int32)
    first = tl.program_id(0) * BLOCK_M
    if (first >= number) | (among <= 0):
        return
    x += head * stride_head
    row = first + tl.arange(0, BLOCK_M)
    mine = row < number
    places = tl.load(dropped + head * width + row, mask=mine, other=0)
    a = _read(x, places, mine, stride, D, BLOCK_D)
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
    for start in range(0, among, BLOCK_N):
        there = start + lane < among
        at = head * others + start + lane
        length = tl.load(lengths + at, mask=there, other=0.0)
        column = tl.load(kept + at, mask=there, other=0)
        match = _cosines(a, x, column, there, length, stride, D, HALVES, UPCAST, BLOCK_D)
        match = tl.where(there[None, :], match, float("-inf"))
        tile = tl.where(match > best, start, tile)
        second = tl.maximum(second, tl.minimum(best, match))
        best = tl.maximum(best, match)

    highest = tl.max(best, axis=1)
    least = highest - bound * scale
    close = (best >= least[:, None]).to(tl.int32) + (second >= least[:, None]).to(tl.int32)
    place = tl.min(tl.where(best == highest[:, None], tile + lane[None, :], _NOTHING), axis=1)
    # All cosines of a zero vector are equal: the first kept entry.
    directed = mine & (size > 0)
    place = tl.where(directed, place, 0)
    tl.store(chosen + head * width + row, place.to(tl.int64), mask=mine)
    undecided = (directed & ((tl.sum(close, axis=1) > 1) | wild)).to(tl.int32)
    total = tl.sum(undecided, axis=0)
    if total > 0:
        # Integers are added, and each row is decided by itself: no result depends on the order.
        to = tl.atomic_add(flags + heads + head, total) + tl.cumsum(undecided, axis=0) - 1
        tl.store(open_rows + head * width + to, row, mask=undecided > 0)
        least = tl.where(wild, float("-inf"), least)
        tl.store(near + head * width + to, least, mask=undecided > 0)


@triton.jit
def _exact(
    x, dropped, dropped_count, kept, kept_count, lengths, flags, chosen, open_rows, near,
    stride_head, stride, width, others, D: tl.constexpr, HALVES: tl.constexpr,
    UPCAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    number = tl.load(flags + tl.num_programs(1) + head)
    first = tl.program_id(0) * BLOCK_M
    if first >= number:
        return
    among = tl.load(kept_count + head).to(tl.int32)
    x += head * stride_head
    entry = head * width + first + tl.arange(0, BLOCK_M)
    mine = first + tl.arange(0, BLOCK_M) < number
    row = tl.load(open_rows + entry, mask=mine, other=0)
    least = tl.load(near + entry, mask=mine, other=0.0)
    places = tl.load(dropped + head * width + row, mask=mine, other=0)
    a = _read(x, places, mine, stride, D, BLOCK_D)
    own = _double(a, HALVES)
    own = _direction(own, _length(own))
    if HALVES:
        if UPCAST:
            a = a.to(tl.float32)
    else:
        a = own.to(tl.float32)

    lane = tl.arange(0, BLOCK_N)
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    place = tl.zeros([BLOCK_M], tl.int32)
    for start in range(0, among, BLOCK_N):
        ordinal = start + lane
        there = ordinal < among
        length = tl.load(lengths + head * others + ordinal, mask=there, other=0.0)
        column = tl.load(kept + head * others + ordinal, mask=there, other=0)
        match = _cosines(a, x, column, there, length, stride, D, HALVES, UPCAST, BLOCK_D)
        # NaN, of vectors that float32 cannot serve, counts as near.
        left = (mine[:, None] & there[None, :] & ~(match < least[:, None])).to(tl.int32)
        while tl.max(tl.max(left, axis=1), axis=0) > 0:
            nearby = tl.min(tl.where(left > 0, ordinal[None, :], _NOTHING), axis=1)
            some = nearby < _NOTHING
            at = head * others + nearby
            to = tl.load(kept + at, mask=some, other=0)
            other = _double(_read(x, to, some, stride, D, BLOCK_D), HALVES)
            other = _direction(other, tl.load(lengths + at, mask=some, other=0.0))
            cosine = tl.sum(own * other, axis=1).to(tl.float32)
            # Places ascend, so that of equal cosines the first stays.
            better = some & (cosine > best)
            best = tl.where(better, cosine, best)
            place = tl.where(better, nearby, place)
            left = tl.where(ordinal[None, :] == nearby[:, None], 0, left)
    tl.store(chosen + head * width + row, place.to(tl.int64), mask=mine)
