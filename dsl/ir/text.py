"""The printed form of a program: one line per value, stable, used by the digest and `show`.

    %3 = attn["recent"](%2) : number[head, query, token]? @LAYER

Spans, the order of writing and names of lets do not appear, except lets of the prefill that decode
reads: two files that mean the same print the same, up to their parameters' names, defaults and
ranges.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from kvpolicy.dsl.ir.nodes import Data, Merge, Node, Param, Program, Propagate, Rules, Share, State
from kvpolicy.dsl.ir.traverse import Sections

_SKIPPED = ("span", "about", "lets")
_DECIDE_NOTHING = ("name", "about", "source", "file", "report", "delivered")


def print_program(program: Program | Sections) -> str:
    """The program, or its sections, but what decides nothing, or is no part of the file."""
    printer = _Printer()
    ends = [f"policy {program.name}"] if isinstance(program, Program) else []
    for field in fields(program):
        if field.name not in _DECIDE_NOTHING:
            ends.extend(printer.section(field.name, getattr(program, field.name)))
    return "\n".join([*printer.lines, *ends]) + "\n"


class _Printer:
    """Numbers nodes in the order in which they are first needed."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._known: dict[Node, str] = {}
        self._by_text: dict[str, str] = {}

    def reference(self, node: Node) -> str:
        """The number of a node, printing it and what it needs first; equal nodes share one."""
        for part in node.walk():
            if part in self._known:
                continue
            text = self._text(part)
            if text not in self._by_text:
                self._by_text[text] = f"%{len(self.lines)}"
                self.lines.append(f"%{len(self.lines)} = {text}")
            self._known[part] = self._by_text[text]
        return self._known[node]

    def _text(self, node: Node) -> str:
        value = "" if node.value is None else f'["{node.value}"]'
        axes = f"[{', '.join(node.axes)}]" if node.axes else ""
        names = [self._known[argument] for argument in node.args]
        if node.op == "then":
            # A name on the right of `then` is computed on all candidates, an expression is not.
            named = [argument.name is not None for argument in node.args]
            names = [f"({n})" if plain else n for n, plain in zip(names, named, strict=True)]
        arguments = ", ".join(names)
        return f"{node.op}{value}{axes}({arguments}) : {node.type} @{node.when.name}"

    def section(self, name: str, value: object) -> list[str]:
        """Lines of one field of the program, nested fields below dotted names."""
        if value is None or value in ((), {}):
            return []
        if isinstance(value, Node):
            return [f"{name} = {self.reference(value)}"]
        parts = _parts(value)
        if parts is None:
            return [f"{name} = {value}"]
        return [line for key, part in parts for line in self.section(f"{name}.{key}", part)]


def _parts(value: object) -> Iterable[tuple[object, object]] | None:
    """The parts of a field with their names or indices; None: it is a single value."""
    if isinstance(value, dict):
        return sorted(value.items())
    if isinstance(value, tuple) and any(isinstance(item, Node) for item in value):
        return enumerate(value)
    if isinstance(value, Propagate):  # under the keys of the language
        names = ["tokens", "first", "every", "budget", "restart"]
    elif isinstance(value, Rules | Param | Data | State | Merge | Share):
        names = [field.name for field in fields(value) if field.name not in _SKIPPED]
    else:
        return None
    return [(name, getattr(value, name)) for name in names]
