"""Moving rotary-embedded keys to later positions: one kernel, angles reduced in float64.

A float32 product of a shift of 100,000 and a frequency is off by up to 0.004 radians, which shows
in bfloat16, so the angle is float64; reduced to -pi .. pi it fits float32. With u = 2**-24 a key in
float32, float16 or bfloat16 then differs from the exact one by at most

    (8 u + |angle| 2**-52) (|a| + |b|) + half a unit in the last place of the key's dtype:

pi u from the angle in float32, 2 u from the cosine or sine (CUDA's are within 2 units), u from each
product and u from the sum. Keys in float64 are computed in float64 throughout.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from kvpolicy.kernels.entries.rotate import check
from kvpolicy.kernels.entries.rounding_triton import rounded, widened
from kvpolicy.kernels.launch.kernel import kernel

_TURN = tl.constexpr(6.283185307179586)
_PER_TURN = tl.constexpr(0.15915494309189535)


def rotate(
    k: torch.Tensor,
    shift: torch.Tensor,
    inv_freq: torch.Tensor,
    *,
    interleaved: bool = False,
    tile: int | None = None,
) -> torch.Tensor:
    """Keys as if they stood `shift` positions later.

    As `rotate.rotate`, within the bound above.

    Args:
        k: [..., M, D] any float dtype, after RoPE.
        shift: [..., M] int64 positions; negative moves back.
        inv_freq: [R / 2] radians per position of each pair; R is at most D and the dimensions from
            R on do not turn.
        interleaved: pairs are (2i, 2i + 1); otherwise (i, i + R / 2).
        tile: rows that a program turns; a power of two. None: 2,048 numbers in all, or 512 in
            float64, which takes more registers. Not measured.

    Returns:
        [..., M, D], contiguous, dtype of k; a row of shift 0 is unchanged.
    """
    pairs = check(k, shift, inv_freq)
    rows, size = k.shape[-2:]
    out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    if not out.numel():
        return out
    # [heads, M, D], a copy only if the strides require one.
    keys = k.reshape(-1, rows, size)
    keys = keys if keys.stride(2) == 1 else keys.contiguous()
    rest, padded = size - 2 * pairs, triton.next_power_of_2(max(pairs, 1))
    tile_numbers = 512 if k.dtype == torch.float64 else 2048
    tile = tile or max(tile_numbers // triton.next_power_of_2(size), 1)
    _rotate[(triton.cdiv(rows, tile), keys.shape[0])](
        keys, shift.contiguous(), inv_freq.double().contiguous(), out, rows, *keys.stride()[:2],
        PAIRS=pairs, PADDED_PAIRS=padded,
        REST=rest, PADDED_REST=triton.next_power_of_2(max(rest, 1)),
        INTERLEAVED=interleaved, TILE=tile,
    )  # fmt: skip
    return out


@kernel(aligned=["k", "out", "head_stride", "row_stride"])
def _rotate(
    k, shift, inv_freq, out, rows, head_stride, row_stride,
    PAIRS: tl.constexpr, PADDED_PAIRS: tl.constexpr, REST: tl.constexpr, PADDED_REST: tl.constexpr,
    INTERLEAVED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Turn a tile of one head's rows."""
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = row < rows
    size: tl.constexpr = 2 * PAIRS + REST
    source = (k + head * head_stride + row * row_stride)[:, None]
    target = (out + (head * rows + row) * size)[:, None]
    if PAIRS > 0:
        pair = tl.arange(0, PADDED_PAIRS)
        first = (2 * pair if INTERLEAVED else pair)[None, :]
        second = first + (1 if INTERLEAVED else PAIRS)
        mask = inside[:, None] & (pair < PAIRS)[None, :]
        a, b = (
            tl.load(source + first, mask=mask, other=0.0),
            tl.load(source + second, mask=mask, other=0.0),
        )
        row_shift = tl.load(shift + head * rows + row, mask=inside, other=0)[:, None]
        angle = (
            row_shift.to(tl.float64) * tl.load(inv_freq + pair, mask=pair < PAIRS, other=0)[None, :]
        )
        new_a, new_b = _turned(a, b, angle, a.dtype)
        unshifted = row_shift == 0
        tl.store(target + first, tl.where(unshifted, a, new_a), mask=mask)
        tl.store(target + second, tl.where(unshifted, b, new_b), mask=mask)
    if REST > 0:
        dims = tl.arange(0, PADDED_REST)
        mask = inside[:, None] & (dims < REST)[None, :]
        rest = tl.load(source + 2 * PAIRS + dims[None, :], mask=mask)
        tl.store(target + 2 * PAIRS + dims[None, :], rest, mask=mask)


@triton.jit
def _turned(a, b, angle, dtype: tl.constexpr):
    """(a cos x - b sin x, a sin x + b cos x), rounded to the dtype, that of a and b."""
    turns = tl.floor(angle * _PER_TURN + 0.5)
    angle = angle - turns * _TURN
    if dtype != tl.float64:
        angle, a, b = angle.to(tl.float32), widened(a), widened(b)
    cos, sin = tl.cos(angle), tl.sin(angle)
    return rounded(a * cos - b * sin, dtype), rounded(a * sin + b * cos, dtype)
