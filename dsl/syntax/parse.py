"""YAML nodes -> the sections of a policy, with every expression parsed.

Nothing is given a meaning here: names, types and ranges are the checker's business.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from kvpolicy.dsl.syntax.diagnostics import Diagnostic, listed
from kvpolicy.dsl.syntax.expression import NUMBERS, ExpressionError, number_of, parse_expression
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
from kvpolicy.dsl.syntax.sections import FILE, Key
from kvpolicy.dsl.syntax.source import Source, Span
from kvpolicy.dsl.syntax.tree import Expr
from kvpolicy.dsl.syntax.yaml_nodes import POLICY, Mapping, Scalar, Sequence, YamlNode, read_yaml

MAX_NAMES = 64

_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?(e[+-]?[0-9]{1,4})?")
NO_POLICY = "none"  # names full KV in requests
POLICY_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
NAME = re.compile(r"[a-z][a-z0-9_]*")


def parse(source: Source, report: Callable[[Diagnostic], None]) -> Block | None:
    """The sections of a policy file; None if it is no mapping. Defects of its form are reported."""
    root = read_yaml(source, report)
    if root is None:
        return None
    return _PolicyReader(report).file(root)


class _PolicyReader:
    def __init__(self, report: Callable[[Diagnostic], None]) -> None:
        self.emit = report
        self.names = 0

    def error(self, code: str, message: str, span: Span, help: str | None = None) -> None:
        self.emit(Diagnostic(code, message, span, help))

    def file(self, root: YamlNode) -> Block | None:
        mapping = mapping_of_kind(root, POLICY, self.emit)
        if mapping is None:
            return None
        return self.block(mapping, FILE, "", Span(root.span.start, root.span.start))

    def block(self, node: Mapping, keys: tuple[Key, ...], path: str, place: Span) -> Block:
        """A mapping with the given keys; `place` is where a missing key is reported."""
        return read_block(node, keys, path, place, self.value, self.emit)

    def value(self, node: YamlNode, key: Key, path: str, name: Span) -> Any:
        """The value of a key, read as the key's form says."""
        if key.form == "either":
            form = "keys" if isinstance(node, Mapping) else "expression"
        elif key.form == "same":
            if isinstance(node, Scalar) and node.text == "same":
                return "same"
            form = "keys"
        else:
            form = key.form
        if form == "keys":
            return self.keys(node, key, path, name)
        if form == "named":
            return self.named(node, key, path)
        if form in ("expressions", "choices", "values", "names"):
            return self.list(node, key, path, name)
        if not isinstance(node, Scalar):
            self.error("key", f"`{path}` takes {_TAKES[form]}, not a {kind_of(node)}", name)
            return None
        return getattr(self, form)(node, key, path)

    def keys(self, node: YamlNode, key: Key, path: str, name: Span) -> Block | None:
        if isinstance(node, Mapping):
            return self.block(node, key.keys, path, name)
        words = "`same` or a mapping" if key.form == "same" else "a mapping"
        keys = listed([k.name for k in key.keys], "and")
        self.error("key", f"`{path}` takes {words}", node.span, f"its keys are {keys}")
        return None

    def named(self, node: YamlNode, key: Key, path: str) -> Block | None:
        """Names that the author chose, each with a value."""
        if not isinstance(node, Mapping):
            help = "one name per line, as in `window: 32`"
            self.error("key", f"`{path}` takes names and values", node.span, help)
            return None
        block = Block(node.span)
        assert key.item is not None
        for name, value in node.entries:
            self.names += 1
            if self.names == MAX_NAMES + 1:
                message = f"the file defines more than {MAX_NAMES} names"
                self.error("size", message, name.span)
            if not NAME.fullmatch(name.text):
                help = "names are lower case letters, digits and `_`, and start with a letter"
                self.error("key", f"`{name.text}` is not a name", name.span, help)
                continue
            key_path = f"{path}.{name.text}"
            if key.item.name == "parameter" and not isinstance(value, Mapping):
                default = next(k for k in key.item.keys if k.name == "default")
                item_value: Any = self.value(value, default, key_path, name.span)
            else:
                item_value = self.value(value, key.item, key_path, name.span)
            block.items[name.text] = Item(key_path, name.span, value.span, item_value)
        return block

    def list(self, node: YamlNode, key: Key, path: str, name: Span) -> list[Item] | None:
        if not isinstance(node, Sequence):
            if key.form in ("expressions", "names") and isinstance(node, Scalar):
                help = f"write `{path}: [{node.text.strip()}]`"
            else:
                help = f"write `{path}: [...]`"
            self.error("key", f"`{path}` takes a list", node.span, help)
            return None
        readers = {
            "expressions": self.expression, "choices": self.choice, "values": self.literal,
            "names": self.listed_name,
        }  # fmt: skip
        items: list[Item] = []
        for item in node.items:
            if isinstance(item, Scalar):
                value = readers[key.form](item, key, path)
                once = key.form in ("choices", "names") and value is not None
                if once and value in [earlier.value for earlier in items]:
                    self.error("key", f"`{path}` lists `{value}` twice", item.span)
                    continue
                items.append(Item(path, name, item.span, value))
            else:
                self.error("key", f"`{path}` lists plain values", item.span)
        if key.form == "choices" and not node.items and not key.required:
            help = f"leave it out, or list {listed(key.choices)}"
            self.error("key", f"`{path}` lists nothing", node.span, help)
        return items

    def listed_name(self, node: Scalar, key: Key, path: str) -> str | None:
        if NAME.fullmatch(node.text):
            return node.text
        help = "a value that has no name gets one under `let`"
        self.error("key", f"`{path}` lists names, not {shown(node)}", visible(node), help)
        return None

    def text(self, node: Scalar, key: Key, path: str) -> str:
        return node.text

    def name(self, node: Scalar, key: Key, path: str) -> str | None:
        if node.text == NO_POLICY:
            help = "requests with this name are served with full KV; choose another one"
            self.error("key", f"`{NO_POLICY}` stands for no policy", node.span, help)
            return None
        if POLICY_NAME.fullmatch(node.text) and len(node.text) <= 64:
            return node.text
        help = "lower case letters and digits in groups joined by `-`, at most 64 characters"
        message = f"`{node.text}` is not a policy name" if node.text else "the policy has no name"
        self.error("key", message, visible(node), help)
        return None

    def version(self, node: Scalar, key: Key, path: str) -> int | None:
        if node.text == "1":
            return 1
        message = f"this program reads language 1, not {shown(node)}"
        self.error("key", message, visible(node))
        return None

    def truth(self, node: Scalar, key: Key, path: str) -> bool | None:
        if node.text in ("true", "false"):
            return node.text == "true"
        self.error("key", f"`{path}` is `true` or `false`, not {shown(node)}", visible(node))
        return None

    def choice(self, node: Scalar, key: Key, path: str) -> str | None:
        return read_choice(node, key.choices, path, self.emit)

    def number(self, node: Scalar, key: Key, path: str) -> Fraction | None:
        help = None
        if _NUMBER.fullmatch(node.text):
            value, help = number_of(node.text), NUMBERS
            if value is not None:
                return value
        self.error("key", f"`{path}` takes a number, not {shown(node)}", visible(node), help)
        return None

    def literal(self, node: Scalar, key: Key, path: str) -> Fraction | bool | None:
        if node.text in ("true", "false"):
            return node.text == "true"
        return self.number(node, key, path)

    def default(self, node: Scalar, key: Key, path: str) -> Any:
        if node.text in ("true", "false") or _NUMBER.fullmatch(node.text):
            return self.literal(node, key, path)
        if node.text.lower() in TRUTHS:
            value = TRUTHS[node.text.lower()]
            message = f"`{path}` is `{node.text}`; truth values are `true` and `false`"
            help = f"write `{'true' if value else 'false'}`"
            self.error("key", message, visible(node), help)
            return value
        return self.expression(node, key, path)

    def expression(self, node: Scalar, key: Key, path: str) -> Expr | None:
        if node.tagged:  # as `!recent(8) and c`, of which the text is `and c`
            return None
        if not node.text.strip():
            self.error("key", f"`{path}` has no value", visible(node))
            return None
        try:
            return parse_expression(node.text, node.place)
        except ExpressionError as error:
            span = Span(node.place(error.start), node.place(max(error.end - 1, error.start)) + 1)
            help = error.help
            if error.unbalanced and node.flow and node.style is None:  # YAML cuts at `,`
                help = "an expression with `[` or `,` inside `{}` or `[]` must stand in quotes"
            self.error(error.code, error.message, span, help)
            return None


_TAKES = {
    "expression": "an expression",
    "text": "text",
    "name": "a name",
    "version": "a number",
    "number": "a number",
    "truth": "`true` or `false`",
    "default": "a number, `true`, `false` or an expression",
    "choice": "a word",
}
