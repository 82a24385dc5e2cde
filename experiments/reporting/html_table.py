"""HTML tables that screen readers can read: with a caption, and heads of columns and rows."""

from __future__ import annotations

import html
from collections.abc import Sequence


def table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column is the head of each row; cells are plain text.

    Args:
        caption: what it shows; also the name of the region that scrolls if the table is too wide.
        head: a title for each column; a title that ends with a space marks a column of text.
        rows: cells in the order of the columns.
    """
    left = [' class="text"' if title.endswith(" ") else "" for title in head]
    titles = "".join(
        f'<th scope="col"{side}>{html.escape(title.rstrip())}</th>'
        for title, side in zip(head, left, strict=True)
    )
    lines = "\n".join(f"<tr>{_cells(row, left)}</tr>" for row in rows)
    name = html.escape(caption)
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="Table: {name}"><table>\n'
        f"<caption>{name}</caption>\n<thead><tr>{titles}</tr></thead>\n"
        f"<tbody>\n{lines}\n</tbody>\n</table></div>"
    )


def _cells(row: Sequence[str], left: Sequence[str]) -> str:
    first, *rest = zip(row, left, strict=True)
    return f'<th scope="row"{first[1]}>{html.escape(first[0])}</th>' + "".join(
        f"<td{side}>{html.escape(text)}</td>" for text, side in rest
    )
