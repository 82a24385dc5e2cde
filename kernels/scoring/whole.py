"""Numbers of entries that data decide, as whole numbers."""

from __future__ import annotations

import torch

MOST = 2**31  # entries; more are everything

# Relative distance within which a number counts as the multiple of 1/2 next to it: only rounding
# keeps it apart.
SNAP = 2.0**-32


def whole(x: torch.Tensor) -> torch.Tensor:
    """Numbers of entries: floored, at least 0 and at most 2**31.

    Args:
        x: float64 of any shape; NaN counts as 0, and what misses a multiple of 1/2 by rounding
            errors alone as that multiple.

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
    """Refuses another dtype; reads no values.

    Raises:
        ValueError: names the argument, the expected and the actual dtype.
    """
    if x.dtype != torch.float64:
        raise ValueError(f"x: expected float64, got {x.dtype}")
