"""Sizes and counts as people read them."""

from __future__ import annotations


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
