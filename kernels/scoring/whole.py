"""Computed numbers of entries, as whole numbers."""

from __future__ import annotations

import torch

MOST = 2**31  # more entries than any list holds

# Distance from a multiple of 1/2, relative to max(|x|, 1), that counts as a rounding error.
SNAP = 2.0**-32


def whole(x: torch.Tensor) -> torch.Tensor:
    """Floor numbers of entries and clamp them to 0 .. 2**31.

    Args:
        x: float64 of any shape; NaN counts as 0, and a number within a rounding error (`SNAP`) of
            a multiple of 1/2 as that multiple.

    Returns:
        int64, the shape of x.

    Raises:
        ValueError: names the argument, the expected and the actual dtype.
    """
    check(x)
    nearest = torch.round(2 * x) / 2
    snapped = torch.where((x - nearest).abs() <= SNAP * x.abs().clamp(min=1), nearest, x)
    return snapped.floor().nan_to_num(0.0).clamp(0, MOST).long()


def check(x: torch.Tensor) -> None:
    """Refuse another dtype; read no values."""
    if x.dtype != torch.float64:
        raise ValueError(f"x: expected float64, got {x.dtype}")
