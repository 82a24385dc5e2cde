"""Entries of each list that stay, in one launch: a program finds its list's threshold by digits.

Keys are counted as in `select_triton`. A list is one program, which reads it once per digit; lists
are many: layers times heads times requests. Scores become keys when they are read. The entries that
stay whatever their score are the ends of a list (`best`) or those taken before (`then`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from kvpolicy.kernels.launch.kernel import kernel
from kvpolicy.kernels.scoring.best import check
from kvpolicy.kernels.scoring.select_triton import _by_digit, _digit, _ordered
from kvpolicy.kernels.scoring.whole_triton import counted


def best(
    score: torch.Tensor | None,
    present: torch.Tensor | None,
    holds: torch.Tensor,
    limits: torch.Tensor,
    *,
    block: int = 1024,
) -> torch.Tensor:
    """Keep the first and last entries of R lists, and of the others those with the highest scores.

    As `best.best`; the host does not wait for the device.

    Args:
        block: entries that a program reads at a time, a power of two.

    Returns:
        bool [R, M].
    """
    check(score, present, holds, limits)
    return chosen(None, score, present, holds, limits, in_all=True, block=block)


def chosen(
    taken: torch.Tensor | None,
    score: torch.Tensor | None,
    present: torch.Tensor | None,
    holds: torch.Tensor,
    limits: torch.Tensor,
    *,
    in_all: bool,
    block: int,
) -> torch.Tensor:
    """The result of `best`, or with `taken` of `then`, whose `number` is then `limits`."""
    kept = torch.empty(holds.shape, dtype=torch.bool, device=holds.device)
    if holds.numel():
        _best[(len(holds),)](
            *(None if x is None else x.contiguous().view(torch.uint8) for x in (taken, present)),
            None if score is None else score.contiguous(),
            holds.contiguous().view(torch.uint8), limits.contiguous(), kept.view(torch.uint8),
            holds.shape[1], len(holds) // len(limits), IN_ALL=in_all, BLOCK=block, num_warps=8,
        )  # fmt: skip
    return kept


@triton.jit
def _keys(score, present, at, free):
    """uint32 keys in the order of the scores; 0 where no entry competes."""
    x = tl.load(score + at, mask=free, other=0.0).to(tl.float32)
    x = tl.where(x == 0.0, 0.0, x)  # -0 is 0
    key = x.to(tl.int32, bitcast=True)
    key = key ^ ((key >> 31) & 0x7FFFFFFF)
    if present is not None:
        free = free & (tl.load(present + at, mask=free, other=0) != 0)
    return tl.where(free, _ordered(key), 0)


@triton.jit
def _block(
    taken, holds, base, first, width, seen, number, ends_first, ends_last, BLOCK: tl.constexpr
):
    """Columns of a block, which hold an entry (0 or 1), which stay in any case, which compete.

    seen, number: entries of the list before the block, and in all.
    """
    column = first + tl.arange(0, BLOCK)
    held = tl.load(holds + base + column, mask=column < width, other=0).to(tl.int32)
    if taken is not None:
        stays = tl.load(taken + base + column, mask=held > 0, other=0) != 0
    else:
        place = seen + tl.cumsum(held) - held
        stays = (place < ends_first) | (place >= number - ends_last)
    return column, held, (held > 0) & stays, (held > 0) & ~stays


@kernel()
def _best(
    taken, present, score, holds, limits, kept, width, share,
    IN_ALL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Choose the entries of one list."""
    list_ = tl.program_id(0)
    base = list_.to(tl.int64) * width
    number, stays_count = 0, 0
    for first in range(0, width, BLOCK):
        column, held, stays, free = _block(taken, holds, base, first, width, 0, 0, 0, 0, BLOCK)
        number += tl.sum(held)
        stays_count += tl.sum(stays.to(tl.int32))
    ends_first, ends_last = 0, 0
    if taken is not None:
        limit = tl.load(limits + list_ // share)
        if IN_ALL:
            limit = tl.maximum(limit - stays_count, 0.0)
        everything = IN_ALL & (number - stays_count <= limit)
        missing = tl.minimum(counted(limit), tl.cast(number, tl.float64)).to(tl.int32)
    else:
        ends = limits + (list_ // share).to(tl.int64) * 3
        ends_first = tl.minimum(tl.load(ends), number).to(tl.int32)
        ends_last = tl.minimum(tl.load(ends + 1), number).to(tl.int32)
        stays_count = tl.minimum(ends_first + ends_last, number)
        missing = tl.minimum(tl.maximum(tl.load(ends + 2) - stays_count, 0), number).to(tl.int32)
        everything = (score is not None) & (number - stays_count <= missing)
    threshold, wanted = tl.full((), 0, tl.uint32), missing
    if score is not None:
        for digit in tl.static_range(4):
            counts, seen = tl.zeros((256,), tl.int32), 0
            for first in range(0, width, BLOCK):
                column, held, stays, free = _block(
                    taken, holds, base, first, width, seen, number, ends_first, ends_last, BLOCK
                )
                key = _keys(score, present, base + column, free)
                counts += _by_digit(key, key > 0, threshold, digit)
                seen += tl.sum(held)
            next_digit, wanted = _digit(counts, wanted)
            threshold = (threshold << 8) | next_digit.to(tl.uint32)
    seen, equal_count = 0, 0
    for first in range(0, width, BLOCK):
        column, held, stays, free = _block(
            taken, holds, base, first, width, seen, number, ends_first, ends_last, BLOCK
        )
        stays = stays | (everything & (held > 0))
        if score is not None:
            key = _keys(score, present, base + column, free)
            equal = ((key == threshold) & (key > 0)).to(tl.int32)
            highest = (key > threshold) | ((equal > 0) & (equal_count + tl.cumsum(equal) <= wanted))
            stays = stays | (highest & (missing > 0))
            equal_count += tl.sum(equal)
        tl.store(kept + base + column, stays.to(tl.uint8), mask=column < width)
        seen += tl.sum(held)
