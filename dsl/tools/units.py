"""Sizes, counts, shares, times and positions as text."""

from __future__ import annotations

from collections.abc import Sequence


def size_text(size: float) -> str:
    """Bytes in the largest unit in which they are at least 1."""
    return _in_largest(size, 1024, ("B", "KiB", "MiB", "GiB"))


def digits_text(value: float) -> str:
    """A number with three significant digits: 0.0123, 12.3, 1230."""
    return f"{float(f'{value:.3g}'):.12g}"


def share_text(share: float, decimals: int | None = None) -> str:
    """A share in percent, 12.5 % for 0.125: three significant digits, or so many decimals."""
    number = digits_text(100 * share) if decimals is None else f"{100 * share:.{decimals}f}"
    return f"{number} %"


def flops_text(operations: float) -> str:
    """Operations in the largest unit in which they are at least 1."""
    return _in_largest(operations, 1000, ("flop", "kflop", "Mflop", "Gflop", "Tflop"))


def _in_largest(number: float, step: int, units: Sequence[str]) -> str:
    """A number in the largest unit in which it is at least 1; `step` units make the next."""
    (unit, *larger), digits = units, 0
    for larger_unit in larger:
        if number >= step:
            number, unit, digits = number / step, larger_unit, 1
    return f"{number:,.{digits}f} {unit}"


def seconds_text(seconds: float) -> str:
    """Seconds in the largest unit in which they are at least 1."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return f"{seconds * scale:,.2f} {unit}"
    return f"{seconds * 1e6:,.0f} us"


def positions_text(positions: Sequence[int]) -> str:
    """Positions as test files write them, `0 3-5 11`; `nothing` if there are none."""
    words: list[str] = []
    for i, position in enumerate(positions):
        if i and position == positions[i - 1] + 1:
            start = words[-1].partition("-")[0]
            words[-1] = f"{start}-{position}"
        else:
            words.append(str(position))
    return " ".join(words) or "nothing"
