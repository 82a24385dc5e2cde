"""Comments of a YAML file, which YAML itself throws away."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from kvpolicy.dsl.syntax.source import Source
from kvpolicy.dsl.syntax.yaml_nodes import Mapping, Scalar, Sequence, YamlNode


@dataclass(frozen=True)
class Comment:
    """A comment with its `#`, and the offset in the file at which it begins."""

    start: int
    text: str
    alone: bool  # on a line of its own


def find_comments(source: Source, root: YamlNode) -> list[Comment]:
    """Every comment: a `#` outside scalars, at a line start or after a space, comma or bracket."""
    intervals = sorted(interval for scalar in _scalars(root) for interval in _text_of(scalar))
    comments, gap_start, text = [], 0, source.text
    for start, end in [*intervals, (len(text), len(text))]:
        gap = text[gap_start:start]
        for match in re.finditer(r"(?:^|(?<=[\s,\[\]{}]))#[^\n]*", gap):
            offset = gap_start + match.start()
            line = text[text.rfind("\n", 0, offset) + 1 : offset]
            comments.append(Comment(offset, match.group().rstrip(), not line.strip()))
        gap_start = max(gap_start, end)
    return comments


def _scalars(node: YamlNode) -> Iterator[Scalar]:
    if isinstance(node, Scalar):
        yield node
    elif isinstance(node, Sequence):
        for item in node.items:
            yield from _scalars(item)
    elif isinstance(node, Mapping):
        for key, value in node.entries:
            yield key
            yield from _scalars(value)


def _text_of(scalar: Scalar) -> Iterator[tuple[int, int]]:
    """Where a scalar's text stands; between a `|` and its first line there may be a comment."""
    start, end = scalar.span.start, scalar.span.end
    if scalar.style == "|":
        yield start, start + 1
        start = max(start + 1, scalar.source.text.find("\n", start, end))
    yield start, end
