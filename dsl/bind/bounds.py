"""How many entries a policy may keep, proven before any tensor is seen.

Budgets known before the prefill are counted exactly. For budgets that depend on data, four facts
bound their sums although each of them may be large:

    x / sum[layer](x), x >= 0       adds up to 1 over the layers (LAVa)
    split[layer](total, ...)        adds up to the total (DynamicKV, CAKE, exact PyramidKV)
    count(top[kv, token](x, n))     adds up to n over the KV heads (AdaKV)
    x / sum[kv](x), x >= 0          adds up to 1 over the KV heads

Intervals say which values are not negative and bound the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import add

from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.bind.intervals import Intervals
from kvpolicy.dsl.bind.kept import chooses_after, filling, keep_of, present_outside
from kvpolicy.dsl.bind.lengths import lengths
from kvpolicy.dsl.ir.counts import whole
from kvpolicy.dsl.ir.nodes import Node
from kvpolicy.dsl.ir.once import once
from kvpolicy.dsl.ir.traverse import nodes_of
from kvpolicy.dsl.ops.host import Number
from kvpolicy.dsl.ops.ranges import product


@dataclass(frozen=True)
class Size:
    """Upper bounds on the entries of a token set.

    Attributes:
        head: [L] entries of one KV head.
        layer: [L] entries summed over KV heads.
        total: entries summed over layers and KV heads.
    """

    head: list[int]
    layer: list[int]
    total: int

    def of(self, layers: range) -> int:
        """Upper bound on the entries of some layers, summed over them and their KV heads."""
        return min(self.total, sum(self.layer[layers.start : layers.stop]))


def _joined(join: Callable[[int, int], int], a: Size, b: Size) -> tuple[list[int], list[int]]:
    """`head` and `layer` of two sizes, joined layer by layer."""
    head = [join(x, y) for x, y in zip(a.head, b.head, strict=True)]
    return head, [join(x, y) for x, y in zip(a.layer, b.layer, strict=True)]


class Bounds:
    """Bounds for one bound policy and prompt length N; L layers, G KV heads."""

    def __init__(self, bound: Bound, prompt: int) -> None:
        self._bound = bound
        self._layers, self._kv = bound.shape.layers, bound.shape.kv_heads
        self._lengths = lengths(bound, prompt)
        self._numbers = Intervals(bound, prompt, self._lengths)

    @cached_property
    def kept(self) -> Size:
        """Bounds on the entries that the prefill keeps."""
        return self.size(keep_of(self._bound.lowered.prefill))

    def total_budget(self, fill: Node) -> int:
        """Upper bound on the budgets of a `fill`, summed over layers and KV heads.

        Entries that its sized terms take beyond a budget that data decide are not counted.
        """
        _, _, budget = filling(fill)
        return whole(self._total(budget), self._kv * sum(b for _, b in self._lengths))

    def is_exact(self, node: Node) -> bool:
        """Whether `size` of a token set is exactly its number of entries: no data decide it.

        That holds for tops with known counts, and for what fills a known budget that no KV head
        exceeds before. What heads or layers compete for is known in total only, so nothing is known
        of a top after it.
        """
        if any(low < high for low, high in self._lengths):
            return False
        if node.op == "fill":
            score, taken_set, budget = filling(node)
            is_known = self.is_known(budget) and self._total(budget) < math.inf
            holds = self._holds(self.size(taken_set), budget)
            return is_known and holds and present_outside(score, taken_set)
        if node.op == "choose":
            if self._numbers.is_constant(node.args[1]):
                return all(map(self.is_exact, node.args[::2]))
            is_known = self.is_known(node.args[1])
            return is_known and all(map(self._is_exact_per_head, node.args[::2]))
        if node.op == "or":
            first, second = node.args
            is_known = self._is_exact_per_head(first) and self.is_exact(second)
            return is_known and chooses_after(first, second) and self._adds_up(first, second)
        if node.op == "top":
            x, number = node.args
            taken_set = x.args[1].args[0] if x.left_over else node
            is_known = self.is_known(number) and present_outside(x, taken_set)
            return is_known and ("layer" not in node.axes or self._numbers.is_constant(number))
        if node.op == "not":
            return self._is_exact_per_head(node.args[0])
        return node.op in ("all", "truth")

    def _adds_up(self, *sets: Node) -> bool:
        """Whether each head has room for what the sets take, or heads that are alike are full."""
        sizes, tokens = [self.size(part) for part in sets], [high for _, high in self._lengths]
        heads = zip(*(size.head for size in sizes), tokens, strict=True)
        fits = all(sum(numbers) <= high for *numbers, high in heads)
        return fits or all(self._kv * sum(size.head) == size.total for size in sizes)

    def is_known(self, node: Node) -> bool:
        """Whether a number or condition per layer or KV head is known before the prefill."""
        return self._numbers.is_static(node) or _differs_by_head(node)

    def _holds(self, taken: Size, budget: Node) -> bool:
        """Whether each KV head keeps its budget, which is never less than what it has taken."""
        return all(self._numbers.of(budget, i)[0] >= most for i, most in enumerate(taken.head))

    def _is_exact_per_head(self, node: Node) -> bool:
        sort_axes = [part.axes for part in nodes_of([node]) if part.operation.sorts]
        return all(axes == ("token",) for axes in sort_axes) and self.is_exact(node)

    def size(self, node: Node) -> Size:
        """Bounds on the entries of a token set, broadcast to every KV head."""
        cases: dict[str, Callable[[Node], Size]] = {
            "top": self._top,
            "fill": self._fill,
            "or": self._or,
            "and": self._and,
            "not": self._not,
            "choose": self._choose,
            "truth": self._truth,
        }
        return cases.get(node.op, self._everything)(node)

    def _bounded(self, head: Sequence[Number], layer: Sequence[Number], total: Number) -> Size:
        """A size from three bounds, each tightened by the others."""
        heads = [whole(h, high) for h, (_, high) in zip(head, self._lengths, strict=True)]
        layers = [whole(n, self._kv * h) for n, h in zip(layer, heads, strict=True)]
        return Size(heads, layers, whole(total, sum(layers)))

    def _everything(self, node: Node) -> Size:
        return self._bounded([math.inf] * self._layers, [math.inf] * self._layers, math.inf)

    def _truth(self, node: Node) -> Size:
        if node.value:
            return self._everything(node)
        return Size([0] * self._layers, [0] * self._layers, 0)

    def _or(self, node: Node) -> Size:
        return self._union(self.size(node.args[0]), self.size(node.args[1]))

    def _union(self, a: Size, b: Size) -> Size:
        return self._bounded(*_joined(add, a, b), a.total + b.total)

    def _and(self, node: Node) -> Size:
        a, b = self.size(node.args[0]), self.size(node.args[1])
        return self._bounded(*_joined(min, a, b), min(a.total, b.total))

    def _not(self, node: Node) -> Size:
        if not self.is_exact(node):
            return self._everything(node)
        size, tokens = self.size(node.args[0]), [n for n, _ in self._lengths]
        layer = [self._kv * n - taken for n, taken in zip(tokens, size.layer, strict=True)]
        # Some head may hold fewer entries than the most of one, and leave more over.
        head = [min(n, rest) for n, rest in zip(tokens, layer, strict=True)]
        if sum(size.layer) == self._kv * sum(size.head):
            head = [n - taken for n, taken in zip(tokens, size.head, strict=True)]
        return self._bounded(head, layer, math.inf)

    def _choose(self, node: Node) -> Size:
        a, b = self.size(node.args[0]), self.size(node.args[2])
        if self._numbers.is_static(node.args[1]):
            chosen = [a if self._numbers.value(node.args[1], i) else b for i in range(self._layers)]
            head = [size.head[i] for i, size in enumerate(chosen)]
            layer = [size.layer[i] for i, size in enumerate(chosen)]
            layer_sizes = list(zip(layer, chosen, strict=True))
            sums = ((x.total, sum(n for n, size in layer_sizes if size is x)) for x in (a, b))
            return self._bounded(head, layer, sum(map(min, sums)))
        if _differs_by_head(node.args[1]):
            return self._by_head(node.args[1], a, b)
        # If the condition differs between tokens or heads, some take one set, some the other.
        axes, union = node.args[1].type.axes, self._union(a, b)
        if "token" in axes:
            return union
        head, layer = _joined(max, a, b)
        return self._bounded(head, union.layer if "kv" in axes else layer, union.total)

    def _by_head(self, table: Node, a: Size, b: Size) -> Size:
        """Bounds on `a` at the KV heads for which a head table holds, `b` at the others."""
        head, layer = [], []
        for i in range(self._layers):
            holds = self._numbers.of_heads(table, i)
            first = sum(map(bool, holds))
            numbers = [(a, first), (b, len(holds) - first)]
            head.append(max(size.head[i] for size, number in numbers if number))
            layer.append(
                sum(min(number * size.head[i], size.layer[i]) for size, number in numbers if number)
            )
        return self._bounded(head, layer, a.total + b.total)

    def _top(self, node: Node) -> Size:
        counts = [max(0, self._numbers.of(node.args[1], i)[1]) for i in range(self._layers)]
        if "token" not in node.axes:
            return self._winners(node, counts)
        if "layer" in node.axes:
            per_head = 1 if "kv" in node.axes else self._kv
            return self._bounded(counts, [math.inf] * self._layers, per_head * max(counts))
        if "kv" in node.axes:
            return self._bounded(counts, counts, sum(counts))
        number = node.args[1]
        total = self._total(number) if self._positive(number) else math.inf
        return self._bounded(counts, self._each([0] * self._layers, number, counts), total)

    def _each(self, taken: Sequence[int], number: Node, most: Sequence[Number]) -> list[Number]:
        """[L] bounds on entries summed over KV heads, each of which has `number` or has taken more.

        Args:
            taken: [L] entries that one KV head has taken at most.
            most: [L] bounds on the entries of one KV head in the end.
        """
        if not _differs_by_head(number):
            return [self._kv * n for n in most]
        tokens = [high for _, high in self._lengths]
        heads = [self._numbers.of_heads(number, layer) for layer in range(self._layers)]
        return [
            sum(max(least, whole(n, high)) for n in own)
            for least, own, high in zip(taken, heads, tokens, strict=True)
        ]

    def _winners(self, node: Node, counts: Sequence[Number]) -> Size:
        """Bounds on a `top` in which heads or layers, not tokens, compete."""
        tokens = [high for _, high in self._lengths]
        heads = 1 if "kv" in node.axes else self._kv
        per_layer = [heads * product(n, length) for n, length in zip(counts, tokens, strict=True)]
        total = sum(per_layer)
        if "layer" in node.axes:
            total = heads * product(max(counts), max(tokens))
        return self._bounded(tokens, per_layer, total)

    def _fill(self, node: Node) -> Size:
        _, taken_set, budget = filling(node)
        taken_size, layers = self.size(taken_set), range(self._layers)
        high = [max(0, self._numbers.of(budget, i)[1]) for i in layers]
        low = [self._numbers.of(budget, i)[0] for i in layers]
        sums = [self._heads_sum(budget, i) for i in layers]
        total = self._total(budget)
        if not self._holds(taken_size, budget):  # each head keeps max(taken, budget)
            sums = [taken_size.layer[i] + (sums[i] if low[i] >= 0 else math.inf) for i in layers]
            total = taken_size.total + (total if min(low) >= 0 else math.inf)
        head = [max(taken_size.head[i], high[i]) for i in layers]
        if "layer" in node.axes:
            # One layer may win the budgets of all layers.
            total = min(total, sum(sums))
            return self._bounded([math.inf] * self._layers, [total] * self._layers, total)
        if "kv" in node.axes:
            sums = [min(sums[i], self._kv * head[i]) for i in layers]
            return self._bounded([math.inf] * self._layers, sums, total)
        sums = [*map(min, sums, self._each(taken_size.head, budget, head))]
        return self._bounded(head, sums, total)

    # Sums of numbers over KV heads and layers.

    def _heads_sum(self, node: Node, layer: int) -> Number:
        """Upper bound on the node's values at one layer, summed over the G KV heads."""
        return self._sum_of_heads(node, self._numbers.alike(node, layer))

    @once
    def _sum_of_heads(self, node: Node, layer: int) -> Number:
        if node.op == "head_table" and node.type.axes == ("kv",):
            return sum(self._numbers.of_heads(node, layer))
        if node.op == "choose" and self._numbers.is_static(node.args[1]):
            chosen = node.args[0 if self._numbers.value(node.args[1], layer) else 2]
            return self._heads_sum(chosen, layer)
        linear_bound = self._linear(
            node,
            lambda x: self._heads_sum(x, layer),
            lambda x: self._kv * self._numbers.of(x, layer)[0],
            self._kv,
            lambda x: self._wins(x, layer),
        )
        return min(self._kv * self._numbers.of(node, layer)[1], linear_bound)

    def _total(self, node: Node) -> Number:
        """Upper bound on the node's values, summed over layers and KV heads."""
        layers = range(self._layers)
        return min(
            sum(self._heads_sum(node, i) for i in layers),
            self._linear(
                node,
                self._total,
                lambda x: sum(self._kv * self._numbers.of(x, i)[0] for i in layers),
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
        fallback: Callable[[Node], Number],
    ) -> Number:
        """Upper bound on a sum of the node's values, moved into arguments of linear operations.

        Args:
            upper, lower: bounds on the same sum of another node.
            values: number of values in the sum.
            fallback: upper bound for operations into which the sum cannot be moved.
        """
        args = node.args
        if node.op == "add":
            return upper(args[0]) + upper(args[1])
        if node.op == "subtract":
            return upper(args[0]) - lower(args[1])
        if node.operation.rounds_up_by is not None:
            return upper(args[0]) + values * node.operation.rounds_up_by
        if node.operation.scales:
            commutative = node.operation.commutative
            factor, x = (
                (args[1], args[0]) if self._numbers.is_constant(args[1]) else (args[0], args[1])
            )
            if self._numbers.is_constant(factor) and (commutative or factor is args[1]):
                scale = self._numbers.value(factor, 0)
                if scale > 0:
                    return upper(x) * scale if commutative else upper(x) / scale
        if node.op == "choose" and self._numbers.is_constant(args[1]):
            return upper(args[0] if self._numbers.value(args[1], 0) else args[2])
        if node.op == "minimum":
            return min(upper(args[0]), upper(args[1]))
        if node.op == "maximum" and self._positive(args[0]) and self._positive(args[1]):
            return upper(args[0]) + upper(args[1])
        return fallback(node)

    @once
    def _positive(self, node: Node) -> bool:
        return all(self._numbers.of(node, i)[0] >= 0 for i in range(self._layers))

    def _wins(self, node: Node, layer: int) -> Number:
        """Upper bound that the operation itself sets on a sum over KV heads, or inf."""
        if node.op == "divide" and "kv" in node.args[1].axes and self._numbers.normalises(node):
            return 1
        if node.op != "count" or node.args[0].op != "top":
            return math.inf
        top = node.args[0]
        if "kv" not in top.axes or "kv" in node.axes:
            return math.inf
        return self._numbers.winners(node, layer)

    def _shares(self, node: Node) -> Number:
        """Upper bound that the operation itself sets on a sum over layers and KV heads, or inf."""
        repeats = 1 if "kv" in node.type.axes else self._kv
        if node.operation.shares_out:
            return repeats * max(0, self._numbers.of(node.args[0], 0)[1])
        if node.op == "divide" and self._numbers.normalises(node) and "layer" in node.args[1].axes:
            return self._kv
        if node.op == "count" and node.args[0].op == "top" and "layer" not in node.axes:
            return self._all_wins(node)
        return math.inf

    def _all_wins(self, node: Node) -> Number:
        """Upper bound on a count of winners, summed over layers and KV heads."""
        top, layers = node.args[0], range(self._layers)
        number, contests = top.args[1], max(self._numbers.contests(node, i) for i in layers)
        heads_compete = "kv" in top.axes and "kv" not in node.axes
        if "layer" in top.axes:
            # The winners of a smaller n are among those of the largest.
            most = max(0, *(self._numbers.of(number, i)[1] for i in layers))
            return product(most, contests) * (1 if heads_compete else self._kv)
        if heads_compete and self._positive(number):
            return product(self._total(number) / self._kv, contests)
        return math.inf


def _differs_by_head(node: Node) -> bool:
    """Whether a head table says what each KV head takes."""
    return node.op == "head_table" and node.type.axes == ("kv",)


def max_entries(bound: Bound, prompt: int) -> int:
    """Upper bound on the entries kept for a prompt, summed over layers and KV heads.

    Exact where budgets are known before the prefill; a proven bound where they depend on data
    (normalised shares, `split`, competition between heads); else everything.
    """
    return Bounds(bound, prompt).kept.total
