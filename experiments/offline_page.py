"""Pages that need no network: one file, made of parts and of data beside the scripts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def inline_json(data: Any) -> str:
    """Data for a script element; nothing inside can end the element."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def filled(page: str, parts: Mapping[str, str]) -> str:
    """A page with each part, by name, in the place of its comment `<!-- NAME -->`."""
    for name, part in parts.items():
        before, _, after = page.partition(f"<!-- {name} -->")
        page = before + part + after
    return page
