"""Work of computing a value of a policy: operations and bytes, which `gpu.py` turns into seconds.

The work is that of the definition, divided as generated kernels divide it. A multiplication and an
addition of a matrix product count as 2; any other step as 1 per value, pooling as its width; a
selection of the best of M values as log2(M) per value. `logits` take one pass over the keys;
attention takes two, one for the sums of its softmax, unless the prefill's own attention hands these
over. Pairs of a query and a later token do not count. Values with an axis `query`, `dim` or
`channel` never leave a kernel; other values are read and written as float64.

Dimensions: L layers, H query heads, G KV heads, N tokens of a layer, D head size, W queries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpolicy.dsl.ir.counts import whole
from kvpolicy.dsl.ir.nodes import Node
from kvpolicy.dsl.ir.once import once
from kvpolicy.dsl.ops.operations import Kind

if TYPE_CHECKING:
    from kvpolicy.dsl.bind.bind import Bound

SOFTMAX = 5  # scale, subtract, exponential, sum, divide

_INSIDE = frozenset(("query", "dim", "channel"))
_VALUE = 8  # bytes of float64
_PASSES = 4  # of a selection over its candidates


@dataclass(frozen=True)
class Work:
    """Operations, and bytes that are read or written.

    Attributes:
        matrix: multiplications and additions of matrix products.
        vector: all other operations.
        moved: bytes.
    """

    matrix: float = 0.0
    vector: float = 0.0
    moved: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.matrix + other.matrix, self.vector + other.vector, self.moved + other.moved
        )

    @property
    def operations(self) -> float:
        """Operations of both kinds."""
        return self.matrix + self.vector


class Sizes:
    """Sizes of the values of one layer, and the work of computing them.

    Args:
        prompt: N tokens of the prompt.
        layer: from 0.
        length: tokens that reach the layer.
        kept: entries that stay per KV head; the others are dropped.
        element: bytes of one number of queries, keys and values.
        step: whether it is a decode step, where every query sees all entries.
        attended: whether attention hands over the log-sum-exp of its logits.
    """

    def __init__(
        self,
        bound: Bound,
        prompt: int,
        layer: int,
        length: int,
        kept: int,
        element: int,
        *,
        step: bool = False,
        attended: bool = False,
    ) -> None:
        shape = bound.shape
        self.bound, self.prompt, self.layer, self.element = bound, prompt, layer, element
        self.step, self.attended = step, attended
        self.tokens, self.kept = length, min(kept, length)
        self.axes: Mapping[str, int] = {
            "kv": shape.kv_heads,
            "group": shape.group,
            "token": length,
            "dim": shape.head_dim,
            "past": shape.layers,
            "layer": shape.layers,
            "dropped": max(0, length - kept),
        }

    @once
    def queries(self, node: Node) -> int:
        """Size of the axis `query` of a value: that of its widest window."""
        if node.operation.is_window:
            return self.window(node)
        return max(map(self.queries, node.args), default=0)

    def window(self, node: Node) -> int:
        """Number of queries of one window."""
        if self.step and not node.args:
            return 1
        return self.bound.window(node, self.prompt, self.layer, self.tokens)

    def elements(self, node: Node) -> float:
        """Number of elements of a value; pairs of a query and a later token do not count."""
        axes = set(node.type.axes)
        size = float(math.prod(self.axes.get(axis, 1) for axis in axes - {"query", "token"}))
        if "query" not in axes:
            return size * (self.tokens if "token" in axes else 1)
        queries = self.queries(node)
        return size * (self.pairs(queries) if "token" in axes else queries)

    def pairs(self, queries: int) -> float:
        """Number of pairs of one of the last `queries` queries and a token that it sees."""
        if self.step:
            return float(queries * self.tokens)
        return queries * self.tokens - queries * (queries - 1) / 2

    def work(self, node: Node) -> Work:
        """Work of computing a value at one layer from its arguments."""
        size, arg_size = self.elements(node), max(map(self.elements, node.args), default=0.0)
        keys = self.axes["kv"] * self.tokens * self.axes["dim"] * self.element
        row = node.operation
        if row.reads_queries:
            passes = 2 if row.softmax and not self.attended else 1
            softmax = SOFTMAX * size if row.softmax else 0.0
            queries = self.axes["kv"] * self.axes["group"] * self.queries(node) * self.axes["dim"]
            moved = passes * keys + queries * self.element
            return Work(2 * passes * size * self.axes["dim"], softmax, moved)
        if row.kind is Kind.VECTOR:
            return Work(moved=keys)
        if node.op == "nearest":
            return self._nearest()
        inner_axes = _INSIDE & set(node.type.axes)
        if row.sorts:
            return Work(vector=arg_size * self._order(node), moved=_PASSES * _VALUE * arg_size)
        read_size = sum(self.elements(x) for x in node.args if not _INSIDE & set(x.type.axes))
        steps = size * self._width(node) if row.kind is Kind.POOL else max(size, arg_size)
        return Work(vector=steps, moved=0.0 if inner_axes else _VALUE * (size + read_size))

    def _width(self, node: Node) -> int:
        """Neighbours that pooling looks at."""
        width = self.bound.number(node.args[1], self.prompt, self.layer, length=self.tokens)
        return whole(width, 2 * self.tokens)

    def _order(self, node: Node) -> float:
        """Steps per value of a selection: log2 of the number of values that compete, at least 1."""
        competitors = math.prod(self.axes[axis] for axis in node.axes or ("token",))
        return max(1.0, math.log2(max(2, competitors)))

    def _nearest(self) -> Work:
        """Work of `nearest`: cosines of every dropped entry with every kept one."""
        pairs = float(self.axes["kv"] * self.kept * self.axes["dropped"])
        size = self.axes["dim"]
        moved = self.axes["kv"] * self.tokens * size * self.element
        return Work(2 * pairs * size, pairs, moved)
