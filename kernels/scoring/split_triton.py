"""Exact division of a total among the layers without asking the host: `split[layer]`, `cascade`.

A weight is a float32: 24 bits between 2**-149 and 2**128. So all weights are whole multiples of
2**-149, and `k` is at most the share `total * weight / sum` exactly if `total * weight - k * sum`
is not negative. This difference is computed in digits of 24 bits, for a `k` that float64 gives to
within 1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from kvpolicy.kernels.launch.kernel import kernel
from kvpolicy.kernels.scoring import split as reference
from kvpolicy.kernels.scoring.split import MOST, check

LARGEST = 2**28 - 1  # total for which no digit leaves int64
LAYERS = 256  # most that one program divides among
_DIGITS = tl.constexpr(13)  # of 24 bits, for numbers below 2**(277 + 24)
_MOST = tl.constexpr(MOST)


def split(
    total: int, weights: torch.Tensor, maxima: torch.Tensor | int | None, *, cascade: bool = False
) -> torch.Tensor:
    """Divide a total into whole numbers for L layers, in proportion to the weights.

    As `split.split`; the host does not wait for the device, unless the total is above LARGEST or
    there are more than LAYERS layers: then the reference divides.

    Returns:
        [L] float64.
    """
    check(total, weights, maxima)
    layers = weights.shape[0]
    if total > LARGEST or layers > LAYERS:
        return reference.split(total, weights, maxima, cascade=cascade)
    if not isinstance(maxima, torch.Tensor):
        limit = MOST if maxima is None else maxima
        maxima = torch.full((layers,), limit, dtype=torch.int64, device=weights.device)
    stages = layers if cascade else 1
    parts = torch.empty((stages, layers), dtype=torch.int64, device=weights.device)
    if layers:
        _split[(stages,)](
            weights.contiguous(), maxima.contiguous(), parts, total, layers,
            CASCADE=cascade, BLOCK=triton.next_power_of_2(layers), num_warps=1,
        )  # fmt: skip
    return parts.amin(dim=0).double() if layers else weights.new_empty(0)


@kernel()
def _split(
    weights, maxima, parts, total, layers, CASCADE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Divide among the first layers: all, or in stage i of a cascade the first i + 1."""
    stage = tl.program_id(0)
    end = stage + 1 if CASCADE else layers
    layer = tl.arange(0, BLOCK)
    among = layer < end
    most = tl.load(maxima + layer, mask=among, other=0)
    weight = tl.load(weights + layer, mask=among, other=0.0)
    total_int64 = tl.full((), 0, tl.int64) + total
    placed = tl.where(among, _floors(total_int64, _usable(weight, among)), 0)
    going = tl.max(among.to(tl.int32), axis=0)
    while going > 0:
        excess = tl.sum(tl.maximum(placed - most, 0), axis=0)
        placed = _poured(tl.minimum(placed, most), most, among, excess)
        missing = total_int64 - tl.sum(placed, axis=0)
        room = tl.sum((among & (placed < most)).to(tl.int32), axis=0)
        poured = tl.where((missing > 0) & (room > 0), 1, 0)
        placed = _poured(placed, most, among, missing)
        new_room = tl.sum((among & (placed < most)).to(tl.int32), axis=0)
        going = tl.where((new_room > 0) & ((poured > 0) | (excess > 0)), 1, 0)
    # If all layers are full, the excess has nowhere to go.
    placed = tl.where(among, tl.minimum(placed, most), _MOST)
    tl.store(parts + stage * layers + layer, placed, mask=layer < layers)


@triton.jit
def _usable(weight, among):
    """Weights that count: float32, not negative, only infinite ones if any, all equal if all 0."""
    weight = weight.to(tl.float32).to(tl.float64)
    weight = tl.where(weight > 0, weight, 0.0)
    infinite = weight == float("inf")
    any_infinite = tl.max(infinite.to(tl.int32), axis=0)
    weight = tl.where(any_infinite > 0, infinite.to(tl.float64), weight)
    any_weight = tl.max((weight > 0).to(tl.int32), axis=0)
    return tl.where(any_weight > 0, weight, among.to(tl.float64))


@triton.jit
def _floors(total, weight):
    """floor(total * weight / sum of weights), exactly."""
    # The share in float64 misses the exact one by less than 2**-14: its floor is k or k - 1.
    estimate = total.to(tl.float64) * (weight / tl.sum(weight, axis=0))
    k = tl.maximum(tl.floor(estimate - 0.0009765625), 0.0).to(tl.int64) + 1
    bits = weight.to(tl.int64, bitcast=True)
    exponent = bits >> 52
    # 24 bits; the 29 below them are 0, since the weight was a float32.
    mantissa = ((bits & 0xFFFFFFFFFFFFF) | 0x10000000000000) >> 29
    mantissa = tl.where(weight > 0, mantissa, 0)
    shift = tl.maximum(exponent - 874, 0)  # 2**-149 is 2**(874 - 1023) in float64
    first_digit = shift // 24
    shifted = mantissa << (shift - first_digit * 24)
    carry = tl.zeros_like(k)
    for digit in range(_DIGITS):
        digit_value = tl.where(first_digit == digit, shifted & 0xFFFFFF, 0)
        digit_value = tl.where(first_digit == digit - 1, shifted >> 24, digit_value)
        carry = (total * digit_value - k * tl.sum(digit_value, axis=0) + carry) >> 24
    # The digits below the last carry are not negative: the carry has the sign of the difference.
    return tl.where(carry < 0, k - 1, k)


@triton.jit
def _poured(placed, most, among, amount):
    """Add an amount in equal parts to the layers below their maxima, odd entries to the first."""
    room = (among & (placed < most)).to(tl.int64)
    number = tl.maximum(tl.sum(room, axis=0), 1)
    amount = tl.maximum(amount, 0)
    part = amount // number
    place = tl.cumsum(room, axis=0) - 1
    return placed + room * (part + (place < amount - part * number).to(tl.int64))
