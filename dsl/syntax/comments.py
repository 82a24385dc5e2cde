"""Comments of a YAML file, which YAML itself throws away."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
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


class Pending:
    """The comments of a file that a formatter has not written yet, in order.

    Args:
        source: the file.
        comments: all of them.
    """

    def __init__(self, source: Source, comments: list[Comment]) -> None:
        self._text = source.text
        self._comments = comments
        self._written = 0

    def before(self, offset: int) -> list[Comment]:
        """The next comments that begin before an offset."""
        return self._take(lambda comment: comment.start < offset)

    def beside(self, offset: int, stop: int) -> str:
        """The next comment, after two spaces, if on the line of an offset and before `stop`."""
        newline = self._text.find("\n", offset)
        end = min(stop, newline if newline >= 0 else stop)
        if self._next_is(lambda comment: comment.start < end):
            self._written += 1
            return f"  {self._comments[self._written - 1].text}"
        return ""

    def deeper(self, start: int, stop: int) -> list[Comment]:
        """The next comments before `stop` that are indented more than what begins at `start`."""
        column = self._column(start)
        return self._take(
            lambda comment: (
                comment.start < stop and comment.alone and self._column(comment.start) > column
            )
        )

    def are_inside(self, start: int, stop: int) -> bool:
        """Whether any comment of the file, written or not, begins between two offsets."""
        return any(start <= comment.start < stop for comment in self._comments)

    def _take(self, wanted: Callable[[Comment], bool]) -> list[Comment]:
        first = self._written
        while self._next_is(wanted):
            self._written += 1
        return self._comments[first : self._written]

    def _next_is(self, wanted: Callable[[Comment], bool]) -> bool:
        return self._written < len(self._comments) and wanted(self._comments[self._written])

    def _column(self, offset: int) -> int:
        return offset - 1 - self._text.rfind("\n", 0, offset)


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
