"""Reads the values of an experiment file from its YAML nodes, each with the type of its key.

`reading.py` checks what values mean together.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from kvpolicy.dsl.syntax.diagnostics import Diagnostic, did_you_mean, listed
from kvpolicy.dsl.syntax.mappings import (
    TRUTHS,
    Block,
    Item,
    kind_of,
    mapping_of_kind,
    read_block,
    read_choice,
    shown,
    visible,
)
from kvpolicy.dsl.syntax.source import Source, Span
from kvpolicy.dsl.syntax.yaml_nodes import Mapping, Scalar, YamlNode, read_yaml
from kvpolicy.dsl.syntax.yaml_nodes import Sequence as NodeList
from kvpolicy.experiments.definition.experiment import KeySource
from kvpolicy.experiments.definition.form import (
    EXPERIMENT,
    FILE,
    MAX_ARMS,
    MAX_ITEMS,
    MAX_NAME,
    NAME,
    PARAMETER,
    PLACE,
    Field,
)
from kvpolicy.experiments.definition.quantities import (
    duration_text,
    duration_value,
    number_text,
    percent_text,
    percent_value,
)

_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]{1,3})?")


def parse(source: Source, report: Callable[[Diagnostic], None]) -> Block | None:
    """The values of an experiment file; None if it is no mapping. Reports each defect of form."""
    root = nodes(source, report)
    if root is None:
        return None
    mapping = mapping_of_kind(root, EXPERIMENT, report)
    if mapping is None:
        return None
    return _ExperimentReader(report).block(
        mapping, FILE, "", Span(root.span.start, root.span.start)
    )


def nodes(source: Source, report: Callable[[Diagnostic], None]) -> YamlNode | None:
    """The root node of the file, which is YAML or JSON; None after a syntax error."""
    if source.text.lstrip().startswith("{"):
        # JSON may be indented by tabs, YAML not. No string holds one: JSON writes it as \t.
        source = Source(source.name, source.text.replace("\t", " "))
    return read_yaml(source, report, EXPERIMENT)


class _ExperimentReader:
    def __init__(self, report: Callable[[Diagnostic], None]) -> None:
        self.emit = report

    def error(self, code: str, message: str, span: Span, help: str | None = None) -> None:
        self.emit(Diagnostic(code, message, span, help))

    def block(self, node: Mapping, fields: Sequence[Field], path: str, place: Span) -> Block:
        """A mapping with the given keys; `place` is where a missing key is reported."""
        return read_block(node, fields, path, place, self.under, self.emit)

    def under(self, node: YamlNode, field: Field, path: str, _: Span) -> Any:
        """The value under a key; problems are reported where the value begins."""
        return self.value(node, field, path)

    def value(self, node: YamlNode, field: Field, path: str) -> Any:
        """The value under a key, read as its form says; None after a problem."""
        if field.form == "keys":
            return self.keys(node, field, path)
        if field.form == "design":
            return self.design(node, field, path)
        if field.form in ("arms", "set"):
            return self.named(node, field, path)
        if field.form in ("items", "places"):
            return self.list(node, field, path)
        if not isinstance(node, Scalar):
            message = f"`{path}` takes {_takes(field)}, not a {kind_of(node)}"
            self.error("key", message, _first(node))
            return None
        return getattr(self, field.form)(node, field, path)

    def keys(self, node: YamlNode, field: Field, path: str) -> Block | None:
        if isinstance(node, Mapping):
            return self.block(node, field.fields, path, _first(node))
        keys = listed([f.name for f in field.fields], "and")
        self.error("key", f"`{path}` takes a mapping", _first(node), f"its keys are {keys}")
        return None

    def design(self, node: YamlNode, field: Field, path: str) -> Block | str | None:
        if isinstance(node, Mapping):
            return self.block(node, field.fields, path, _first(node))
        if isinstance(node, Scalar) and node.text == "request":
            return "request"
        value = shown(node) if isinstance(node, Scalar) else "a list"
        help = "write `design: request` or `design: {switchback: {window: 10m, burn_in: 1m}}`"
        self.error("key", f"`{path}` takes `request` or a mapping, not {value}", _first(node), help)
        return None

    def named(self, node: YamlNode, field: Field, path: str) -> Block | None:
        """Names that the author chooses, each with a value: `arms` or `set`."""
        arms = field.form == "arms"
        if not isinstance(node, Mapping):
            help = "as in `control: {policy: none, weight: 1}`" if arms else "as in `rate: 0.25`"
            self.error("key", f"`{path}` takes names and values", _first(node), help)
            return None
        block = Block(_first(node))
        for name, value in node.entries[: MAX_ARMS if arms else MAX_ITEMS]:
            below = f"{path}.{name.text}"
            read: Any
            if arms:
                self.name(name, field, path)
                read = self.keys(value, field, below)
            else:
                if not re.fullmatch(PARAMETER, name.text):
                    help = "a small letter, then small letters, digits and `_`"
                    self.error("key", f"`{name.text}` is no parameter's name", name.span, help)
                read = self.setting(value, below)
            block.items[name.text] = Item(below, name.span, value.span, read)
        self.number_of(len(node.entries), MAX_ARMS if arms else MAX_ITEMS, path, node)
        return block

    def list(self, node: YamlNode, field: Field, path: str) -> Any:
        """A list of mappings, or of targeting keys."""
        if not isinstance(node, NodeList):
            help = {
                "targeting_key": "as in `targeting_key: [header:x-user, rid]`",
                "metrics": "as in `- {metric: error_rate, role: guardrail, margin: 0.005}`",
            }.get(field.name, "as in `steps: [{coverage: 1 %}, {pause: 30m}]`")
            self.error("key", f"`{path}` takes a list", _first(node), help)
            return None
        read = []
        for item in node.items[:MAX_ITEMS]:
            value: Any = None
            if field.form == "items":
                value = self.keys(item, field, path)
            elif isinstance(item, Scalar):
                value = self.place(item)
            else:
                self.error("key", f"`{path}` lists words", _first(item))
            read.append(Item(path, item.span, item.span, value))
        self.number_of(len(node.items), MAX_ITEMS, path, node)
        return read

    def number_of(self, number: int, most: int, path: str, node: YamlNode) -> None:
        if number > most:
            message = f"`{path}` has {number} entries; {most} are allowed"
            self.error("range", message, _first(node))

    def place(self, node: Scalar) -> KeySource | None:
        """One place of the targeting key."""
        kind, _, name = node.text.partition(":")
        if re.fullmatch(PLACE, node.text):
            return KeySource(kind, name.lower() if kind == "header" else name)
        kinds = ("header:NAME", "body:FIELD", "session_id", "rid")
        help = f"write {listed(kinds)}"
        if kind in ("session_id", "rid"):
            help = f"write `{kind}` alone"
        elif not name:
            help = did_you_mean(node.text, ("session_id", "rid")) or help
        self.error("key", f"{shown(node)} is no place of a key", visible(node), help)
        return None

    def name(self, node: Scalar, field: Field, path: str) -> str | None:
        if re.fullmatch(NAME, node.text) and len(node.text) <= MAX_NAME:
            return node.text
        help = f"letters, digits, `@`, `.`, `_` and `-`, at most {MAX_NAME} of them"
        self.error("key", f"{shown(node)} is not a name for `{path}`", visible(node), help)
        return None

    policy = name

    def truth(self, node: Scalar, field: Field, path: str) -> bool | None:
        if node.text in ("true", "false") and node.style is None:
            return node.text == "true"
        message = f"`{path}` is `true` or `false`, not {shown(node)}"
        value = TRUTHS.get(node.text.lower())
        help = None if value is None else f"write `{str(value).lower()}`"
        self.error("key", message, visible(node), help)
        return None

    def choice(self, node: Scalar, field: Field, path: str) -> str | None:
        return read_choice(node, field.choices, path, self.emit)

    def number(self, node: Scalar, field: Field, path: str) -> float | None:
        value = _number(node)
        if value is None:
            self.error("key", f"`{path}` takes a number, not {shown(node)}", visible(node))
            return None
        return self.bounded(value, field, path, node, number_text)

    def whole(self, node: Scalar, field: Field, path: str) -> int | None:
        value = _number(node)
        if value is None or not value.is_integer():
            message = f"`{path}` takes a whole number, not {shown(node)}"
            self.error("key", message, visible(node))
            return None
        bounded = self.bounded(value, field, path, node, number_text)
        return None if bounded is None else int(bounded)

    def amount(self, node: Scalar, field: Field, path: str) -> float | None:
        """A number or percent; `reading.py` checks whether the metric takes percent."""
        value = percent_value(node.text)
        if value is None:
            return self.number(node, field, path)
        return self.bounded(value, field, path, node, percent_text)

    def share(self, node: Scalar, field: Field, path: str) -> float | None:
        value = percent_value(node.text)
        if value is not None:
            return self.bounded(value, field, path, node, percent_text)
        value = _number(node)
        if value is None:
            message = f"`{path}` takes a share, not {shown(node)}"
            self.error("key", message, visible(node), "write it as in `10 %` or `0.1`")
            return None
        if value == 1:
            help = "write `100 %` or `1 %`"
            message = f"`{path}` is 1, which may be read as 1 % or as everything"
            self.error("range", message, node.span, help)
            return None
        if value > 1:
            help = f"write `{number_text(value)} %`" if value <= 100 else "write it as in `10 %`"
            message = f"`{path}` is {node.text}; a share is at most 100 %"
            self.error("range", message, node.span, help)
            return None
        return self.bounded(value, field, path, node, percent_text)

    def duration(self, node: Scalar, field: Field, path: str) -> float | None:
        value = duration_value(node.text)
        if value is not None:
            return self.bounded(value, field, path, node, duration_text)
        help = "a number and one of `s`, `m`, `h` and `d`, as in `30m`"
        if _NUMBER.fullmatch(node.text):
            help = f"it needs a unit: `{node.text}s`, `{node.text}m`, `{node.text}h`"
        self.error("key", f"`{path}` takes a time, not {shown(node)}", visible(node), help)
        return None

    def setting(self, node: YamlNode, path: str) -> float | bool | None:
        """A parameter's value."""
        if isinstance(node, Scalar):
            value = _number(node)
            if value is not None:
                return int(value) if value.is_integer() and abs(value) < 2**53 else value
            if node.text in ("true", "false") and node.style is None:
                return node.text == "true"
        written = shown(node) if isinstance(node, Scalar) else f"a {kind_of(node)}"
        message = f"`{path}` takes a number, `true` or `false`, not {written}"
        self.error("key", message, _first(node))
        return None

    def bounded(
        self, value: float, field: Field, path: str, node: Scalar, written: Callable[[float], str]
    ) -> float | None:
        """The value if it is within the bounds of its key, else None."""
        for bound, holds, word in (
            (field.least, lambda b: value >= b, "at least"),
            (field.above, lambda b: value > b, "above"),
            (field.most, lambda b: value <= b, "at most"),
            (field.below, lambda b: value < b, "below"),
        ):
            if bound is not None and not holds(bound):
                message = f"`{path}` is {node.text}; it must be {word} {written(float(bound))}"
                self.error("range", message, visible(node))
                return None
        return value


_TAKES = {
    "name": "a name",
    "policy": "the name of a policy",
    "truth": "`true` or `false`",
    "number": "a number",
    "whole": "a whole number",
    "amount": "a number",
    "share": "a share",
    "duration": "a time",
    "choice": "a word",
}


def _takes(field: Field) -> str:
    return _TAKES[field.form]


def _number(node: Scalar) -> float | None:
    """The number that a scalar without quotes holds; None for other text."""
    if node.style is not None or not _NUMBER.fullmatch(node.text):
        return None
    value = float(node.text)
    return value if math.isfinite(value) else None


def _first(node: YamlNode) -> Span:
    """Span of a node's text, or of its first character if it is a mapping or a list."""
    if isinstance(node, Scalar):
        return visible(node)
    return Span(node.span.start, node.span.start + 1)
