"""Means over the entries that a layer's KV heads drop: one launch for all layers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from kvpolicy.kernels.launch.kernel import kernel
from kvpolicy.kernels.merging.means import LANES, check


def means(x: torch.Tensor, present: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """For each of R lists, the mean of the numbers of all lists of its layer.

    As `means.means`.

    Returns:
        float64 [R].
    """
    check(x, present, kv_heads)
    lists, width = x.shape
    result = torch.empty(lists, dtype=torch.float64, device=x.device)
    if lists:
        _means[(lists // kv_heads,)](
            x, *x.stride(), present.contiguous().view(torch.uint8), result, width,
            KV_HEADS=kv_heads, LANES=LANES,
        )  # fmt: skip
    return result


def means_of_columns(
    x: torch.Tensor, present: torch.Tensor, kv_heads: int, *, block: int = 256
) -> torch.Tensor:
    """For each of R lists and each column, the mean of the numbers of all lists of its layer.

    As `means.means_of_columns`.

    Args:
        block: columns of a program, a power of two.

    Returns:
        float64 [R, P].
    """
    check(x, present, kv_heads)
    lists, width = x.shape
    result = torch.empty(lists, width, dtype=torch.float64, device=x.device)
    if result.numel():
        _columns[(triton.cdiv(width, block), lists // kv_heads)](
            x, *x.stride(), present.contiguous().view(torch.uint8), result, width,
            KV_HEADS=kv_heads, BLOCK=block,
        )  # fmt: skip
    return result


@kernel()
def _means(x, x_list, x_entry, present, made, width, KV_HEADS: tl.constexpr, LANES: tl.constexpr):
    """Average the numbers of one layer."""
    first = tl.program_id(0).to(tl.int64) * KV_HEADS
    lane = tl.arange(0, LANES)
    total = tl.zeros([LANES], tl.float64)
    number = tl.zeros([LANES], tl.int32)
    for head in range(KV_HEADS):
        list_ = first + head
        for start in range(0, width, LANES):
            column = start + lane
            inside = tl.load(present + list_ * width + column, mask=column < width, other=0) > 0
            total += tl.load(x + list_ * x_list + column * x_entry, mask=inside, other=0.0)
            number += inside.to(tl.int32)
    count = tl.sum(number)
    mean = tl.sum(total) / tl.maximum(count, 1).to(tl.float64)
    mean = tl.where(mean == mean, mean, 0.0)
    for head in range(KV_HEADS):
        tl.store(made + first + head, mean)


@kernel()
def _columns(x, x_list, x_entry, present, made, width, KV_HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """Average some columns of one layer."""
    first = tl.program_id(1).to(tl.int64) * KV_HEADS
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total, number = tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.int32)
    for head in range(KV_HEADS):
        list_ = first + head
        inside = tl.load(present + list_ * width + column, mask=column < width, other=0) > 0
        total += tl.load(x + list_ * x_list + column * x_entry, mask=inside, other=0.0)
        number += inside.to(tl.int32)
    mean = total / tl.maximum(number, 1).to(tl.float64)
    mean = tl.where(mean == mean, mean, 0.0)
    for head in range(KV_HEADS):
        tl.store(made + (first + head) * width + column, mean, mask=column < width)
