"""Sizes and counts as people read them."""

from __future__ import annotations

from collections.abc import Sequence


def size_text(size: float) -> str:
    """Bytes in the largest unit that leaves at least 1."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB"):
        if size >= 1024:
            size, unit = size / 1024, larger
    return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"


def flops_text(operations: float) -> str:
    """Operations in the largest unit that leaves at least 1."""
    unit = ""
    for larger in "kMGT":
        if operations >= 1000:
            operations, unit = operations / 1000, larger
    return f"{operations:,.1f} {unit}flop" if unit else f"{operations:,.0f} flop"


def seconds_text(seconds: float) -> str:
    """Seconds in the largest unit that leaves at least 1."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return f"{seconds * scale:,.2f} {unit}"
    return f"{seconds * 1e6:,.0f} us"


def positions_text(positions: Sequence[int]) -> str:
    """Positions as test files write them: `0 3-5 11`."""
    words: list[str] = []
    for i, position in enumerate(positions):
        if i and position == positions[i - 1] + 1:
            start = words[-1].partition("-")[0]
            words[-1] = f"{start}-{position}"
        else:
            words.append(str(position))
    return " ".join(words) or "nothing"
