"""The page of `kvpolicy inspect`: one HTML file that needs no network."""

from __future__ import annotations

import html
from pathlib import Path

from kvpolicy.evaluation.looking import terminal
from kvpolicy.evaluation.looking.kept import Kept
from kvpolicy.experiments.reporting import offline_page

_SOURCES = Path(__file__).parents[1] / "pages"
_OWN = ("kept_map.css", "kept_map.js", "inspect.js")


def page(kept: Kept) -> str:
    """The page as HTML."""
    heading, *lines = terminal.summary(kept)
    facts = "\n".join(f"<p>{html.escape(line)}</p>" for line in lines)
    body = f"""<h1>{html.escape(heading)}</h1>
{facts}
<p>Layers go down, positions across. A shade is the share of a layer's KV heads that hold a position
after the prefill. Click on a layer, or choose it with the arrow keys, to see its heads and the text
as they hold it; Escape goes back to all.</p>
<div id="map"></div>
<h2>Answer</h2>
<pre tabindex="0" role="region" aria-label="Answer">{html.escape(kept.answer.strip())}</pre>"""
    title = f"{kept.policy}: what it kept of a prompt"
    sources = [_SOURCES / name for name in _OWN]
    return offline_page.page(title, body, kept.as_map(), sources)
