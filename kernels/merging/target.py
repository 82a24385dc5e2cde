"""Means over the receivers of each leaving entry."""

from __future__ import annotations

import math

import torch
from kvpolicy.kernels.launch.arguments import check_axes, refused


def target(
    x: torch.Tensor, receivers: torch.Tensor, receivers_present: torch.Tensor
) -> torch.Tensor:
    """The mean of x over the S receivers of each of P leaving entries, in R lists.

    Args:
        x: float64 [R, M].
        receivers: int64 [R, P, S], columns of x.
        receivers_present: bool [R, P, S], which of these receivers exist.

    Returns:
        float64 [R, P]; 0 where the mean is NaN or no receiver exists.

    Raises:
        ValueError: names the argument, what was expected and what was given.
    """
    check(x, receivers, receivers_present)
    values = x.gather(1, receivers.flatten(1)).view(receivers.shape)
    mean = torch.where(receivers_present, values, 0.0).sum(2) / receivers_present.sum(2)
    return mean.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)


def check(x: torch.Tensor, receivers: torch.Tensor, receivers_present: torch.Tensor) -> None:
    """Refuse wrong shapes and dtypes; read no tensor."""
    check_axes("x", x, torch.float64, "[R, M]")
    if receivers.dtype != torch.int64 or receivers.dim() != 3 or len(receivers) != len(x):
        raise refused("receivers", receivers, f"int64 [{len(x)}, P, S]")
    if receivers_present.dtype != torch.bool or receivers_present.shape != receivers.shape:
        raise refused("receivers_present", receivers_present, f"bool {list(receivers.shape)}")
