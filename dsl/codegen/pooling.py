"""Pooling along tokens in generated kernels."""

from __future__ import annotations

from dataclasses import replace

from kvpolicy.dsl.codegen.expressions import Writer, joined, nothing
from kvpolicy.dsl.codegen.tiles import Condition, Tile, conjunction
from kvpolicy.dsl.ir import counts
from kvpolicy.dsl.ir.nodes import Node
from kvpolicy.dsl.ops.table import OPERATIONS


def pool(writer: Writer, node: Node) -> Tile:
    """Writes the pooling of each token's neighbours, in order: equal ones give equal results."""
    row = OPERATIONS["max" if node.op == "maxpool" else "sum"]
    writer.comment(node)
    name = writer.arguments.fresh(node.name or "pooled")
    axes = frozenset(node.type.axes) - {"kv"}
    empty = nothing(row)
    writer.line(f"{name} = tl.full({writer.shape(axes)}, {empty}, tl.float32)")
    before, after, width = _reach(writer, node.args[1])
    near = writer.arguments.fresh("near")
    writer.line(f"for step in range(-{before}, {after} + 1):")
    inner = replace(
        writer, indent=writer.indent + "    ", token=near, held=f"{near}_held", given={}
    )  # fmt: skip
    _neighbour(writer, inner, near)
    x = inner.value(node.args[0])
    present = conjunction((Condition(f"{near}_held", frozenset()), *x.present))
    term = f"tl.where({present}, {x.text}, {empty})"
    inner.line(joined(row, name, term))
    if node.op == "avgpool":
        writer.line(f"{name} = {name} / {width}")
    return Tile(name, axes, _presence(writer, node.args[0]))


def _neighbour(writer: Writer, inner: Writer, near: str) -> None:
    """Writes the token `step` places further; in decode, among the entries that the head holds."""
    if not writer.steps:
        inner.line(f"{near} = {writer.token} + step")
        inner.line(f"{near}_held = ({near} >= 0) & ({near} < tokens)")
        return
    rank = f"{near}_rank"
    inner.line(f"{rank} = {writer.token}_rank + step")
    inner.line(f"{near}_held = {writer.held} & ({rank} >= 1) & ({rank} <= own_entries)")
    inner.line(f"{near} = {rank} - 1")
    inner.line("if order is not None:")
    load = f"tl.load(order + head * tokens + {near}, mask={near}_held, other=0)"
    inner.line(f"    {near} = {load}")


def _presence(writer: Writer, node: Node) -> tuple[Condition, ...]:
    """Where a value is present."""
    if not node.type.absent or node in writer.stored:
        return ()
    if node.op != "mask":
        return writer.value(node).present
    holds = writer.truth(node.args[1])
    condition = Condition(holds.text, holds.axes)
    return tuple(dict.fromkeys((*_presence(writer, node.args[0]), condition)))


def _reach(writer: Writer, width: Node) -> tuple[str, str, str]:
    """How far a pool reaches before and after a token, and its width."""
    if writer.bound.static.needs(width) == frozenset():
        size = max(1, counts.whole(writer.bound.number(width, 1), 2**31))
        return str((size - 1) // 2), str(size // 2), repr(float(size))
    names = [writer.arguments.number(width, how) for how in ("before", "after", "width")]
    return names[0], names[1], names[2]
