"""Means over the receivers of each leaving entry: one launch, a program per tile of entries."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from kvpolicy.kernels.launch.kernel import kernel
from kvpolicy.kernels.merging.target import check


def target(
    x: torch.Tensor,
    receivers: torch.Tensor,
    receivers_present: torch.Tensor,
    *,
    rows: int = 64,
    steps: int = 16,
) -> torch.Tensor:
    """The mean of x over the S receivers of each of P leaving entries, in R lists.

    As `target.target`; receivers are added in tiles, in an order that depends on S alone.

    Args:
        rows: leaving entries of a program; steps: receivers of a tile; powers of two.

    Returns:
        float64 [R, P].
    """
    check(x, receivers, receivers_present)
    lists, most, number = receivers.shape
    result = torch.empty((lists, most), dtype=torch.float64, device=x.device)
    if result.numel():
        _target[(triton.cdiv(most, rows), lists)](
            x, *x.stride(), receivers.contiguous(),
            receivers_present.contiguous().view(torch.uint8), result, most, number,
            ROWS=rows, STEPS=steps,
        )  # fmt: skip
    return result


@kernel()
def _target(
    x, x_list, x_entry, receivers, receivers_present, made, most, number,
    ROWS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    list_ = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    x += list_ * x_list
    base = (list_ * most + row) * number
    total = tl.zeros([ROWS], tl.float64)
    members = tl.zeros([ROWS], tl.int32)
    for first in range(0, number, STEPS):
        step = first + tl.arange(0, STEPS)
        inside = (row < most)[:, None] & (step < number)[None, :]
        offset = base[:, None] + step[None, :]
        exists = tl.load(receivers_present + offset, mask=inside, other=0) > 0
        receiver = tl.load(receivers + offset, mask=exists, other=0)
        total += tl.sum(tl.load(x + receiver * x_entry, mask=exists, other=0.0), 1)
        members += tl.sum(exists.to(tl.int32), 1)
    mean = tl.where(members > 0, total / tl.maximum(members, 1).to(tl.float64), 0.0)
    mean = tl.where(mean == mean, mean, 0.0)
    tl.store(made + list_ * most + row, mean, mask=row < most)
