"""The page of `kvpolicy inspect`: one HTML file that needs nothing else."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

from kvpolicy.evaluation.looking import terminal
from kvpolicy.evaluation.looking.kept import Kept

_SOURCES = Path(__file__).parents[1] / "pages"


def page(kept: Kept) -> str:
    """The page as text."""
    heading, *lines = terminal.summary(kept)
    return filled(
        "inspect.html",
        title=html.escape(f"{kept.policy}: what it kept of a prompt"),
        heading=html.escape(heading),
        facts="\n".join(f"<p>{html.escape(line)}</p>" for line in lines),
        answer=html.escape(kept.answer.strip()),
        map=script_json(kept.as_map()),
        script=(_SOURCES / "kept_map.js").read_text(encoding="utf-8"),
    )


def filled(template: str, **parts: str) -> str:
    """A template of `pages/` with every `@@name@@` replaced."""
    text = (_SOURCES / template).read_text(encoding="utf-8")
    return re.sub(r"@@(\w+)@@", lambda found: parts[found[1]], text)


def script_json(value: Any) -> str:
    """JSON that may stand inside of a script element, whatever texts it holds."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\N{LINE SEPARATOR}\N{PARAGRAPH SEPARATOR}":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
