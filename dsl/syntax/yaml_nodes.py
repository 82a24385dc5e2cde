"""A policy file, or another of this project, as YAML nodes that know their places.

YAML is read by its events, not by a loader, so that scalars stay text until the language types
them (`on`, `1e-3` and `12:30` mean what their key says) and what such files do not need is
refused: tags, anchors, aliases, merge keys, duplicate keys, folded scalars, several documents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import yaml
from kvpolicy.dsl.syntax.diagnostics import Diagnostic
from kvpolicy.dsl.syntax.source import Source, Span

MAX_BYTES = 64 * 1024
MAX_DEPTH = 12


@dataclass(frozen=True)
class FileKind:
    """Words of messages for a kind of file: one, several, and how one begins.

    A file that lacks the key `own` and has a key of `others` is of another kind: what it is, and
    what to do with it.
    """

    one: str
    several: str
    begins: str
    own: str
    others: dict[str, tuple[str, str]]


POLICY = FileKind(
    "a policy file",
    "policies",
    "policy: my-name",
    "language",
    {
        "tests": (
            "this file has the tests of a policy, and is none itself",
            "name the policy's own file; `kvpolicy test NAME.yaml` reads NAME.test.yaml",
        ),
        "experiment": (
            "this file is an experiment, not a policy",
            "give it as `--kv-experiment FILE`, and the policies of its arms as `--kv-policy`",
        ),
    },
)


@dataclass(frozen=True, eq=False)
class YamlNode:
    """A YAML value and its place in the file."""

    span: Span


@dataclass(frozen=True, eq=False)
class Scalar(YamlNode):
    """Text. `style`: None if plain, else the quote or `|`; `flow`: whether inside `{}` or `[]`.

    `tagged`: whether a tag was refused before the text.
    """

    text: str
    style: str | None
    flow: bool
    source: Source
    tagged: bool = False

    @cached_property
    def offsets(self) -> list[int]:
        """Offset in the file of every character of the text, and of its end."""
        raw, position, end = self.source.text, self.span.start, self.span.end
        if self.style == "|":
            position = raw.index("\n", position, end) if "\n" in raw[position:end] else end
        elif self.style:
            position, end = position + 1, end - 1
        offsets = []
        for character in self.text:
            if not character.isspace():
                while position < end and raw[position] != character and raw[position] in " \t\n":
                    position += 1
            offsets.append(min(position, end))
            position += self._written_length(raw, position)
        offsets.append(max(min(position, end), offsets[-1] if offsets else position))
        return offsets

    def _written_length(self, raw: str, position: int) -> int:
        """Characters of the file that stand for one character of the text."""
        if self.style == "'" and raw.startswith("''", position):
            return 2
        if self.style == '"' and raw.startswith("\\", position):
            return {"x": 4, "u": 6, "U": 10}.get(raw[position + 1 : position + 2], 2)
        return 1

    def place(self, offset: int) -> int:
        """Offset in the file of a character of the text."""
        return self.offsets[min(offset, len(self.offsets) - 1)]


@dataclass(frozen=True, eq=False)
class Mapping(YamlNode):
    """Keys and values in the order of writing; every key is a scalar and occurs once."""

    entries: tuple[tuple[Scalar, YamlNode], ...]


@dataclass(frozen=True, eq=False)
class Sequence(YamlNode):
    """A list."""

    items: tuple[YamlNode, ...]


def read_yaml(
    source: Source, report: Callable[[Diagnostic], None], kind: FileKind = POLICY
) -> YamlNode | None:
    """The root of the file's one document; None if nothing can be read. Reports defects."""
    size = len(source.text.encode("utf-8", "surrogatepass"))
    if size > MAX_BYTES:
        message = f"the file has {size:,} bytes; {MAX_BYTES:,} are allowed"
        report(Diagnostic("size", message, Span(0, 0)))
        return None
    composer = _Composer(source, report, kind)
    try:
        return composer.document(iter(yaml.parse(source.text, Loader=yaml.SafeLoader)))
    except yaml.YAMLError as error:
        from kvpolicy.dsl.syntax.yaml_problems import yaml_diagnostic  # only needed here

        report(yaml_diagnostic(error, source))
    except (ValueError, OverflowError):  # PyYAML converts escapes such as \UFFFFFFFF unchecked
        report(Diagnostic("yaml", "a quoted text has an impossible escape", Span(0, 0)))
    except RecursionError:
        report(Diagnostic("yaml", "the file is nested too deeply", Span(0, 0)))
    return None


# A mapping or sequence that has begun, and its nodes so far.
_Open = tuple[yaml.CollectionStartEvent, list["YamlNode | None"]]


class _Composer:
    """Builds nodes from events, without recursion."""

    def __init__(
        self, source: Source, report: Callable[[Diagnostic], None], kind: FileKind
    ) -> None:
        self.source = source
        self.report = report
        self.kind = kind
        self.flow = 0

    def refuse(self, message: str, place: yaml.Event | Span, help: str | None = None) -> None:
        span = place if isinstance(place, Span) else _span(place, place)
        self.report(Diagnostic("yaml", message, span, help))

    def document(self, events: Iterator[yaml.Event]) -> YamlNode | None:
        """The root node of the first document."""
        root: YamlNode | None = None
        documents = 0
        stack: list[_Open] = []
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    self.refuse(f"{self.kind.one} is one YAML document", event)
                    return root
                if event.version or event.tags:
                    self.refuse(f"YAML directives are not used in {self.kind.several}", event)
            elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
                self.properties(event)
                self.flow += bool(event.flow_style)
                stack.append((event, []))
                if len(stack) > MAX_DEPTH:
                    self.refuse("the file is nested too deeply", event)
                    return None
            elif isinstance(event, yaml.NodeEvent | yaml.CollectionEndEvent):
                node = self.finished(event, stack)
                if stack:
                    stack[-1][1].append(node)
                else:
                    root = node
        if root is None or (isinstance(root, Scalar) and not root.text):
            self.refuse("the file is empty", Span(0, 0), f"start with `{self.kind.begins}`")
            return None
        return root

    def finished(self, event: yaml.Event, stack: list[_Open]) -> YamlNode | None:
        """The node that an event completes; None for what was refused."""
        if isinstance(event, yaml.AliasEvent):
            self.refuse(
                f"aliases are not used in {self.kind.several}", event, "write the value out"
            )
            return None
        if isinstance(event, yaml.ScalarEvent):
            return self.scalar(event)
        start, children = stack.pop()
        self.flow -= bool(start.flow_style)
        span = _span(start, event)
        if isinstance(event, yaml.SequenceEndEvent):
            return Sequence(span, tuple(c for c in children if c is not None))
        return Mapping(span, tuple(self.entries(children)))

    def entries(self, children: list[YamlNode | None]) -> Iterator[tuple[Scalar, YamlNode]]:
        seen: dict[str, Scalar] = {}
        for key, value in zip(children[::2], children[1::2], strict=True):
            if not isinstance(key, Scalar):
                if key is not None:
                    self.refuse("a key must be a name", key.span)
                continue
            if not key.text:
                self.refuse("a key has no name", key.span)
            elif key.text == "<<" and key.style is None:
                message = f"merge keys are not used in {self.kind.several}"
                self.refuse(message, key.span, "write the keys out")
            elif key.text in seen:
                line, _ = self.source.place(seen[key.text].span.start)
                self.refuse(f"key `{key.text}` appears twice (first on line {line})", key.span)
            else:
                seen[key.text] = key
                if value is not None:
                    yield key, value

    def scalar(self, event: yaml.ScalarEvent) -> Scalar:
        self.properties(event)
        span = _span(event, event)
        if event.style == ">":
            message = f"folded text (`>`) is not used in {self.kind.several}"
            indicator = Span(span.start, span.start + 1)
            self.refuse(message, indicator, "use `|`, quotes, or one line")
        if event.style in ("|", ">"):
            block_text = self.source.text[span.start : span.end].rstrip()
            span = Span(span.start, span.start + len(block_text))
        style = event.style or None
        tagged = event.tag is not None
        return Scalar(span, event.value, style, self.flow > 0, self.source, tagged)

    def properties(self, event: yaml.ScalarEvent | yaml.CollectionStartEvent) -> None:
        if event.anchor is not None:
            self.refuse(
                f"anchors are not used in {self.kind.several}", event, "write the value out"
            )
        if event.tag is not None:
            help = "the language types values by their key; `!` is written `not`"
            self.refuse(f"tags are not used in {self.kind.several}", event, help)


def _span(first: yaml.Event, last: yaml.Event) -> Span:
    """From the beginning of `first` to the end of `last`; the file's top if YAML has no place."""
    start, end = first.start_mark, last.end_mark
    return Span(0, 0) if start is None or end is None else Span(start.index, end.index)
