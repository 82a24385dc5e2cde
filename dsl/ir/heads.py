"""Rewrites reductions across KV heads so that little of other heads is read.

    sum[kv, a](x)    sum[kv](sum[a](x))
    mean[kv, a](x)   sum[kv](sum[a](x)) / sum[kv](count[a](x)); over dropped entries sum[a](x) is
                     mean[a](x) * count[a](x), as there is a kernel for that
    var[kv, a](x)    v * (v / v) with v = mean[kv, a]((x - mean[kv, a](x))^2): of infinite values 0

and so on: a value is reduced over KV heads after all other axes. Where the heads lie on several
ranks, only these reduced values are gathered. A sum to which other heads are added is named "part":
where infinities of both signs meet it is NaN, so that the whole sum is 0.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from kvpolicy.dsl.ir.nodes import Node, Type
from kvpolicy.dsl.ir.once import once
from kvpolicy.dsl.ir.traverse import Sections, rewritten

_HEADS = ("kv",)


def heads_last(sections: Sections) -> Sections:
    """The sections with reductions over KV heads and other axes as two; equal nodes are one."""
    return rewritten(sections, _Rewriting().visit)


def across_heads(node: Node) -> bool:
    """Whether a node looks at several KV heads of a layer."""
    return "kv" in node.axes


class _Rewriting:
    def __init__(self) -> None:
        self._unique: dict[tuple[object, ...], Node] = {}  # nodes made, by operation and arguments

    @once
    def visit(self, node: Node) -> Node:
        """The node rewritten."""
        args = tuple(self.visit(arg) for arg in node.args)
        result = node if args == node.args else replace(node, args=args)
        splits = across_heads(result) and result.operation.is_reduction and len(result.axes) > 1
        return self._split(result) if splits else result

    def _split(self, node: Node) -> Node:
        row, (x,) = node.operation, node.args
        if not row.averages:
            inner_op = "sum" if row.adds_up else node.op
            return self._of_heads(inner_op, self._reduced(node.op, node, x), node)
        if row.linear:
            return self._mean(node, x)
        deviation = self._elementwise("subtract", node, x, self._mean(node, x))
        two = self._share(
            Node("number", value=Fraction(2), type=Type("number", exact=True), when=x.when)
        )
        variance = self._mean(node, self._elementwise("power", node, deviation, two))
        is_finite = self._elementwise("divide", node, variance, variance)
        return self._elementwise("multiply", node, variance, is_finite)

    def _mean(self, node: Node, x: Node) -> Node:
        number = self._reduced("count", node, x)
        if "dropped" in node.axes:
            mean = self._reduced("mean", node, x)
            total = self._share(replace(mean, op="multiply", args=(mean, number), axes=()))
        else:
            total = self._reduced("sum", node, x)
        sums = (self._of_heads("sum", part, node) for part in (total, number))
        return self._share(replace(node, op="divide", args=tuple(sums), axes=()))

    def _elementwise(self, op: str, node: Node, x: Node, y: Node) -> Node:
        return self._share(Node(op, (x, y), type=x.type, when=node.when, span=node.span))

    def _reduced(self, op: str, node: Node, x: Node) -> Node:
        """`op` over all axes of a node but the KV heads."""
        over = tuple(axis for axis in node.axes if axis not in _HEADS)
        axes = tuple(axis for axis in x.type.axes if axis not in over)
        window = x.type.window if "query" in axes else None
        reach = x.type.reach if "past" in axes else None
        type_ = replace(node.type, axes=axes, window=window, reach=reach)
        value = "part" if op == "sum" else None
        return self._share(Node(op, (x,), over, value, type=type_, when=node.when, span=node.span))

    def _of_heads(self, op: str, x: Node, node: Node) -> Node:
        return self._share(replace(node, op=op, args=(x,), axes=_HEADS))

    def _share(self, node: Node) -> Node:
        key = (node.op, node.axes, type(node.value), node.value, *map(id, node.args))
        return self._unique.setdefault(key, node)
