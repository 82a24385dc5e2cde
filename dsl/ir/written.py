"""Nodes as expressions of the language, for comments and messages."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from kvpolicy.dsl.ir.nodes import Node, brackets
from kvpolicy.dsl.ir.ranges import shown
from kvpolicy.dsl.ops.operations import Kind
from kvpolicy.dsl.ops.table import OPERATIONS

# Names that authors write for operations of two numbers.
_PAIRS = {row.of_two: row.name for row in OPERATIONS.values() if row.of_two is not None}


def written(
    node: Node, *, named: bool = False, number: Callable[[Fraction | bool], str] = shown
) -> str:
    """The expression of a node, on one line; inner nodes that have a name are written as it.

    Args:
        node: of a checked, bound or lowered policy.
        named: whether the node itself is written as its name too, if it has one.
        number: writes a literal, but for numbers of tokens.
    """
    if named and node.name is not None:
        return node.name
    row = node.operation
    number = shown if row.is_window or node.takes_an_end else number
    args = [written(arg, named=True, number=number) for arg in node.args]
    if row.kind is Kind.LITERAL:
        return number(node.literal)
    if row.is_window:
        return f"{node.op}({f'recent({args[0]})' if args else node.value})"
    if node.takes_an_end:
        count = node.args[1]  # floored by lowering
        count_text = written(count.args[0], named=True) if count.op == "floor" else args[1]
        return f"{node.origin}({count_text})"
    if not args:
        return str(node.value) if node.value is not None else node.op
    if row.sign is not None:
        unary = f"{row.sign}{' ' if row.sign.isalpha() else ''}{args[0]}"
        return unary if len(args) == 1 else f"({args[0]} {row.sign} {args[1]})"
    if row.kind is Kind.BRANCH:
        else_text = f" else {args[2]}" if node.op == "choose" else ""
        return f"({args[0]} where {args[1]}{else_text})"
    if node.op == "then":
        return f"({' then '.join(args)})"
    arguments = ", ".join(bare(text) for text in args)
    return f"{_PAIRS.get(node.op, node.op)}{brackets(node.axes)}({arguments})"


def described(node: Node, number: Callable[[Fraction | bool], str] = shown) -> str:
    """The expression of a node after its name, if it has one; `number` as of `written`."""
    text = written(node, number=number)
    return f"{node.name}: {text}" if node.name else text


def bare(text: str) -> str:
    """An expression without parentheses around all of it."""
    if not text.startswith("("):
        return text
    depth = 0
    for index, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0:
            return text[1:-1] if index == len(text) - 1 else text
    return text
