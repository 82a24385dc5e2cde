"""Computed numbers of entries, as whole numbers: one launch where torch needs a dozen."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from kvpolicy.kernels.launch.kernel import kernel
from kvpolicy.kernels.scoring.whole import MOST, SNAP, check

_MOST, _SNAP = tl.constexpr(float(MOST)), tl.constexpr(SNAP)
# Added to a float64 and subtracted again, it leaves the nearest whole number, halves to even.
_ROUNDS = tl.constexpr(1.5 * 2.0**52)
_BLOCK = 256


def whole(x: torch.Tensor) -> torch.Tensor:
    """Floor numbers of entries and clamp them to 0 .. 2**31. As `whole.whole`."""
    check(x)
    result = torch.empty(x.shape, dtype=torch.int64, device=x.device)
    if result.numel():
        grid = (triton.cdiv(result.numel(), _BLOCK),)
        _whole[grid](x.contiguous(), result, result.numel(), BLOCK=_BLOCK, num_warps=4)
    return result


@triton.jit
def counted(x):
    """Round float64 x to whole numbers as `whole.whole` does, still in float64."""
    x = tl.where(x == x, x, 0.0)
    x = tl.minimum(tl.maximum(x, 0.0), _MOST)
    nearest = ((x * 2 + _ROUNDS) - _ROUNDS) / 2
    is_near = tl.abs(x - nearest) <= tl.maximum(x, 1.0) * _SNAP
    return tl.floor(tl.where(is_near, nearest, x))


@kernel()
def _whole(x, made, number, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < number
    value = counted(tl.load(x + index, mask=inside, other=0.0))
    tl.store(made + index, value.to(tl.int64), mask=inside)
