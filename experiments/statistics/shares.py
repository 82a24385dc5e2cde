"""The 95 % interval of a share."""

from __future__ import annotations

import math

_Z = 1.959964  # 97.5 % quantile of the normal distribution


def wilson(share: float, count: float) -> tuple[float, float]:
    """Both ends of the interval of a share of `count` units (Wilson 1927).

    Args:
        share: 0 to 1.
        count: above 0; it need not be whole.
    """
    scale = 1 + _Z * _Z / count
    middle = (share + _Z * _Z / (2 * count)) / scale
    half = _Z * math.sqrt(share * (1 - share) / count + _Z * _Z / (4 * count**2)) / scale
    # A share of 0 or 1 is an end of its interval, which rounding may miss.
    return min(share, max(0.0, middle - half)), max(share, min(1.0, middle + half))
