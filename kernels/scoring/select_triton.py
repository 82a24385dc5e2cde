"""Selection by digits: the threshold is found from counts of keys, never by sorting.

A key has four digits of eight bits. Counting the keys by their first digit gives the first digit of
the threshold, the lowest chosen key, and how many keys with that digit are still wanted. Counting
those by their next digits gives the whole threshold, and how many keys equal to it are wanted.
These are taken in order of position, by counts of the equal keys before each place. Only integers
are added, so the order in which programs run changes nothing.

A short row is one program that holds it in registers. A longer one is cut into parts: a launch per
digit adds up the counts of the parts, and one more launch chooses. Every program derives the
earlier digits from counts that fit into a few registers: cheaper than a launch that does it once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from kvpolicy.kernels.launch import tuned
from kvpolicy.kernels.launch.kernel import kernel
from kvpolicy.kernels.scoring.select import ABSENT, check

_DIGITS = tl.constexpr(4)
_BINS = tl.constexpr(256)
# Longest row of one program, 16 keys per thread: twice as many spill. Not measured.
_SHORT = 8192
# Longest row of a program with fewer threads: two kernels serve all short rows.
_FEW = 1024
_PARTS = tl.constexpr(32)  # parts of a row whose counts are added up at a time


def top(
    keys: torch.Tensor,
    number: int | torch.Tensor,
    *,
    block: int | None = None,
    programs: int | None = None,
) -> torch.Tensor:
    """Choose the `number` highest keys of each row; of equal keys the first.

    As `select.top`; the host does not wait for the device.

    Args:
        keys: [R, n] int32; `ABSENT` where no score is present.
        number: int or int64 [R, 1].
        block: keys that a program holds at a time if rows are cut; a power of two. None: as
            measured for the GPU (see `tuned`), else 2048.
        programs: programs that a launch should have if rows are long enough. None: as measured,
            else 528, four for each multiprocessor of an H200.

    Returns:
        [R, n] bool.

    Raises:
        TunedError: as `tuned.load`.
    """
    check(keys, number)
    rows, size = keys.shape
    known = isinstance(number, int)
    if not rows or not size or (known and number <= 0):
        return torch.zeros_like(keys, dtype=torch.bool)
    if known and number >= size:
        return keys > ABSENT
    measured = tuned.choice("top", keys.device, rows, size)
    max_short = min(_SHORT, 4 * (block or 2048))  # in one program, whatever long rows are cut into
    block = block or measured.get("block", 2048)
    programs = programs or measured.get("programs", 528)
    keys = keys.contiguous()
    numbers = number if isinstance(number, int) else number.contiguous()
    chosen = torch.empty(keys.shape, dtype=torch.bool, device=keys.device)
    if size <= max_short:
        short_block = _FEW if size <= _FEW else triton.next_power_of_2(max_short)
        _short[(rows,)](
            keys, numbers, chosen.view(torch.uint8), size, known,
            BLOCK=short_block, num_warps=min(max(short_block // 512, 4), 16),
        )  # fmt: skip
        return chosen
    parts = min(triton.cdiv(size, block), triton.cdiv(programs, rows))
    blocks = triton.cdiv(size, parts * block)
    parts = triton.cdiv(size, blocks * block)
    counts = torch.zeros((rows, 4, 256), dtype=torch.int32, device=keys.device)
    # Counts of the last digit per part: they decide which of the equal keys are chosen.
    last = torch.empty((rows, parts, 256), dtype=torch.int32, device=keys.device)
    for digit in range(4):
        _count[(rows, parts)](
            keys, numbers, counts, last, size, blocks, known,
            DIGIT=digit, BLOCK=block, num_warps=8,
        )  # fmt: skip
    _choose[(rows, parts)](
        keys, numbers, counts, last, chosen.view(torch.uint8), size, blocks, known,
        BLOCK=block, num_warps=8,
    )  # fmt: skip
    return chosen


@triton.jit
def _wanted(number, row, size, KNOWN: tl.constexpr):
    """Number of keys to choose from a row, in 0 .. n."""
    if KNOWN:
        return number
    else:
        return tl.minimum(tl.maximum(tl.load(number + row), 0), size).to(tl.int32)


@triton.jit
def _digit(counts, wanted):
    """The digit of the lowest wanted key, and how many keys with that digit are wanted.

    counts: [256], number of keys with each digit. Both results are 0 if none is wanted.
    """
    bins = tl.arange(0, _BINS)
    above = tl.sum(counts) - tl.cumsum(counts)
    is_digit = (above < wanted) & (wanted <= above + counts)
    digit = tl.sum(tl.where(is_digit, bins, 0))
    return digit, wanted - tl.sum(tl.where(is_digit, above, 0))


@triton.jit
def _ordered(key):
    """int32 keys as uint32 in the same order."""
    return (key ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def _by_digit(key, inside, found, DIGIT: tl.constexpr):
    """Count the keys inside that begin with the digits `found` by their next digit: [256]."""
    if DIGIT > 0:
        inside = inside & ((key >> (32 - 8 * DIGIT)) == found)
    digit = (key >> (24 - 8 * DIGIT)) & 255
    return tl.histogram(digit.to(tl.int32), _BINS, mask=inside)


@kernel()
def _short(keys, number, chosen, size, KNOWN: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    position = tl.arange(0, BLOCK)
    inside = position < size
    key = _ordered(tl.load(keys + row * size + position, mask=inside, other=0))
    number = _wanted(number, row, size, KNOWN)
    wanted = number
    threshold = tl.full((), 0, tl.uint32)
    for digit in tl.static_range(_DIGITS):
        next_digit, wanted = _digit(_by_digit(key, inside, threshold, digit), wanted)
        threshold = (threshold << 8) | next_digit.to(tl.uint32)
    equal = inside & (key == threshold)
    selected = (key > threshold) | (equal & (tl.cumsum(equal.to(tl.int32)) <= wanted))
    selected = selected & (key > 0) & (number > 0)
    tl.store(chosen + row * size + position, selected.to(tl.uint8), mask=inside)


@triton.jit
def _found(counts, row, wanted, DIGITS: tl.constexpr):
    """The first DIGITS digits of the lowest wanted key, and how many keys with them are wanted."""
    bins = tl.arange(0, _BINS)
    prefix = tl.full((), 0, tl.uint32)
    for digit in tl.static_range(DIGITS):
        digit_counts = tl.load(counts + (row * _DIGITS + digit) * _BINS + bins)
        next_digit, wanted = _digit(digit_counts, wanted)
        prefix = (prefix << 8) | next_digit.to(tl.uint32)
    return prefix, wanted


@kernel()
def _count(
    keys, number, counts, last, size, blocks,
    KNOWN: tl.constexpr, DIGIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Count a part's keys by digit DIGIT, and add the counts to those of its row."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    prefix, _ = _found(counts, row, _wanted(number, row, size, KNOWN), DIGIT)
    bins = tl.arange(0, _BINS)
    part_counts = tl.zeros((_BINS,), tl.int32)
    for block in range(blocks):
        position = (part * blocks + block) * BLOCK + tl.arange(0, BLOCK)
        inside = position < size
        key = _ordered(tl.load(keys + row * size + position, mask=inside, other=0))
        part_counts += _by_digit(key, inside, prefix, DIGIT)
    tl.atomic_add(
        counts + (row * _DIGITS + DIGIT) * _BINS + bins,
        part_counts,
        mask=part_counts > 0,
        sem="relaxed",
    )
    if DIGIT == 3:
        tl.store(last + (row * tl.num_programs(1) + part) * _BINS + bins, part_counts)


@kernel()
def _choose(
    keys, number, counts, last, chosen, size, blocks,
    KNOWN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Choose from a part of a row."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    number = _wanted(number, row, size, KNOWN)
    threshold, wanted = _found(counts, row, number, _DIGITS)
    column = last + row * tl.num_programs(1) * _BINS + (threshold & 255).to(tl.int32)
    equal_count = tl.full((), 0, tl.int32)
    for start in range(0, part, _PARTS):
        part_ids = start + tl.arange(0, _PARTS)
        equal_count += tl.sum(tl.load(column + part_ids * _BINS, mask=part_ids < part, other=0))
    for block in range(blocks):
        position = (part * blocks + block) * BLOCK + tl.arange(0, BLOCK)
        inside = position < size
        key = _ordered(tl.load(keys + row * size + position, mask=inside, other=0))
        equal = (inside & (key == threshold)).to(tl.int32)
        selected = (key > threshold) | ((equal > 0) & (equal_count + tl.cumsum(equal) <= wanted))
        selected = selected & (key > 0) & (number > 0)
        tl.store(chosen + row * size + position, selected.to(tl.uint8), mask=inside)
        equal_count += tl.sum(equal)
