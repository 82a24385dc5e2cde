"""Whether queries add nothing to a reduction for tokens that come after them."""

from __future__ import annotations

from fractions import Fraction

from kvpolicy.dsl.bind.kernel_values import finite
from kvpolicy.dsl.ir.nodes import Node
from kvpolicy.dsl.ops.operations import Kind


def skips(node: Node) -> bool:
    """Whether queries that do not see a token add nothing to a reduction."""
    x = node.args[0]
    if x.type.kind == "truth":
        return _false_after(x)
    return _absent_after(x) or (node.op == "sum" and finite(x) and nothing_after(x))


def _absent_after(node: Node) -> bool:
    """Whether a number is absent where the token comes after the query."""
    if node.operation.is_window:
        return True
    if node.op == "mask":
        return _absent_after(node.args[0]) or _false_after(node.args[1])
    if node.operation.is_reduction or node.op == "index":
        return False
    fold = all if node.op == "choose" else any
    parts = (node.args[0], node.args[2]) if node.op == "choose" else node.args
    return bool(parts) and fold(_absent_after(part) for part in parts)


def _false_after(node: Node) -> bool:
    """Whether a truth value is false or absent where the token comes after the query."""
    if node.op in ("and", "or"):
        return (any if node.op == "and" else all)(_false_after(argument) for argument in node.args)
    if node.op == "mask":
        return any(_false_after(argument) for argument in node.args)
    compares = node.operation.kind is Kind.COMPARISON
    return compares and any(_absent_after(argument) for argument in node.args)


def nothing_after(node: Node) -> bool:
    """Whether a number is absent or 0 where the token comes after the query."""
    if _absent_after(node):
        return True
    if node.op == "multiply":
        return any(nothing_after(argument) for argument in node.args)
    if node.operation.sums:
        return all(nothing_after(argument) for argument in node.args)
    if node.operation.is_reduction and node.operation.linear:
        # A sum over queries or tokens has one value for all of them.
        return not {"query", "token"} & set(node.axes) and nothing_after(node.args[0])
    if node.op == "power" and not _positive(node.args[1]):
        return False
    return node.operation.keeps_zero and nothing_after(node.args[0])


def _positive(node: Node) -> bool:
    return isinstance(node.value, Fraction) and node.value > 0
