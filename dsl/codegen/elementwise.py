"""Elementwise operations in generated kernels that take more than the text of a row."""

from __future__ import annotations

from kvpolicy.dsl.bind.kernel_values import exponent, finite, is_end
from kvpolicy.dsl.codegen.expressions import Writer
from kvpolicy.dsl.codegen.leaves import end
from kvpolicy.dsl.codegen.tiles import Condition, Tile, conjunction
from kvpolicy.dsl.ir.nodes import Node


def divide(writer: Writer, node: Node) -> Tile:
    """Finite values by a literal, not 0, give no NaN; adding 0 makes a divisor of -0 into 0."""
    x, by = node.args
    if by.op != "number":
        return writer.arithmetic(node, "{0} / ({1} + 0.0)")
    return writer.arithmetic(node, "{0} / {1}", clean=by.value != 0 and finite(x))


def power(writer: Writer, node: Node) -> Tile:
    """A power with one of the exponents that kernels compute."""
    degree = exponent(node)
    if degree is None:
        raise TypeError("a power that no kernel computes")
    text = "tl.sqrt({0} + 0.0)" if degree == 0.5 else " * ".join(["{0}"] * int(degree))
    return writer.arithmetic(node, text)


def both(writer: Writer, node: Node) -> Tile:
    a, b = (writer.truth(argument) for argument in node.args)
    return Tile(f"({a.text} & {b.text})", a.axes | b.axes)


def either(writer: Writer, node: Node) -> Tile:
    a, b = (writer.truth(argument) for argument in node.args)
    return Tile(f"({a.text} | {b.text})", a.axes | b.axes)


def neither(writer: Writer, node: Node) -> Tile:
    inner = node.args[0]
    if is_end(inner, writer.bound):
        return end(writer, inner, outside=True)
    x = writer.truth(inner)
    return Tile(f"({x.text} == 0)", x.axes)


def mask(writer: Writer, node: Node) -> Tile:
    """The same value, with one more condition to be present."""
    x, holds = writer.value(node.args[0]), writer.truth(node.args[1])
    condition = Condition(holds.text, holds.axes)
    return Tile(x.text, x.axes | holds.axes, tuple(dict.fromkeys((*x.present, condition))))


def choose(writer: Writer, node: Node) -> Tile:
    first, condition, second = node.args
    x, holds, y = writer.value(first), writer.truth(condition), writer.value(second)
    axes = x.axes | holds.axes | y.axes
    name = writer.named(node.name or "chosen", f"tl.where({holds.text}, {x.text}, {y.text})")
    if not x.present and not y.present:
        return Tile(name, axes)
    in_x = conjunction(x.present) or "(tokens > 0)"
    in_y = conjunction(y.present) or "(tokens > 0)"
    text = f"({holds.text} & {in_x}) | (({holds.text} == 0) & {in_y})"
    all_axes = axes.union(*(presence.axes for presence in (*x.present, *y.present)))
    present = writer.named(f"{name}_there", text)
    return Tile(name, axes, (Condition(present, all_axes),))
