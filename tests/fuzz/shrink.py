"""Shortens a text that fails, so that the failure is easier to read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import mutants
from kvpolicy.dsl.syntax.source import Source
from kvpolicy.dsl.syntax.tree import Expr

TRIES = 300


def shrunk(text: str, wrong: Callable[[str], bool], tries: int = TRIES) -> str:
    """The text without parts that the failure does not need.

    Args:
        text: a text for which `wrong` is True.
        wrong: whether a text fails in the same way.
        tries: the most calls of `wrong`.
    """
    left = tries
    smaller = True
    while smaller and left > 0:
        smaller = False
        for other in _smaller(text):
            left -= 1
            if wrong(other):
                text, smaller = other, True
                break
            if left <= 0:
                break
    return text


def _smaller(text: str) -> Iterator[str]:
    """Shorter texts, those that lose most first."""
    keys = mutants.sections_of(text)
    for key in keys:
        yield "".join(part for name, part in keys.items() if name != key)
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines):
        rest = "".join(lines[:number] + lines[number + 1 :])
        if line.strip():
            yield rest
    for expression in _expressions(text):
        for part in expression.walk():
            start, end = part.span.start, part.span.end
            for child in part.children:
                inner = text[child.span.start : child.span.end]
                yield f"{text[:start]}{inner}{text[end:]}"
    for match in re.finditer(r" +#.*", text):
        yield text[: match.start()] + text[match.end() :]


def _expressions(text: str) -> list[Expr]:
    try:
        return mutants.expressions_of(text)
    except Exception:  # the failure may be that the file cannot be read
        return []


def headed(text: str, lines: list[str]) -> Source:
    """The text under comments with the failure."""
    head = "".join(f"# {line}\n" for each in lines for line in each.splitlines())
    return Source("failure.yaml", head + text)
