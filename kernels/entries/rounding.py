"""Rounding to a storage dtype once."""

from __future__ import annotations

import torch


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x` in another float dtype, rounded once, to nearest, ties to even.

    From float64 to a half precision `Tensor.to` rounds twice, to float32 first, and then
    1 + 2**-8 + 2**-40 becomes 1 in bfloat16 instead of 1 + 2**-7.

    Args:
        x: any float dtype.
        dtype: float64, float32, float16 or bfloat16.
    """
    if x.dtype != torch.float64 or dtype not in (torch.float16, torch.bfloat16):
        return x.to(dtype)
    nearest = x.to(torch.float32)
    back = nearest.double()
    # Rounding to odd keeps in the last bit that something was cut off, so the second rounding
    # cannot take the number for a tie; float32 has more than two bits to spare for it.
    bits = nearest.view(torch.int32)
    bits = torch.where(back.abs() > x.abs(), bits - 1, bits)
    bits = torch.where(back == x, bits, bits | 1)
    return bits.view(torch.float32).to(dtype)
