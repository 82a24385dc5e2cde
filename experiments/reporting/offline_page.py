"""Pages that need no network: one file each, with theme, data, chart library and scripts in it.

`pages/offline_page.*` is common to all pages: colours in light and dark, tables, print, and in the
script how a chart is shown and read by keyboard.
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
        title: title as plain text.
        body: body as HTML.
        data: a JSON value that `pageData()` returns to the scripts.
        sources: the page's style sheets and scripts, `.css` and `.js`; they follow the common
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
    """The text with each comment `<!-- NAME -->` replaced by the part of that name."""
    for name, part in parts.items():
        before, _, after = text.partition(f"<!-- {name} -->")
        text = before + part + after
    return text


def figure(name: str, title: str, small: str = "") -> str:
    """HTML for a chart that a script draws; a table on the page has the same figures.

    Args:
        name: `data-chart`, by which the script finds the place.
        title, small: plain text above the chart; screen readers read the title.
    """
    note = f" <small>({html.escape(small)})</small>" if small else ""
    return (
        f"<figure><figcaption>{html.escape(title)}{note}</figcaption>"
        f'<div class="chart" data-chart="{html.escape(name)}" role="img" '
        f'aria-label="{html.escape(title)}; the table has the figures"></div></figure>'
    )


def _inline_json(data: Any) -> str:
    """JSON for a script element, with `<` escaped so that no text inside ends the element."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")
