"""Intervals in which computed values lie, proven before any tensor is seen.

Interval arithmetic over the lowered rules, with the rules of the language: absent values do not
count, what would be NaN is 0, and `x / sum[...](x)` of values that are not negative is at most 1.
"""

from __future__ import annotations

import math

from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.ir.counts import whole
from kvpolicy.dsl.ir.nodes import Node, When
from kvpolicy.dsl.ir.once import once
from kvpolicy.dsl.ops.host import Number
from kvpolicy.dsl.ops.operations import Kind
from kvpolicy.dsl.ops.ranges import ANY, Interval, product


class Intervals:
    """Intervals for one bound policy and prompt length N; L layers, G KV heads.

    Args:
        prompt: N tokens.
        lengths: [L] least and largest number of tokens at each layer. While `lengths.py` still
            fills it in, only layers that are done may be asked about.
    """

    def __init__(self, bound: Bound, prompt: int, lengths: list[tuple[int, int]]) -> None:
        self._bound, self._prompt, self._lengths = bound, prompt, lengths
        self._layers, self._kv = bound.shape.layers, bound.shape.kv_heads

    def is_static(self, node: Node, layer: int | None = None) -> bool:
        """Whether a node is a scalar known before the prefill, at a layer or (None) at all."""
        needs = self._bound.static.needs(node)
        if needs is None or "length" not in needs:
            return needs is not None
        ranges = self._lengths if layer is None else [self._lengths[layer]]
        return all(low == high for low, high in ranges)

    def is_constant(self, node: Node) -> bool:
        """Whether a node is static, with the same value at every layer."""
        needs = self._bound.static.needs(node)
        if needs is None or "layer" in needs:
            return False
        same = len(set(self._lengths)) == 1
        return self.is_static(node) and ("length" not in needs or same)

    def value(self, node: Node, layer: int) -> Number:
        """The value of a static node."""
        length = self._lengths[layer][1]
        return self._bound.number(node, self._prompt, layer, length=length)

    def of_heads(self, table: Node, layer: int) -> list[Number]:
        """The present values of a head table at a layer, one for each place along its axes."""
        return [value for value in table.head_table.layers[layer] if value is not None]

    def alike(self, node: Node, layer: int) -> int:
        """The first layer at which bounds of a node are those of `layer`."""
        if self._may_differ(node):
            return layer
        return self._lengths.index(self._lengths[layer]) if self._bound.propagates else 0

    @once
    def _may_differ(self, node: Node) -> bool:
        """Whether a node may differ between layers that are reached by equally many tokens."""
        if node.op == "head_table" or (node.op == "size" and node.value == "layer"):
            return True
        looks = node.operation.kind is Kind.LOOK and node.when <= When.LAYER
        if looks and self._bound.propagates:  # it sees the layers so far
            return True
        return any(self._may_differ(x) for x in node.args)

    def of(self, node: Node, layer: int, given: frozenset[Node] = frozenset()) -> Interval:
        """Least and largest value that a number may have at a layer, where present.

        `given` are conditions that hold wherever the value is read.
        """
        return self._interval(node, self.alike(node, layer), given)

    @once
    def _interval(self, node: Node, layer: int, conditions: frozenset[Node]) -> Interval:
        if self.is_static(node, layer):
            value = self.value(node, layer)
            return (value, value)
        if node.op == "head_table":
            values = self.of_heads(node, layer)
            return (min(values), max(values)) if values else ANY
        row = node.operation
        if isinstance(row.interval, tuple):
            return row.interval
        if node.op == "size" and node.value == "length":
            return self._lengths[layer]
        if row.whole:
            return (0, self._count(node, layer))
        if row.shares_out:
            most = self.of(node.args[0], 0)[1]
            if len(node.args) == 3:
                most = min(most, self.of(node.args[2], layer)[1])
            return (0, max(0, most))
        if node.op == "divide" and self.normalises(node):
            return (0, 1)
        if node.op == "choose" and self.is_static(node.args[1], layer):
            chosen = node.args[0 if self.value(node.args[1], layer) else 2]
            return self.of(chosen, layer, conditions)
        if node.op == "mask":
            return self.of(node.args[0], layer, conditions | {node.args[1]})
        if node.op == "broadcast":
            return self.of(node.args[0], layer, conditions)
        # They may not hold at other layers, nor at other places along their axes.
        read_along = {*node.axes, *row.reads_along}
        conditions = frozenset(
            x for x in conditions if not (node.across_layers or read_along & {*x.type.axes})
        )
        if row.of_none is not None and row.infinite_of_none:
            low, high = self._argument(node, node.args[0], layer, conditions)
            if not self._may_be_empty(node.args[0], node.axes, layer, conditions):
                return (low, high)
            return (min(low, row.of_none), max(high, row.of_none))
        if row.interval is None:
            return ANY
        numbers = [x for x in node.args if x.type.kind == "number"]
        return row.interval(*(self._argument(node, x, layer, conditions) for x in numbers))

    def _argument(self, node: Node, x: Node, layer: int, conditions: frozenset[Node]) -> Interval:
        """Interval of an argument over all layers at which the node's operation reads it."""
        if node.operation.kind is Kind.LOOK and node.when <= When.LAYER:
            layers = range(layer + 1)
        elif node.across_layers:
            layers = range(self._layers)
        else:
            return self.of(x, layer, conditions)
        intervals = [self.of(x, source, conditions) for source in layers]
        return (min(low for low, _ in intervals), max(high for _, high in intervals))

    def _count(self, node: Node, layer: int) -> Number:
        if node.op == "index":
            return max(0, self._size(node.axes[0], layer) - 1)
        if node.op != "count":
            return self._prompt if node.operation.of_tokens_there else math.inf
        most = math.prod(self._size(axis, layer) for axis in node.axes)
        if node.args[0].op == "top":
            most = min(most, self.winners(node, layer))
        return most

    def _size(self, axis: str, layer: int) -> Number:
        """Largest size of an axis; inf if it is not known."""
        tokens, group = self._lengths[layer][1], self._bound.shape.group
        sizes = {"token": tokens, "kv": self._kv, "group": group, "layer": self._layers}
        return sizes.get(axis, math.inf)

    def winners(self, count: Node, layer: int) -> Number:
        """Most winners that one value of `count[...](top[...](x, n))` counts."""
        _, most = self._argument(count, count.args[0].args[1], layer, frozenset())
        return product(max(0, most), self.contests(count, layer))

    def contests(self, count: Node, layer: int) -> Number:
        """Number of contests whose winners one value of `count[...](top[...](x, n))` counts.

        Each has at most n winners; those that differ in an axis which `count` keeps belong to
        different values.
        """
        top = count.args[0]
        top_axes = (*top.type.axes, "layer")
        contest_axes = [axis for axis in count.axes if axis in top_axes and axis not in top.axes]
        return math.prod(self._size(axis, layer) for axis in contest_axes)

    def _may_be_empty(
        self, node: Node, axes: tuple[str, ...], layer: int, conditions: frozenset[Node]
    ) -> bool:
        """Whether a reduction over `axes` may find no value at all, where `conditions` hold."""
        if not node.type.absent:
            return False
        masks: list[Node] = []
        while node.type.absent and not node.operation.is_window:
            if node.op == "mask":
                masks += [node.args[1]] if node.args[1] not in conditions else []
                node = node.args[0]
                continue
            absent_args = [x for x in node.args if x.type.absent]
            passes = node.operation.interval is not None and len(absent_args) == 1
            if not passes or node.operation.kind is Kind.LOOK:
                return True
            node = absent_args[0]
        left_out = sum(self._left_out(condition, axes, layer) for condition in masks)
        if node.type.absent:
            # The last query sees every token, others may see only tokens that the masks leave out.
            fewer = left_out > 0 and "query" not in axes
            if fewer or not self._is_seen(node, axes, layer):
                return True
        return bool(masks) and left_out >= self._lengths[layer][0]

    def _is_seen(self, window: Node, axes: tuple[str, ...], layer: int) -> bool:
        """Whether a window surely has a query, and a reduction is over `query` or `token`."""
        if not {"query", "token"} & set(axes):
            return False
        return all(
            self.is_static(x, layer) and whole(self.value(x, layer), self._prompt) > 0
            for x in window.args
        )

    def _left_out(self, condition: Node, axes: tuple[str, ...], layer: int) -> Number:
        """Most tokens that a condition like `not recent(n)` leaves out of a reduction, or inf."""
        if condition.op != "not" or set(condition.type.axes) - set(axes):
            return math.inf
        top = condition.args[0]
        if top.op != "top" or "token" not in top.axes or len(top.args) != 2:
            return math.inf
        if not self.is_static(top.args[1], layer):
            return math.inf
        return whole(self.value(top.args[1], layer), self._prompt)

    def normalises(self, node: Node) -> bool:
        """Whether a division is `x / sum[...](x)` of values that are not negative."""
        x, mass = node.args
        if mass.op != "sum" or mass.args[0] is not x:
            return False
        return all(self.of(x, i)[0] >= 0 for i in range(self._layers))
