"""What stays of each list, in one launch: a program finds its list's threshold by digits.

As `select_triton`, of which it takes the counting of keys; a list is one program that reads it once
per digit, since lists are many: layers times heads times requests. Scores become keys on the way.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from kvpolicy.kernels.launch.kernel import kernel
from kvpolicy.kernels.scoring.best import check
from kvpolicy.kernels.scoring.select_triton import _by_digit, _digit, _ordered


def best(
    score: torch.Tensor | None,
    present: torch.Tensor | None,
    there: torch.Tensor,
    numbers: torch.Tensor,
    *,
    block: int = 1024,
) -> torch.Tensor:
    """The first and last entries of R lists and of the others the highest scores.

    As `best.best`, without reading a number of the device.

    Args:
        block: entries that a program looks at at a time, a power of two.

    Returns:
        bool [R, M].

    Raises:
        ValueError: names the argument, what was expected and what was given.
    """
    check(score, present, there, numbers)
    kept = torch.empty(there.shape, dtype=torch.bool, device=there.device)
    if there.numel():
        _best[(len(there),)](
            None if score is None else score.contiguous(),
            None if present is None else present.contiguous().view(torch.uint8),
            there.contiguous().view(torch.uint8), numbers.contiguous(), kept.view(torch.uint8),
            there.shape[1], len(there) // len(numbers), BLOCK=block, num_warps=8,
        )  # fmt: skip
    return kept


@triton.jit
def _keys(score, present, at, free):
    """uint32 keys in the order of scores, 0 where none competes."""
    x = tl.load(score + at, mask=free, other=0.0).to(tl.float32)
    x = tl.where(x == 0.0, 0.0, x)  # -0 is 0
    key = x.to(tl.int32, bitcast=True)
    key = key ^ ((key >> 31) & 0x7FFFFFFF)
    if present is not None:
        free = free & (tl.load(present + at, mask=free, other=0) != 0)
    return tl.where(free, _ordered(key), 0)


@triton.jit
def _block(there, base, first, width, seen, number, ends_first, ends_last, BLOCK: tl.constexpr):
    """Of a block: where its numbers stand, what is an end of the list, what competes."""
    column = first + tl.arange(0, BLOCK)
    held = tl.load(there + base + column, mask=column < width, other=0).to(tl.int32)
    place = seen + tl.cumsum(held) - held
    end = (held > 0) & ((place < ends_first) | (place >= number - ends_last))
    return column, held, end, (held > 0) & ~end


@kernel()
def _best(score, present, there, numbers, kept, width, share, BLOCK: tl.constexpr):
    """One list."""
    this = tl.program_id(0)
    base = this.to(tl.int64) * width
    own = numbers + (this // share).to(tl.int64) * 3
    number = 0
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        held = tl.load(there + base + column, mask=column < width, other=0).to(tl.int32)
        number += tl.sum(held)
    ends_first = tl.minimum(tl.load(own), number).to(tl.int32)
    ends_last = tl.minimum(tl.load(own + 1), number).to(tl.int32)
    ends = tl.minimum(ends_first + ends_last, number)
    missing = tl.minimum(tl.maximum(tl.load(own + 2) - ends, 0), number).to(tl.int32)
    everything = (score is not None) & (number - ends <= missing)
    found, wanted = tl.full((), 0, tl.uint32), missing
    if score is not None:
        for digit in tl.static_range(4):
            counts, seen = tl.zeros((256,), tl.int32), 0
            for first in range(0, width, BLOCK):
                column, held, end, free = _block(
                    there, base, first, width, seen, number, ends_first, ends_last, BLOCK
                )
                key = _keys(score, present, base + column, free)
                counts += _by_digit(key, key > 0, found, digit)
                seen += tl.sum(held)
            next_digit, wanted = _digit(counts, wanted)
            found = (found << 8) | next_digit.to(tl.uint32)
    seen, before = 0, 0
    for first in range(0, width, BLOCK):
        column, held, end, free = _block(
            there, base, first, width, seen, number, ends_first, ends_last, BLOCK
        )
        stays = end | (everything & (held > 0))
        if score is not None:
            key = _keys(score, present, base + column, free)
            equal = ((key == found) & (key > 0)).to(tl.int32)
            chosen = (key > found) | ((equal > 0) & (before + tl.cumsum(equal) <= wanted))
            stays = stays | (chosen & (missing > 0))
            before += tl.sum(equal)
        tl.store(kept + base + column, stays.to(tl.uint8), mask=column < width)
        seen += tl.sum(held)
