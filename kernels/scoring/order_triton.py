"""Sort keys of scores, and ranks: one launch each, beside torch's sort."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from kvpolicy.kernels.launch.kernel import kernel
from kvpolicy.kernels.scoring.order import check_rank
from kvpolicy.kernels.scoring.strided import check, laid_out
from kvpolicy.kernels.scoring.strided_triton import at as place

_BLOCK = 1024  # not measured


def keys(x: torch.Tensor, present: torch.Tensor | None) -> torch.Tensor:
    """Turn scores into int32 keys in the order of float32. As `order.keys`, in one launch."""
    check(x, present)
    result = torch.empty(x.shape, dtype=torch.int32, device=x.device)
    if not result.numel():
        return result
    x, present, layout = laid_out(x, present, range(x.dim()))
    _keys[(triton.cdiv(result.numel(), _BLOCK),)](
        x, x if present is None else present, result, result.numel(), *layout,
        MASKED=present is not None, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return result


def rank(keys: torch.Tensor) -> torch.Tensor:
    """Rank the keys of each row: 1 is the highest. As `order.rank`."""
    check_rank(keys)
    result = torch.empty(keys.shape, dtype=torch.float64, device=keys.device)
    if result.numel():
        first = keys.sort(dim=-1, descending=True, stable=True).indices
        # Only the first axis of the grid is long enough for the blocks of a row of all layers.
        parts = triton.cdiv(keys.shape[1], _BLOCK)
        _rank[(keys.shape[0] * parts,)](
            first, result, keys.shape[1], parts, BLOCK=_BLOCK, num_warps=4
        )
    return result


@kernel()
def _keys(
    x, present, out, number, s1, s2, x0, x1, x2, m0, m1, m2,
    MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < number
    score = tl.load(x + place(i, s1, s2, x0, x1, x2), mask=inside, other=0.0)
    bits = (score.to(tl.float32) + 0.0).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    if MASKED:
        score_present = tl.load(present + place(i, s1, s2, m0, m1, m2), mask=inside, other=0)
        key = tl.where(score_present != 0, key, -2147483648)
    tl.store(out + i, key, mask=inside)


@kernel()
def _rank(first, out, size, parts, BLOCK: tl.constexpr):
    """Write rank i + 1 for the key that is i-th in its row's order, `first`."""
    row = (tl.program_id(0) // parts).to(tl.int64) * size
    i = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    column = tl.load(first + row + i, mask=inside, other=0)
    tl.store(out + row + column, (i + 1).to(tl.float64), mask=inside)
