"""Mappings of known keys, which YAML nodes of policies and experiments become."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvpolicy.dsl.syntax.diagnostics import (
    MAX_SHOWN,
    Diagnostic,
    closest,
    did_you_mean,
    listed,
    on_one_line,
)
from kvpolicy.dsl.syntax.source import Span
from kvpolicy.dsl.syntax.yaml_nodes import FileKind, Mapping, Scalar, YamlNode

# What other languages, and YAML, write for truth values.
TRUTHS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}

Report = Callable[[Diagnostic], None]


@dataclass(frozen=True)
class KnownKey:
    """A key that a mapping may have; `form` says what its value may be."""

    name: str
    form: str
    meaning: str
    required: bool = False


K = TypeVar("K", bound=KnownKey)


@dataclass
class Item:
    """A key with its value. `value` depends on the key's form; None if it is unusable.

    A mapping is a `Block`, a list a list of `Item`.
    """

    path: str  # `budget`, `propagate.first`, ...
    key: Span
    span: Span
    value: Any


@dataclass
class Block:
    """The keys of a mapping, in the order of writing."""

    span: Span
    items: dict[str, Item] = field(default_factory=dict)

    def get(self, name: str) -> Any:
        """The usable value under a key, or None."""
        item = self.items.get(name)
        return item.value if item else None

    def __contains__(self, name: str) -> bool:
        return name in self.items


def mapping_of_kind(root: YamlNode, kind: FileKind, report: Report) -> Mapping | None:
    """The root of a file, if it is a mapping of that kind; else None, after a report."""
    if not isinstance(root, Mapping):
        span = Span(root.span.start, min(root.span.end, root.span.start + 1))
        report(Diagnostic("yaml", f"{kind.one} is a mapping", span, f"start with `{kind.begins}`"))
        return None
    spans = {name.text: name.span for name, _ in root.entries}
    other_key = next((key for key in kind.others if key in spans), None)
    if kind.own in spans or other_key is None:
        return root
    message, help = kind.others[other_key]
    report(Diagnostic("key", message, spans[other_key], help))
    return None


def read_block(
    node: Mapping,
    keys: Sequence[K],
    path: str,
    place: Span,
    value: Callable[[YamlNode, K, str, Span], Any],
    report: Report,
) -> Block:
    """A mapping with the given keys.

    Args:
        path: path of the mapping; empty for the file.
        place: where a missing key is reported.
        value: (node, its key, its path, the key's span) -> value that the node stands for.
    """
    block = Block(place)
    key_of = {key.name: key for key in keys}
    misspelt: set[str | None] = set()  # keys that unknown ones probably mean
    for name, entry in node.entries:
        key = key_of.get(name.text)
        if key is None:
            location = f" in `{path}`" if path else ""
            misspelt.add(closest(name.text, key_of))
            help = did_you_mean(name.text, key_of) or f"the keys here are {listed(key_of, 'and')}"
            report(Diagnostic("key", f"unknown key `{name.text}`{location}", name.span, help))
            continue
        key_path = f"{path}.{name.text}" if path else name.text
        item_value = value(entry, key, key_path, name.span)
        block.items[name.text] = Item(key_path, name.span, entry.span, item_value)
    for key in keys:
        if key.required and key.name not in block and key.name not in misspelt:
            location = f"`{path}`" if path else "the file"
            message = f"{location} needs the key `{key.name}`"
            help = f"add `{key.name}: {'1' if key.form == 'version' else '...'}`, {key.meaning}"
            report(Diagnostic("key", message, place, help))
    return block


def read_choice(node: Scalar, choices: Sequence[str], path: str, report: Report) -> str | None:
    """The text of a scalar if it is one of `choices`; else None, after a report."""
    if node.text in choices:
        return node.text
    message = f"`{path}` takes {listed(choices)}, not {shown(node)}"
    report(Diagnostic("key", message, visible(node), did_you_mean(node.text, choices)))
    return None


def kind_of(node: YamlNode) -> str:
    """What a node that is no scalar is, for a message."""
    return "mapping" if isinstance(node, Mapping) else "list"


def shown(node: Scalar) -> str:
    """A scalar's text, shortened, for a message; in its quotes, which make it text."""
    if not node.text.strip():
        return "nothing"
    text = on_one_line(node.text, MAX_SHOWN)
    return f'the text `"{text}"`' if node.style == '"' else f"`{text}`"


def visible(node: Scalar) -> Span:
    """A scalar's span, or that of the character before it if it is empty."""
    span = node.span
    return span if span.end > span.start else Span(max(0, span.start - 1), max(1, span.start))
