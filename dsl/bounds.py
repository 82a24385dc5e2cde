"""How many entries a policy may keep, proven before any tensor is seen.

Budgets known before the prefill are counted exactly. For budgets that depend on data, three facts
bound their sums although each of them may be large:

    x / sum[layer](x), x >= 0       adds up to 1 over the layers (LAVa)
    split[layer](total, ...)        adds up to the total (DynamicKV, CAKE, exact PyramidKV)
    count(top[kv, token](x, n))     adds up to n over the KV heads (AdaKV)

Interval arithmetic finds which values are not negative and bounds the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpolicy.dsl.counts import Number, whole
from kvpolicy.dsl.ir import Node

if TYPE_CHECKING:
    from kvpolicy.dsl.bind import Bound

Interval = tuple[float, float]

_ANY: Interval = (-math.inf, math.inf)
_POSITIVE: Interval = (0.0, math.inf)
_LEAVES: dict[str, Interval] = {"attn": (0.0, 1.0), "uniform": (0.0, 1.0), "var": _POSITIVE}
_COUNTS = ("position", "distance", "index", "rank", "count", "missing", "remaining")


@dataclass(frozen=True)
class Size:
    """Upper bounds on the entries of a token set.

    Attributes:
        head: per layer, entries of one KV head.
        layer: per layer, entries summed over KV heads.
        total: entries summed over layers and KV heads.
    """

    head: list[int]
    layer: list[int]
    total: int


class Bounds:
    """Bounds for one bound policy and prompt length N; L layers, G KV heads."""

    def __init__(self, bound: Bound, prompt: int) -> None:
        self._bound, self._prompt = bound, prompt
        self._layers, self._kv = bound.shape.layers, bound.shape.kv_heads
        self._intervals: dict[tuple[int, int, frozenset[int]], Interval] = {}
        self._by_layer: dict[int, bool] = {}

    def kept(self) -> int:
        """Upper bound on the entries kept, summed over layers and KV heads."""
        return self.size(self._bound.lowered.keep).total

    def is_exact(self, node: Node) -> bool:
        """Whether the size of a token set is its number of entries: no data decide it.

        Sets are tops with known counts and what fills a known budget after them.
        """
        if node.op == "fill":
            return self._static(node.args[2].args[0]) and self.is_exact(node.args[1])
        if node.op == "choose":
            return self._static(node.args[1]) and all(self.is_exact(x) for x in node.args[::2])
        if node.op == "or":
            return self._disjoint(*node.args) and all(self.is_exact(x) for x in node.args)
        if node.op == "top":
            return self._static(node.args[1])
        return node.op in ("all", "truth")

    @staticmethod
    def _disjoint(taken: Node, right: Node) -> bool:
        """Whether `right` chooses among what `taken` left over."""
        if right.op != "top" or right.args[0].op != "mask":
            return False
        condition = right.args[0].args[1]
        return condition.op == "not" and condition.args[0] is taken

    def size(self, node: Node) -> Size:
        """Bounds on the entries of a token set, broadcast to every KV head."""
        cases: dict[str, Callable[[Node], Size]] = {
            "top": self._top,
            "fill": self._fill,
            "or": self._or,
            "and": self._and,
            "choose": self._choose,
            "truth": self._truth,
        }
        return cases.get(node.op, self._everything)(node)

    def _bounded(self, head: list[Number], layer: list[Number], total: Number) -> Size:
        """A size from three bounds, each tightened by the others."""
        heads = [whole(h, self._prompt) for h in head]
        layers = [whole(n, self._kv * h) for n, h in zip(layer, heads, strict=True)]
        return Size(heads, layers, whole(total, sum(layers)))

    def _everything(self, node: Node) -> Size:
        return self._bounded([math.inf] * self._layers, [math.inf] * self._layers, math.inf)

    def _truth(self, node: Node) -> Size:
        if node.value:
            return self._everything(node)
        return Size([0] * self._layers, [0] * self._layers, 0)

    def _or(self, node: Node) -> Size:
        a, b = self.size(node.args[0]), self.size(node.args[1])
        head = [x + y for x, y in zip(a.head, b.head, strict=True)]
        layer = [x + y for x, y in zip(a.layer, b.layer, strict=True)]
        return self._bounded(head, layer, a.total + b.total)

    def _and(self, node: Node) -> Size:
        a, b = self.size(node.args[0]), self.size(node.args[1])
        head = [min(x, y) for x, y in zip(a.head, b.head, strict=True)]
        layer = [min(x, y) for x, y in zip(a.layer, b.layer, strict=True)]
        return self._bounded(head, layer, min(a.total, b.total))

    def _choose(self, node: Node) -> Size:
        a, b = self.size(node.args[0]), self.size(node.args[2])
        if self._static(node.args[1]):
            chosen = [a if self._value(node.args[1], i) else b for i in range(self._layers)]
            head = [size.head[i] for i, size in enumerate(chosen)]
            layer = [size.layer[i] for i, size in enumerate(chosen)]
            same = all(size is chosen[0] for size in chosen)
            return self._bounded(head, layer, chosen[0].total if same else math.inf)
        head = [max(x, y) for x, y in zip(a.head, b.head, strict=True)]
        layer = [max(x, y) for x, y in zip(a.layer, b.layer, strict=True)]
        return self._bounded(head, layer, math.inf)

    def _top(self, node: Node) -> Size:
        counts = [max(0, self.interval(node.args[1], i)[1]) for i in range(self._layers)]
        if "token" not in node.axes:
            return self._everything(node)
        if "layer" in node.axes:
            per_head = 1 if "kv" in node.axes else self._kv
            return self._bounded(counts, [math.inf] * self._layers, per_head * max(counts))
        if "kv" in node.axes:
            return self._bounded(counts, counts, sum(counts))
        return self._bounded(counts, [self._kv * n for n in counts], math.inf)

    def _fill(self, node: Node) -> Size:
        taken, budget = self.size(node.args[1]), node.args[2].args[0]
        layers = range(self._layers)
        high = [max(0, self.interval(budget, i)[1]) for i in layers]
        low = [self.interval(budget, i)[0] for i in layers]
        # Each head keeps max(taken, budget): the budget alone, where it holds what is taken.
        holds = all(low[i] >= taken.head[i] for i in layers)
        sums = [self._heads_sum(budget, i) for i in layers]
        total = self._total(budget)
        if not holds:
            sums = [taken.layer[i] + (sums[i] if low[i] >= 0 else math.inf) for i in layers]
            total = taken.total + (total if min(low) >= 0 else math.inf)
        most = [max(taken.head[i], high[i]) for i in layers]
        sums = [min(sums[i], self._kv * most[i]) for i in layers]
        shared = "kv" in node.axes or "layer" in node.axes
        return self._bounded([math.inf] * self._layers if shared else most, sums, total)

    # Sums of numbers over KV heads and layers.

    def _heads_sum(self, node: Node, layer: int) -> Number:
        """Upper bound on the node's values at one layer, summed over the G KV heads."""
        if node.op == "choose" and self._static(node.args[1]):
            chosen = node.args[0 if self._value(node.args[1], layer) else 2]
            return self._heads_sum(chosen, layer)
        through = self._linear(
            node,
            lambda x: self._heads_sum(x, layer),
            lambda x: self._kv * self.interval(x, layer)[0],
            self._kv,
            lambda x: self._wins(x, layer),
        )
        return min(self._kv * self.interval(node, layer)[1], through)

    def _total(self, node: Node) -> Number:
        """Upper bound on the node's values, summed over layers and KV heads."""
        layers = range(self._layers)
        return min(
            sum(self._heads_sum(node, i) for i in layers),
            self._linear(
                node,
                self._total,
                lambda x: sum(self._kv * self.interval(x, i)[0] for i in layers),
                self._kv * self._layers,
                self._shares,
            ),
        )

    def _linear(
        self,
        node: Node,
        upper: Callable[[Node], Number],
        lower: Callable[[Node], Number],
        values: int,
        known: Callable[[Node], Number],
    ) -> Number:
        """A sum of `values` values, taken through operations that sums pass through."""
        args = node.args
        if node.op == "add":
            return upper(args[0]) + upper(args[1])
        if node.op == "subtract":
            return upper(args[0]) - lower(args[1])
        if node.op == "floor":
            return upper(args[0])
        if node.op in ("round", "ceil"):
            return upper(args[0]) + values / (2 if node.op == "round" else 1)
        if node.op in ("multiply", "divide"):
            factor, x = (args[1], args[0]) if self._constant(args[1]) else (args[0], args[1])
            if self._constant(factor) and (node.op == "multiply" or factor is args[1]):
                by = self._value(factor, 0)
                if by > 0:
                    return upper(x) * by if node.op == "multiply" else upper(x) / by
        if node.op == "choose" and self._constant(args[1]):
            return upper(args[0] if self._value(args[1], 0) else args[2])
        return known(node)

    def _wins(self, node: Node, layer: int) -> Number:
        """`count(top[kv, token](x, n))` adds up to n over the KV heads."""
        if node.op != "count" or node.args[0].op != "top":
            return math.inf
        top = node.args[0]
        if "kv" not in top.axes or "kv" in node.axes or len(top.args) != 2:
            return math.inf
        return max(0, self.interval(top.args[1], layer)[1])

    def _shares(self, node: Node) -> Number:
        """Sums over layers and KV heads that the operation itself fixes."""
        repeated = 1 if "kv" in node.type.axes else self._kv
        if node.op == "split":
            return repeated * max(0, self.interval(node.args[0], 0)[1])
        if node.op == "divide" and self._normalises(node) and "layer" in node.args[1].axes:
            summed = "kv" in node.args[1].axes
            return 1 if summed and repeated == 1 else self._kv
        if node.op == "count" and node.args[0].op == "top":
            top = node.args[0]
            if "layer" in top.axes and "kv" in top.axes and len(top.args) == 2:
                return repeated * max(0, self.interval(top.args[1], 0)[1])
            positive = all(
                self.interval(node.args[0].args[-1], i)[0] >= 0 for i in range(self._layers)
            )
            if positive and "kv" in top.axes and "kv" not in node.axes and len(top.args) == 2:
                return self._total(top.args[1]) / self._kv
        return math.inf

    def _normalises(self, node: Node) -> bool:
        """Whether a division is `x / sum[...](x)` of values that are not negative."""
        x, mass = node.args
        layers = range(self._layers)
        return (
            mass.op == "sum"
            and (mass.args[0] is x or _same(mass.args[0], x))
            and all(self.interval(x, i)[0] >= 0 for i in layers)
        )

    # Intervals.

    def _static(self, node: Node) -> bool:
        return self._bound.static.needs(node) is not None

    def _constant(self, node: Node) -> bool:
        needs = self._bound.static.needs(node)
        return needs is not None and "layer" not in needs

    def _value(self, node: Node, layer: int) -> Number:
        return self._bound.number(node, self._prompt, layer)

    def _varies(self, node: Node) -> bool:
        """Whether bounds of a node may differ between layers."""
        if id(node) not in self._by_layer:
            own = node.op == "size" and node.value == "layer"
            self._by_layer[id(node)] = own or any(self._varies(x) for x in node.args)
        return self._by_layer[id(node)]

    def interval(self, node: Node, layer: int, given: frozenset[int] = frozenset()) -> Interval:
        """Least and largest value that a number may have at a layer, where present.

        `given` are conditions (ids of nodes) that hold wherever the value is looked at.
        """
        key = (id(node), layer if self._varies(node) else 0, given)
        if key not in self._intervals:
            if self._static(node):
                value = self._value(node, layer)
                found = (value, value)
            else:
                found = self._interval(node, layer, given)
            self._intervals[key] = found
        return self._intervals[key]

    def _interval(self, node: Node, layer: int, given: frozenset[int]) -> Interval:
        if node.op in _LEAVES:
            return _LEAVES[node.op]
        if node.op in _COUNTS:
            return (0, self._count(node, layer))
        if node.op == "split":
            most = self.interval(node.args[0], layer)[1]
            if len(node.args) == 3:
                most = min(most, self.interval(node.args[2], layer)[1])
            return (0, max(0, most))
        if node.op == "divide" and self._normalises(node):
            return (0, 1)
        if node.op == "choose" and self._static(node.args[1]):
            chosen = node.args[0 if self._value(node.args[1], layer) else 2]
            return self.interval(chosen, layer, given)
        if node.op == "mask":
            return self.interval(node.args[0], layer, given | {id(node.args[1])})
        if "token" in node.axes or node.op in ("past", "at"):
            given = frozenset()
        if node.op in ("max", "min"):
            low, high = self.interval(node.args[0], layer, given)
            if not self._may_be_empty(node.args[0], node.axes, layer, given):
                return (low, high)
            return (-math.inf, high) if node.op == "max" else (low, math.inf)
        rule = _RULES.get(node.op)
        if rule is None:
            return _ANY
        numbers = [x for x in node.args if x.type.kind == "number"]
        return rule(*(self.interval(x, layer, given) for x in numbers))

    def _count(self, node: Node, layer: int) -> Number:
        if node.op != "count":
            return self._prompt if node.op in ("position", "distance") else math.inf
        sizes = {"token": self._prompt, "kv": self._kv, "layer": self._layers}
        most = math.prod(sizes.get(axis, math.inf) for axis in node.axes)
        top = node.args[0]
        if top.op == "top" and len(top.args) == 2 and not set(top.axes) - set(node.axes):
            most = min(most, max(0, self.interval(top.args[1], layer)[1]))
        return most

    def _may_be_empty(
        self, node: Node, axes: tuple[str, ...], layer: int, given: frozenset[int]
    ) -> bool:
        """Whether a reduction over `axes` may find no value at all, where `given` holds."""
        if not node.type.absent:
            return False
        if node.op in ("attn", "logits", "distance"):  # the last query sees every token
            return not {"query", "token"} & set(axes)
        if node.op == "mask":
            condition = node.args[1]
            holds = id(condition) in given or self._leaves_some(condition, axes, layer)
            return not holds or self._may_be_empty(node.args[0], axes, layer, given)
        absent = [x for x in node.args if x.type.absent]
        passes = node.op in _RULES and len(absent) == 1
        return not passes or self._may_be_empty(absent[0], axes, layer, given)

    def _leaves_some(self, condition: Node, axes: tuple[str, ...], layer: int) -> bool:
        """Whether a condition is `not recent(n)` with n < N, over axes that are all reduced."""
        if condition.op != "not" or set(condition.type.axes) - set(axes):
            return False
        top = condition.args[0]
        if top.op != "top" or len(top.args) != 2 or not self._static(top.args[1]):
            return False
        return whole(self._value(top.args[1], layer), self._prompt) < self._prompt


def _same(a: Node, b: Node) -> bool:
    """Whether two nodes are the same computation."""
    if a is b:
        return True
    if (a.op, a.value, a.axes, len(a.args)) != (b.op, b.value, b.axes, len(b.args)):
        return False
    return all(_same(x, y) for x, y in zip(a.args, b.args, strict=True))


def _times(a: Number, b: Number) -> Number:
    return 0 if a == 0 or b == 0 else a * b


def _multiply(a: Interval, b: Interval) -> Interval:
    corners = [_times(x, y) for x in a for y in b]
    return (min(corners), max(corners))


def _divide(a: Interval, b: Interval) -> Interval:
    if b[0] > 0:
        return _multiply(a, (0 if math.isinf(b[1]) else 1 / b[1], 1 / b[0]))
    return _POSITIVE if a[0] >= 0 and b[0] >= 0 else _ANY


def _power(a: Interval, b: Interval) -> Interval:
    return _POSITIVE if a[0] >= 0 else _ANY


def _logarithm(a: Interval) -> Interval:
    # The logarithm of a negative number counts as 0.
    high = math.log(a[1]) if 0 < a[1] < math.inf else (math.inf if a[1] > 0 else 0)
    low = math.log(a[0]) if 0 < a[0] < math.inf else -math.inf
    return (low, high if a[0] >= 0 else max(0, high))


def _add(a: Number, b: Number, worst: float) -> Number:
    """A sum of ends of intervals; opposite infinities give the `worst` one."""
    return worst if math.isinf(a) and math.isinf(b) and a != b else a + b


def _sum(a: Interval) -> Interval:
    return (0.0 if a[0] >= 0 else -math.inf, 0.0 if a[1] <= 0 else math.inf)


def _with_zero(*a: Interval) -> Interval:
    return (min(a[0][0], 0), max(a[0][1], 0))


def _to_whole(function: Callable[[Number], int], a: Interval) -> Interval:
    """`floor`, `ceil` or `round` of both ends, which all keep the order."""
    return tuple(x if math.isinf(x) else function(x) for x in a)


_RULES: dict[str, Callable[..., Interval]] = {
    "add": lambda a, b: (_add(a[0], b[0], -math.inf), _add(a[1], b[1], math.inf)),
    "subtract": lambda a, b: (_add(a[0], -b[1], -math.inf), _add(a[1], -b[0], math.inf)),
    "multiply": _multiply,
    "divide": _divide,
    "floor_divide": lambda a, b: _to_whole(math.floor, _divide(a, b)),
    "power": _power,
    "negate": lambda a: (-a[1], -a[0]),
    "abs": lambda a: (max(0, a[0], -a[1]), max(a[1], -a[0])),
    "exp": lambda a: _POSITIVE,
    "log": _logarithm,
    "sqrt": lambda a: _POSITIVE,
    "cos": lambda a: (-1, 1),
    "sin": lambda a: (-1, 1),
    "floor": lambda a: _to_whole(math.floor, a),
    "ceil": lambda a: _to_whole(math.ceil, a),
    "round": lambda a: _to_whole(round, a),
    "minimum": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "maximum": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "choose": lambda a, b: (min(a[0], b[0]), max(a[1], b[1])),
    "sum": _sum,
    "mean": _with_zero,
    "avgpool": _with_zero,
    "maxpool": lambda *a: a[0],
    "past": lambda *a: a[0],
    "at": lambda *a: a[-1],
}
