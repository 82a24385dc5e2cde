"""Tables for the terminal, fitted to its width."""

from __future__ import annotations

from collections.abc import Sequence

_LEAST = 8  # smallest width of a column that is shortened, in characters


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], width: int, cut: Sequence[int] = (0,)
) -> list[str]:
    """Lines of a table: text to the left, numbers to the right.

    Args:
        head: a title for each column; a title that ends with a space marks a column of text.
        rows: cells in the order of the columns.
        width: characters of a line; where it is too small, gaps shrink and text loses its middle.
        cut: columns of text that may be shortened, in the order of shortening.
    """
    left = [title.endswith(" ") for title in head]
    cells = [[title.rstrip() for title in head], *(list(row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    gap = 2 if sum(widths) + 2 * (len(head) - 1) <= width else 1
    over = sum(widths) + gap * (len(head) - 1) - width
    for column in cut:
        less = max(0, min(over, widths[column] - _LEAST))
        widths[column] -= less
        over -= less
    lines = []
    for row in cells:
        fitted = (
            _fitted(text, size).ljust(size) if to_left else text.rjust(size)
            for text, size, to_left in zip(row, widths, left, strict=True)
        )
        lines.append((" " * gap).join(fitted).rstrip())
    return lines


def _fitted(text: str, size: int) -> str:
    """The text, or its two ends with dots between them: names of arms often begin alike."""
    end = (size - 2) // 2
    return text if len(text) <= size else f"{text[: size - 2 - end]}..{text[-end:]}"


def shortened(text: str, size: int) -> str:
    """The text, or its beginning and two dots if it has more characters than `size`."""
    return text if len(text) <= size else text[: size - 2] + ".."
