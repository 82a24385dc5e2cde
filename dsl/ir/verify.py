"""Checks that a program is well-formed, before it is bound.

The checker never makes a program that fails here. A failure is a defect of kvpolicy, which must
show before anything is executed, and not as a wrong selection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from fractions import Fraction

from kvpolicy.dsl.ir.graph import in_order
from kvpolicy.dsl.ir.nodes import AXES, Node, Program
from kvpolicy.dsl.ops.operations import Kind
from kvpolicy.dsl.ops.table import OPERATIONS


class MalformedProgram(Exception):
    """A program that no checked file can give."""


def verify(program: Program) -> None:
    """Checks every node of a program and the types of its sections.

    Raises:
        MalformedProgram: with the operation and what is wrong with it.
    """
    seen: set[Node] = set()
    for root in _roots(program):
        for node in root.walk(seen):
            try:
                _verify_node(node, program)
            except MalformedProgram as error:
                raise MalformedProgram(f"`{node.op}` in `{program.name}`: {error}") from None
    for name, value, kind, axes in _sections(program):
        if value is not None and (value.type.kind != kind or set(value.type.axes) - axes):
            raise MalformedProgram(f"`{name}` of `{program.name}` is {value.type}")


def _sections(program: Program) -> Iterator[tuple[str, Node | None, str, set[str]]]:
    """Each section's name, value, kind and the axes that it may have."""
    for rules in (program.prefill, program.decode):
        if rules is None:
            continue
        yield "score", rules.score, "number", {"kv", "token"}
        yield "budget", rules.budget, "number", {"kv"}
        yield "keep", rules.keep, "truth", {"kv", "token"}
        yield "when", rules.when, "truth", set()
        if rules.merge is not None:
            axes = {"into": {"kv", "token", "dropped"}, "divide": {"kv", "token"}}
            for name, node in rules.merge.parts.items():
                kind = "truth" if name in ("into", "accept") else "number"
                yield f"merge.{name}", node, kind, axes.get(name, {"kv", "dropped"})
    for name, node in program.prefill.decided.items():
        yield f"let.{name}", node, node.type.kind, {"kv", "group", "dim"}
    if program.propagate is not None:
        yield "propagate.tokens", program.propagate.tokens, "truth", {"token"}
        moment = "every" if program.propagate.repeats else "first"
        yield f"propagate.{moment}", program.propagate.moment, "truth", set()
        yield "propagate.budget", program.propagate.budget, "number", set()
    if program.share is not None:
        yield "share.when", program.share.when, "truth", set()
        yield "share.direction", program.share.direction, "number", {"kv", "token", "dim"}
        yield "share.except", program.share.exceptions, "truth", {"kv", "token"}


def _roots(value: object) -> Iterator[Node]:
    """Every node in a field of the program, at any depth."""
    if isinstance(value, Node):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _roots(item)
    elif isinstance(value, tuple):
        for item in value:
            yield from _roots(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _roots(getattr(value, field.name))


def _expect(holds: bool, message: str) -> None:
    if not holds:
        raise MalformedProgram(message)


def _verify_node(node: Node, program: Program) -> None:
    row = OPERATIONS.get(node.op)
    if row is None or row.made_by_lowering:
        raise MalformedProgram("there is no such operation")
    number = len(node.args)
    _expect(row.least <= number, f"has {number} arguments")
    _expect(row.most is None or number <= row.most, f"has {number} arguments")
    _verify_type(node)
    _verify_axes(node)
    _expect(_VALUES[row.value](node, program), f"has the value {node.value!r}")


def _verify_type(node: Node) -> None:
    kind, args, row = node.type.kind, node.args, node.operation
    _expect(kind in ("number", "truth"), f"is a {kind}")
    _expect(row.result != "number" or kind == "number", "must be a number")
    _expect(row.result != "truth" or kind == "truth", "must be a truth value")
    if row.kind is Kind.BRANCH:
        _expect(args[1].type.kind == "truth", "needs a condition")
        _expect(all(arg.type.kind == kind for arg in args[::2]), "chooses between unlike kinds")
    elif row.takes is not None:
        words = {"number": "numbers", "truth": "truth values"}[row.takes]
        _expect(all(arg.type.kind == row.takes for arg in args), f"takes {words}")
    if row.kind is not Kind.LOOK:
        _expect(all(arg.when <= node.when for arg in args), "is known before its arguments")


def _verify_axes(node: Node) -> None:
    over, axes, row = node.axes, node.type.axes, node.operation
    _expect(axes == in_order(axes), f"has the axes {axes} out of order")
    _expect(bool(over) == row.names_axes, f"is over {over}")
    _expect(len(set(over)) == len(over), "names an axis twice")
    _expect(all(axis in (*AXES, "layer") for axis in over), f"is over {over}")
    arg_axes = {axis for arg in node.args for axis in arg.type.axes}
    _expect(row.result_axes in (None, axes), f"has the axes {axes}")
    if row.elementwise or node.op == "then":
        _expect(set(axes) == arg_axes, f"has the axes {axes} of arguments with {sorted(arg_axes)}")
    if over:
        read_axes = set(node.args[0].type.axes)
        _expect(set(over) - {"layer"} <= read_axes, f"is over {over}, which its argument lacks")
    if row.is_reduction:
        _expect(
            set(axes) == arg_axes - set(over), f"has the axes {axes} left of {sorted(arg_axes)}"
        )


_VALUES: dict[str | None, Callable[[Node, Program], bool]] = {
    None: lambda node, program: node.value is None,
    "number": lambda node, program: isinstance(node.value, Fraction),
    "truth": lambda node, program: isinstance(node.value, bool),
    "name": lambda node, program: node.value in {name.value for name in node.operation.names},
    "parameter": lambda node, program: node.value in program.params,
    "tensor": lambda node, program: node.value in program.data,
    "state": lambda node, program: isinstance(node.value, str),
    "let": lambda node, program: node.value in program.prefill.decided,
    "rules": lambda node, program: (
        node.value is None or (node.value == "propagate" and program.propagate is not None)
    ),
    "queries": lambda node, program: (
        node.value in ("recent", "all", "new") and (node.value == "recent") == bool(node.args)
    ),
}
