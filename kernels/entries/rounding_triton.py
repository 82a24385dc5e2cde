"""Rounding to a storage dtype once, for use inside kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """A block in another float dtype, as `rounding.rounded`: once, to nearest, ties to even.

    Triton's own conversion of float64 to a half precision goes through float32, and in its
    interpreter those of bfloat16 cut bits off and lose subnormals; here it and a GPU do the same.

    x: any float dtype.
    dtype: tl.float64, tl.float32, tl.float16 or tl.bfloat16.
    """
    if x.dtype == dtype:
        return x
    elif x.dtype == tl.float64 and dtype.primitive_bitwidth == 16:
        return _from_float32(_to_odd(x), dtype)
    elif x.dtype == tl.float64:
        return x.to(dtype)
    else:
        return _from_float32(widened(x), dtype)


@triton.jit
def widened(x):
    """A block of float32, float16 or bfloat16 as float32, exactly."""
    if x.dtype == tl.bfloat16:
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        return bits.to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def _to_odd(x):
    """float64 as float32 whose last bit keeps that something was cut off."""
    nearest = x.to(tl.float32)
    back = nearest.to(tl.float64)
    bits = nearest.to(tl.int32, bitcast=True)
    bits = tl.where(tl.abs(back) > tl.abs(x), bits - 1, bits)
    bits = tl.where(back == x, bits, bits | 1)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _from_float32(x, dtype: tl.constexpr):
    if dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        # Half of the last kept bit, less one where that is even: a tie goes to the even one.
        near = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        near = tl.where(x == x, near, 0x7FC0)
        return near.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)
