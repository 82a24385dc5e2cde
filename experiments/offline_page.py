"""Pages that need no network: one file each, with theme, data, chart library and scripts in it.

What is common to all pages stands in `pages/offline_page.*`: colours in light and dark, tables,
print, and in the script how a chart is shown and read by keyboard.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parent / "pages"
LIBRARY = {"d3.min.js": "d3.LICENSE.txt", "plot.min.js": "plot.LICENSE.txt"}


def page(title: str, body: str, data: Any, sources: Sequence[Path]) -> str:
    """The page as HTML.

    Args:
        title: plain text.
        body: HTML.
        data: what `pageData()` returns to the scripts; anything that JSON can say.
        sources: the page's own style sheets and scripts, `.css` and `.js`; they follow the common
            ones in this order.
    """
    styles = [SOURCES / "offline_page.css", *(path for path in sources if path.suffix == ".css")]
    scripts = [SOURCES / "offline_page.js", *(path for path in sources if path.suffix == ".js")]
    library = [f"/*\n{_text(SOURCES / licence)}*/\n{_text(SOURCES / name)}"
               for name, licence in LIBRARY.items()]  # fmt: skip
    parts = {
        "TITLE": html.escape(title),
        "STYLE": "".join(map(_text, styles)),
        "BODY": body,
        "DATA": _inline_json(data),
        "SCRIPTS": "\n".join(
            f"<script>\n{text}</script>" for text in [*library, *map(_text, scripts)]
        ),
    }
    return filled(_text(SOURCES / "offline_page.html"), parts)


def filled(text: str, parts: Mapping[str, str]) -> str:
    """A text with each part, by name, in the place of its comment `<!-- NAME -->`."""
    for name, part in parts.items():
        before, _, after = text.partition(f"<!-- {name} -->")
        text = before + part + after
    return text


def figure(name: str, title: str, small: str = "") -> str:
    """The place of a chart that a script draws, beside a table with the same figures: HTML.

    Args:
        name: `data-chart`, by which the script finds the place.
        title, small: plain text above it; what screen readers read is the title.
    """
    note = f" <small>({html.escape(small)})</small>" if small else ""
    return (
        f"<figure><figcaption>{html.escape(title)}{note}</figcaption>"
        f'<div class="chart" data-chart="{html.escape(name)}" role="img" '
        f'aria-label="{html.escape(title)}; the table has the figures"></div></figure>'
    )


def _inline_json(data: Any) -> str:
    """Data for a script element; nothing inside can end the element."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")
