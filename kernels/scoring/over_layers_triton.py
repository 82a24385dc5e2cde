"""Several layers' values reduced place by place, each read where it lies: nothing is stacked."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from kvpolicy.kernels.launch.kernel import kernel
from kvpolicy.kernels.scoring import over_layers
from kvpolicy.kernels.scoring.over_layers import check

MOST = 16  # layers; the loop over them is unrolled, and twice as many spill
_BLOCK = 512  # not measured


def var_of_layers(
    values: Sequence[torch.Tensor], present: Sequence[torch.Tensor] | None, first: int
) -> torch.Tensor:
    """The population variance, at every place, of the layers' present values.

    As `over_layers.var_of_layers`, which is called for more than MOST layers.
    """
    check(values, present, first, torch.float64)
    if len(values) > MOST:
        return over_layers.var_of_layers(values, present, first)
    return _reduced(values, present, first, torch.float64)


def any_of_layers(
    values: Sequence[torch.Tensor], present: Sequence[torch.Tensor] | None, first: int
) -> torch.Tensor:
    """Whether, at every place, any present value is true.

    As `over_layers.any_of_layers`, which is called for more than MOST layers.
    """
    check(values, present, first, torch.bool)
    if len(values) > MOST:
        return over_layers.any_of_layers(values, present, first)
    return _reduced(values, present, first, torch.bool)


def _reduced(
    values: Sequence[torch.Tensor],
    present: Sequence[torch.Tensor] | None,
    first: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Reduce in one launch.

    Layers that are left out are compiled in, too, so that every `first` has the same kernel.
    """
    result = torch.empty(values[0].shape, dtype=dtype, device=values[0].device)
    if not result.numel():
        return result
    truth = dtype == torch.bool
    _over_layers[(triton.cdiv(result.numel(), _BLOCK),)](
        tuple(_flat(x) for x in values), tuple(_flat(x) for x in present or ()), _flat(result),
        result.numel(), first, TRUTH=truth, MASKED=present is not None, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return result


def _flat(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    return x.view(torch.uint8) if x.dtype == torch.bool else x


@kernel()
def _over_layers(
    values, present, out, size, first,
    TRUTH: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    number = tl.zeros((BLOCK,), tl.int32)
    total = tl.zeros((BLOCK,), tl.float64)
    for layer in tl.static_range(len(values)):
        valid = inside & (layer >= first)
        if MASKED:
            valid = valid & (tl.load(present[layer] + place, mask=valid, other=0) != 0)
        if TRUTH:
            number |= (tl.load(values[layer] + place, mask=valid, other=0) != 0).to(tl.int32)
        else:
            number += valid.to(tl.int32)
            total += tl.load(values[layer] + place, mask=valid, other=0.0)
    if TRUTH:
        tl.store(out + place, number.to(tl.uint8), mask=inside)
    else:
        count = tl.maximum(number, 1).to(tl.float64)
        middle = total / count
        squares = tl.zeros((BLOCK,), tl.float64)
        for layer in tl.static_range(len(values)):
            valid = inside & (layer >= first)
            if MASKED:
                valid = valid & (tl.load(present[layer] + place, mask=valid, other=0) != 0)
            deviation = tl.load(values[layer] + place, mask=valid, other=0.0) - middle
            squares += tl.where(valid, deviation * deviation, 0.0)
        variance = squares / count
        tl.store(out + place, tl.where(variance == variance, variance, 0.0), mask=inside)
