"""One canonical way to write an experiment file.

Keys come in the order of the table, arms and metrics one per line, shares in percent, times in the
largest unit. Comments stay with the key or value that they are above or beside. The result is read
again, and the file is left alone if its meaning or its comments would change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import yaml
from kvpolicy.dsl.syntax.comments import Comment, Pending, find_comments
from kvpolicy.dsl.syntax.diagnostics import Diagnostic, PolicyError
from kvpolicy.dsl.syntax.library import rewrite
from kvpolicy.dsl.syntax.source import Source
from kvpolicy.dsl.syntax.yaml_nodes import Mapping, Scalar, YamlNode
from kvpolicy.dsl.syntax.yaml_nodes import Sequence as NodeList
from kvpolicy.experiments.definition.form import FILE, Field
from kvpolicy.experiments.definition.parse import nodes
from kvpolicy.experiments.definition.quantities import (
    duration_text,
    duration_value,
    number_text,
    percent_text,
    percent_value,
)
from kvpolicy.experiments.definition.reading import Read, load, read

WIDTH = 100

_T = TypeVar("_T")

_ROOT = Field("", "keys", "", fields=FILE)


def format_file(path: Path, write: bool = True) -> bool:
    """Formats a file in place; returns whether its text changes.

    Args:
        write: False only tells whether it would change.

    Raises:
        PolicyError: the file has errors, cannot be read or written, or cannot be formatted without
            changing its meaning or its comments.
    """
    reading = load(path)
    text = _formatted(reading)
    if text == reading.source.text:
        return False
    if write:
        rewrite(path, text, reading.source.name)
    return True


def format_text(text: str, name: str = "experiment.yaml") -> str:
    """The canonical text of an experiment.

    Args:
        text: YAML, or JSON, which becomes YAML.
        name: name of the text in messages.

    Raises:
        PolicyError: the text has errors, or cannot be formatted without changing its meaning or
            its comments.
    """
    return _formatted(read(text, name))


def _formatted(reading: Read) -> str:
    experiment, source = reading.require(), reading.source
    root = _root(source)
    comments = find_comments(source, root)
    text = _ExperimentWriter(source, comments).file(root)
    again = read(text, source.name)
    kept = again.experiment == experiment
    if kept:
        after = find_comments(again.source, _root(again.source))
        kept = sorted(c.text for c in after) == sorted(c.text for c in comments)
    if not kept:
        message = "the file cannot be formatted without changing its meaning or its comments"
        raise PolicyError([Diagnostic("file", message)], source)
    return text


def _root(source: Source) -> Mapping:
    root = nodes(source, lambda _: None)
    assert isinstance(root, Mapping)  # it has been read without an error
    return root


@dataclass
class _Entry:
    """The lines of a key or of an item of a list, with the comments above them."""

    name: str  # of the key; empty for an item
    blank: bool  # whether an empty line comes before it
    lines: list[str]


class _ExperimentWriter:
    def __init__(self, source: Source, comments: list[Comment]) -> None:
        self.source = source
        self.comments = Pending(source, comments)

    def file(self, root: Mapping) -> str:
        """The whole text; comments above the first key stay on top."""
        end = len(self.source.text)
        lines = self.above(root.entries[0][0].span.start, "")
        lines += self.block(root, _ROOT, 0, end)
        lines += self.above(end, "")
        return "\n".join(lines) + "\n"

    def block(self, node: Mapping | NodeList, field: Field, indent: int, stop: int) -> list[str]:
        """Keys or items one per line, keys in the order of the table.

        Args:
            stop: offset in the source at which the text after `node` begins.
        """
        if isinstance(node, NodeList):
            parts = [("", value.span.start, value) for value in node.items]
        else:
            parts = [(key.text, key.span.start, value) for key, value in node.entries]
        stops = [start for _, start, _ in parts[1:]] + [stop]
        entries = [
            self.entry(name, start, value, _child(field, name), indent, end)
            for (name, start, value), end in zip(parts, stops, strict=True)
        ]
        lines: list[str] = []
        for entry in _ordered(entries, field, lambda entry: entry.name):
            lines += ["", *entry.lines] if entry.blank and lines else entry.lines
        return lines

    def entry(
        self, name: str, start: int, value: YamlNode, field: Field, indent: int, stop: int
    ) -> _Entry:
        """A key, or an item of a list, with its value and its comments."""
        pad = " " * indent
        head = f"{pad}{_word(name)}:" if name else f"{pad}-"
        entry = _Entry(name, self.blank_before(start), self.above(start, pad))
        flow = f"{head} {self.flow(value, field)}"
        if not isinstance(value, Mapping | NodeList) or self.fits(value, field, len(flow)):
            line = flow + self.comments.beside(value.span.end, stop)
            entry.lines += [*self.deeper(start, stop, pad), line]
        elif name:
            entry.lines.append(head + self.comments.beside(start, _start(value)))
            entry.lines += self.block(value, field, indent + 2, stop)
            entry.lines += self.deeper(start, stop, f"{pad}  ")
        else:
            above = self.above(_start(value), pad)
            first, *rest = self.block(value, field, indent + 2, stop)
            entry.lines += [*above, f"{head} {first.lstrip()}", *rest]
            dash = self.source.text.rfind("-", 0, start)
            entry.lines += self.deeper(dash, stop, f"{pad}  ")
        return entry

    def fits(self, value: Mapping | NodeList, field: Field, width: int) -> bool:
        """Whether a value is written on the line of its key, and not on lines below it."""
        if not (value.items if isinstance(value, NodeList) else value.entries):
            return True
        inside = self.comments.are_inside(value.span.start, value.span.end)
        return not inside and width <= WIDTH and field.form != "arms" and field.name != "metrics"

    def above(self, offset: int, pad: str) -> list[str]:
        """The comments before an offset that are not written yet, indented by `pad`."""
        return [pad + comment.text for comment in self.comments.before(offset)]

    def deeper(self, start: int, stop: int, pad: str) -> list[str]:
        """The next comments before `stop` that are indented more than what begins at `start`."""
        return [pad + comment.text for comment in self.comments.deeper(start, stop)]

    def blank_before(self, start: int) -> bool:
        """Whether the source has an empty line above an offset and the comments on top of it."""
        *before, line = self.source.text[:start].split("\n")
        if line.strip() not in ("", "-"):
            return False
        while before and before[-1].lstrip().startswith("#"):
            before.pop()
        return bool(before) and not before[-1].strip()

    def flow(self, value: YamlNode, field: Field) -> str:
        """A value on one line."""
        if isinstance(value, NodeList):
            return f"[{', '.join(self.flow(item, _child(field, '')) for item in value.items)}]"
        if isinstance(value, Mapping):
            entries = _ordered(list(value.entries), field, lambda entry: entry[0].text)
            parts = [
                f"{_word(key.text)}: {self.flow(item, _child(field, key.text))}"
                for key, item in entries
            ]
            return f"{{{', '.join(parts)}}}"
        assert isinstance(value, Scalar)
        return _scalar(value, field)


def _child(field: Field, name: str) -> Field:
    """The field of the value under a name in a mapping, or of an item in a list."""
    if field.form in ("arms", "items"):
        return Field("", "keys", "", fields=field.fields)
    if field.form in ("set", "places"):
        return Field("", "setting" if field.form == "set" else "name", "")
    return next(inner for inner in field.fields if inner.name == name)


def _ordered(entries: list[_T], field: Field, name: Callable[[_T], str]) -> list[_T]:
    """Keys of the table in its order; names that the author chose, and items, in theirs."""
    if field.form not in ("keys", "design"):
        return entries
    order = [inner.name for inner in field.fields]
    return sorted(entries, key=lambda entry: order.index(name(entry)))


def _start(value: Mapping | NodeList) -> int:
    """Where the first key or item begins."""
    return (value.items[0] if isinstance(value, NodeList) else value.entries[0][0]).span.start


def _scalar(value: Scalar, field: Field) -> str:
    """A value in its canonical form."""
    text = value.text
    if field.form == "duration":
        seconds = duration_value(text)
        return text if seconds is None else duration_text(seconds)
    share = percent_value(text)
    if share is not None:
        return percent_text(share)
    if field.form == "share":
        return percent_text(float(text))
    if field.form in ("number", "whole", "amount", "setting") and text not in ("true", "false"):
        return number_text(float(text))
    return text if field.form in ("truth", "choice", "design", "setting") else _word(text)


def _word(text: str) -> str:
    """A name, in quotes where YAML would read it as something else than this text."""
    return text if yaml.safe_load(text) == text else f'"{text}"'
