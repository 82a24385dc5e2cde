"""Several layers' values reduced place by place: their variance, and whether any is true."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from kvpolicy.kernels.launch.arguments import check_tensors
from kvpolicy.kernels.scoring.spread import var


def var_of_layers(
    values: Sequence[torch.Tensor], present: Sequence[torch.Tensor] | None, first: int
) -> torch.Tensor:
    """The population variance, at every place, of the layers' present values; 0 of none.

    Args:
        values: for each layer float64 [...], all of one shape; ignored where absent.
        present: for each layer bool of that shape, where a value is present; None: everywhere.
        first: number of first layers that are left out.

    Returns:
        float64 of that shape; 0 where it would be NaN.

    Raises:
        ValueError: names the argument, the expected and the actual value.
    """
    check(values, present, first, torch.float64)
    counted = torch.stack(list(values[first:]))
    return var(counted, None if present is None else torch.stack(list(present[first:])), [0])


def any_of_layers(
    values: Sequence[torch.Tensor], present: Sequence[torch.Tensor] | None, first: int
) -> torch.Tensor:
    """Whether, at every place, any present value is true.

    Arguments as of `var_of_layers`, but `values` and the result are bool.
    """
    check(values, present, first, torch.bool)
    counted = torch.stack(list(values[first:]))
    if present is not None:
        counted = counted & torch.stack(list(present[first:]))
    return counted.any(0)


def check(
    values: Sequence[torch.Tensor],
    present: Sequence[torch.Tensor] | None,
    first: int,
    dtype: torch.dtype,
) -> None:
    """Refuse wrong shapes and dtypes; read no values."""
    if not 0 <= first < len(values):
        raise ValueError(f"first: expected 0 .. {len(values) - 1}, got {first}")
    parts = [("values", dtype, values)]
    parts += [] if present is None else [("present", torch.bool, present)]
    for name, kind, tensors in parts:
        if len(tensors) != len(values):
            raise ValueError(f"{name}: expected {len(values)} tensors, got {len(tensors)}")
        check_tensors((name, x, kind, values[0].shape) for x in tensors)
