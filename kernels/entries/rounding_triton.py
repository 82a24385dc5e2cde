"""Rounding to a storage dtype once, for use inside kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """A block in another float dtype, as `rounding.rounded`: once, to nearest, ties to even.

    Triton's own conversions differ: from float64 to a narrow type they go through float32; in its
    interpreter those to bfloat16 and 8-bit floats cut bits off and lose subnormals; below sm_89
    there are none to 8-bit floats.

    x: any float dtype.
    dtype: tl.float64, tl.float32, tl.float16, tl.bfloat16, tl.float8e4nv or tl.float8e5.
    """
    if x.dtype == dtype:
        return x
    elif x.dtype == tl.float64 and dtype.primitive_bitwidth <= 16:
        return _from_float32(_to_odd(x), dtype)
    elif x.dtype == tl.float64:
        return x.to(dtype)
    else:
        return _from_float32(widened(x), dtype)


@triton.jit
def widened(x):
    """A block of float32 or of a narrower type as float32, exactly."""
    if x.dtype == tl.bfloat16:
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        return bits.to(tl.float32, bitcast=True)
    elif x.dtype == tl.float8e5:
        bits = x.to(tl.uint8, bitcast=True).to(tl.uint16) << 8
        return bits.to(tl.float16, bitcast=True).to(tl.float32)
    elif x.dtype == tl.float8e4nv:
        bits = x.to(tl.uint8, bitcast=True).to(tl.uint16)
        # As float16, whose exponent bias is 8 higher; the highest exponent holds numbers too.
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), value)
    else:
        return x.to(tl.float32)


@triton.jit
def doubled(x):
    """A block of any float dtype as float64, exactly."""
    if x.dtype != tl.float64:
        x = widened(x)
    return x.to(tl.float64)


@triton.jit
def _to_odd(x):
    """Round float64 to float32 to odd, as `rounding._to_odd`."""
    nearest = x.to(tl.float32)
    nearest64 = nearest.to(tl.float64)
    bits = nearest.to(tl.int32, bitcast=True)
    bits = tl.where(tl.abs(nearest64) > tl.abs(x), bits - 1, bits)
    bits = tl.where(nearest64 == x, bits, bits | 1)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _from_float32(x, dtype: tl.constexpr):
    if dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        # Add half of the last kept bit, less one if that is even: ties go to even.
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        nearest = tl.where(x == x, nearest, 0x7FC0)
        return nearest.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    elif dtype == tl.float8e4nv:
        return _eight_bits(x, 3, 7, 0x7E).to(tl.float8e4nv, bitcast=True)
    elif dtype == tl.float8e5:
        return _eight_bits(x, 2, 15, 0x7C).to(tl.float8e5, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def _eight_bits(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MOST: tl.constexpr):
    """uint8 codes of float32 as 8-bit floats; BIAS: of exponents.

    MOST, the highest code, is the largest number of float8_e4m3fn and infinity of float8_e5m2.
    """
    cut: tl.constexpr = 23 - MANTISSA
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    nearest = (magnitude + ((1 << (cut - 1)) - 1) + ((magnitude >> cut) & 1)) >> cut
    code = nearest.to(tl.int32) - ((127 - BIAS) << MANTISSA)
    # Below the smallest normal number a code counts smallest subnormals; adding 2^23 rounds to
    # whole ones, since float32 has no bits for parts of them there.
    units = magnitude.to(tl.float32, bitcast=True) * (2.0 ** (BIAS - 1 + MANTISSA)) + 8388608.0
    units = units.to(tl.int32, bitcast=True) - 0x4B000000
    code = tl.where(code < (1 << MANTISSA), units, code)
    code = tl.where(magnitude > 0x7F800000, 0x7F, tl.minimum(code, MOST))
    return (code | ((bits >> 24) & 0x80).to(tl.int32)).to(tl.uint8)
