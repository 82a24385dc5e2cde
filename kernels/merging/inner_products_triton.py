"""Pairs of entries compared where they lie, in float64: reading them takes longer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from kvpolicy.kernels.entries.rounding_triton import doubled
from kvpolicy.kernels.launch.kernel import kernel
from kvpolicy.kernels.merging.inner_products import check


def inner_products(
    x: torch.Tensor,
    dropped: torch.Tensor,
    present: torch.Tensor,
    receivers: torch.Tensor,
    receivers_present: torch.Tensor,
    ids: torch.Tensor | None = None,
    *,
    block: int = 16,
) -> torch.Tensor:
    """Inner products and cosines of P pairs of vectors in each of G lists.

    As `inner_products.inner_products`.

    Args:
        x: as of the reference; the last axis contiguous, or it is copied.
        block: pairs of a program, a power of two. Not measured.

    Returns:
        [4, G, P] float64.
    """
    check(x, dropped, present, receivers, receivers_present, ids)
    lists, most = dropped.shape
    result = torch.empty((4, lists, most), dtype=torch.float64, device=x.device)
    if result.numel():
        x = x if x.stride(-1) == 1 else x.contiguous()
        columns = x.shape[1] if ids is None else ids.shape[1]
        _inner_products[(triton.cdiv(most, block), lists)](
            x, 0 if ids is not None else x.stride(0), x.stride(-2),
            None if ids is None else ids.contiguous(),
            dropped.contiguous(), present.contiguous().view(torch.uint8),
            receivers.contiguous(), receivers_present.contiguous().view(torch.uint8), result,
            columns, most,
            D=x.shape[-1], BLOCK_N=block, BLOCK_D=triton.next_power_of_2(x.shape[-1]), num_warps=4,
        )  # fmt: skip
    return result


@triton.jit
def _read(x, ids, stride, columns, marks, at, inside, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of one list in float64, zeros where there are none."""
    exists = tl.load(marks + at, mask=inside, other=0) > 0
    row = tl.load(columns + at, mask=exists, other=0)
    if ids is not None:
        row = tl.load(ids + row, mask=exists, other=0)
    column = tl.arange(0, BLOCK_D)
    mask = exists[:, None] & (column < D)[None, :]
    return doubled(tl.load(x + row[:, None] * stride + column[None, :], mask=mask, other=0.0))


@kernel(aligned=["x", "stride_list", "stride"])
def _inner_products(
    x, stride_list, stride, ids, dropped, present, receivers, receivers_present, made, columns,
    most, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    list_ = tl.program_id(1).to(tl.int64)
    pair = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside, offset = pair < most, list_ * most + pair
    x += list_ * stride_list
    if ids is not None:
        ids += list_ * columns
    first = _read(x, ids, stride, dropped, present, offset, inside, D, BLOCK_D)
    second = _read(x, ids, stride, receivers, receivers_present, offset, inside, D, BLOCK_D)
    first_square, product = tl.sum(first * first, axis=1), tl.sum(first * second, axis=1)
    second_square = tl.sum(second * second, axis=1)
    length = tl.sqrt(first_square) * tl.sqrt(second_square)
    cosine = tl.where(length > 0, product / tl.where(length > 0, length, 1.0), 0.0)
    next_sum = tl.num_programs(1).to(tl.int64) * most
    tl.store(made + offset, first_square, mask=inside)
    tl.store(made + next_sum + offset, product, mask=inside)
    tl.store(made + 2 * next_sum + offset, second_square, mask=inside)
    tl.store(made + 3 * next_sum + offset, tl.where(cosine == cosine, cosine, 0.0), mask=inside)
