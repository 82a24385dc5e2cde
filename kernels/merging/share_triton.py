"""Inner products and weighted sums of two layers' vectors, in one pass each.

All arithmetic is float64; on an H200 it takes less time than reading the vectors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from kvpolicy.kernels.entries.rounding_triton import doubled
from kvpolicy.kernels.launch.kernel import kernel
from kvpolicy.kernels.merging.share import check


def gram(below: torch.Tensor, own: torch.Tensor, *, block: int = 16) -> torch.Tensor:
    """Inner products of the vectors of each pair.

    As `share.gram`.

    Args:
        below, own: [G, N, D] any float dtype, both the same; the last axis contiguous, or they are
            copied.
        block: pairs of a program, a power of two. Not measured.

    Returns:
        [3, G, N] float64.
    """
    check(below, own)
    heads, pairs, size = below.shape
    result = torch.empty((3, heads, pairs), dtype=torch.float64, device=below.device)
    if result.numel():
        _gram[(triton.cdiv(pairs, block), heads)](
            *_strided(below), *_strided(own), result, pairs,
            D=size, BLOCK_N=block, BLOCK_D=triton.next_power_of_2(size), num_warps=4,
        )  # fmt: skip
    return result


def blend(
    below: torch.Tensor, own: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, block: int = 16
) -> torch.Tensor:
    """a * below + b * own, where a product or sum that is NaN counts as 0.

    As `share.blend`.

    Args:
        below, own, block: as of `gram`.
        a, b: [G, N] float64.

    Returns:
        [G, N, D] float64.
    """
    check(below, own, a, b)
    heads, tokens, size = below.shape
    result = torch.empty(below.shape, dtype=torch.float64, device=below.device)
    if result.numel():
        _blend[(triton.cdiv(tokens, block), heads)](
            *_strided(below), *_strided(own), a.contiguous(), b.contiguous(), result, tokens,
            D=size, BLOCK_N=block, BLOCK_D=triton.next_power_of_2(size), num_warps=4,
        )  # fmt: skip
    return result


def _strided(x: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    x = x if x.stride(2) == 1 else x.contiguous()
    return x, x.stride(0), x.stride(1)


@triton.jit
def _read(x, head, row, stride_head, stride, mask, BLOCK_D: tl.constexpr):
    offset = head * stride_head + row[:, None] * stride + tl.arange(0, BLOCK_D)[None, :]
    return doubled(tl.load(x + offset, mask=mask, other=0.0))


@kernel(aligned=["below", "below_head", "below_row", "own", "own_head", "own_row"])
def _gram(
    below, below_head, below_row, own, own_head, own_row, made, pairs,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    pair = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = pair < pairs
    mask = exists[:, None] & (tl.arange(0, BLOCK_D) < D)[None, :]
    x = _read(below, head, pair, below_head, below_row, mask, BLOCK_D)
    y = _read(own, head, pair, own_head, own_row, mask, BLOCK_D)
    address, next_sum = made + head * pairs + pair, tl.num_programs(1).to(tl.int64) * pairs
    tl.store(address, tl.sum(x * x, axis=1), mask=exists)
    tl.store(address + next_sum, tl.sum(x * y, axis=1), mask=exists)
    tl.store(address + 2 * next_sum, tl.sum(y * y, axis=1), mask=exists)


@kernel(aligned=["below", "below_head", "below_row", "own", "own_head", "own_row", "made"])
def _blend(
    below, below_head, below_row, own, own_head, own_row, a, b, made, tokens,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = row < tokens
    column = tl.arange(0, BLOCK_D)
    mask = exists[:, None] & (column < D)[None, :]
    x = _read(below, head, row, below_head, below_row, mask, BLOCK_D)
    y = _read(own, head, row, own_head, own_row, mask, BLOCK_D)
    x *= tl.load(a + head * tokens + row, mask=exists, other=0.0)[:, None]
    y *= tl.load(b + head * tokens + row, mask=exists, other=0.0)[:, None]
    total = tl.where(x == x, x, 0.0) + tl.where(y == y, y, 0.0)
    offset = (head * tokens + row)[:, None] * D + column[None, :]
    tl.store(made + offset, tl.where(total == total, total, 0.0), mask=mask)
