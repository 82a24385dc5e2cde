"""Pseudo-random numbers of entries by a hash: one launch for all lists."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from kvpolicy.kernels.launch.kernel import kernel
from kvpolicy.kernels.scoring import draws as reference

_BITS = tl.constexpr(reference.BITS)
_GOLDEN = tl.constexpr(reference.GOLDEN)
_FIRST, _SECOND = tl.constexpr(reference.FIRST), tl.constexpr(reference.SECOND)


def draws(
    seed: int,
    positions: torch.Tensor,
    generated: torch.Tensor,
    kv_heads: int,
    first: int = 0,
    *,
    block: int = 1024,
) -> torch.Tensor:
    """Draw a number in [0, 1) for every entry, by seed, layer, KV head, position and step.

    As `draws.draws`.

    Args:
        block: entries of a program, a power of two.

    Returns:
        float64 [S * G, M].
    """
    reference.check(positions, generated, kv_heads)
    number, width = positions.shape
    result = torch.empty((number * kv_heads, width), dtype=torch.float64, device=positions.device)
    if result.numel():
        _draws[(number * kv_heads, triton.cdiv(width, block))](
            positions.contiguous(), generated.contiguous(), result, seed & reference.BITS, width,
            kv_heads, number // len(generated), first, BLOCK=block,
        )  # fmt: skip
    return result


@triton.jit
def _hashed(state, part):
    # Both factors are below 2**31, so that no product leaves int64.
    state = (state + _GOLDEN * (part + 1)) & _BITS
    state = ((state ^ (state >> 16)) * _FIRST) & _BITS
    state = ((state ^ (state >> 15)) * _SECOND) & _BITS
    return state ^ (state >> 15)


@kernel()
def _draws(positions, generated, made, seed, width, kv_heads, layers, first, BLOCK: tl.constexpr):
    """Draw for a part of one list."""
    list_ = tl.program_id(0).to(tl.int64)
    number, head = list_ // kv_heads, list_ % kv_heads
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(positions + number * width + column, mask=column < width, other=0)
    state = _hashed(_hashed(seed.to(tl.int64), number % layers + first), head)
    state = _hashed(_hashed(state, position), tl.load(generated + number // layers))
    tl.store(
        made + list_ * width + column, state.to(tl.float64) / 4294967296.0, mask=column < width
    )
