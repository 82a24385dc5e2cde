"""Rounding to a storage dtype once; 8-bit floats (`--kv-cache-dtype fp8_e4m3`, `fp8_e5m2`)."""

from __future__ import annotations

import torch

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_MOST = torch.finfo(torch.float8_e4m3fn).max
_NARROW = (torch.float16, torch.bfloat16, *FLOAT8)


def largest(dtype: torch.dtype) -> float:
    """The largest number of a dtype, beyond which rounding to it may give infinity.

    That of float64 for float8_e4m3fn, which has no infinity.
    """
    bounded = dtype != torch.float8_e4m3fn
    return torch.finfo(dtype if bounded else torch.float64).max


def movable(x: torch.Tensor) -> torch.Tensor:
    """View 8-bit floats as bytes, since torch cannot write rows of them; else `x` itself."""
    return x.view(torch.uint8) if x.dtype in FLOAT8 else x


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x` in another float dtype, rounded once, to nearest, ties to even.

    From float64 to a narrower one than float32 `Tensor.to` rounds twice, to float32 first, and then
    1 + 2**-8 + 2**-40 becomes 1 in bfloat16 instead of 1 + 2**-7. Numbers too large for
    float8_e4m3fn, which has no infinity, become its largest, 448, with their sign.

    Args:
        x: any float dtype.
        dtype: float64, float32, float16, bfloat16, float8_e4m3fn or float8_e5m2.
    """
    if x.dtype == torch.float64 and dtype in _NARROW:
        x = _to_odd(x)
    if dtype == torch.float8_e4m3fn:  # torch 2.11 makes NaN of larger numbers
        x = x.float().clamp(-_MOST, _MOST)
    return x.to(dtype)


def _to_odd(x: torch.Tensor) -> torch.Tensor:
    """Round float64 to float32 to odd."""
    nearest = x.to(torch.float32)
    nearest64 = nearest.double()
    # Towards zero, with the last bit set if something was cut off: the second rounding then cannot
    # take the number for a tie. float32 has the two spare bits that this needs.
    bits = nearest.view(torch.int32)
    bits = torch.where(nearest64.abs() > x.abs(), bits - 1, bits)
    bits = torch.where(nearest64 == x, bits, bits | 1)
    return bits.view(torch.float32)
