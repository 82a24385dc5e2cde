"""How many rows a program holds at a time."""

from __future__ import annotations


def rows_of(width: int, element_size: int) -> int:
    """Rows of one tile of a program of 128 threads that copies two tiles, keys and values.

    8 KiB each: four or five such programs fill the registers of a multiprocessor, and each thread
    has eight reads of 16 bytes under way. Not measured.

    Args:
        width: elements of a row, a power of two.
        element_size: bytes of an element.

    Returns:
        A power of two.
    """
    return max(8192 // (width * element_size), 1)
