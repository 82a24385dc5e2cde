"""Expressions over two vectors per entry, from inner products found in few passes over them.

The two vectors are those of two layers in `share`, of a dropped entry and its receiver in `merge`.
An expression that adds them, multiplies and divides them by numbers per entry, and multiplies them
with each other only below `sum[dim]`, needs three inner products per entry: each vector in it is
a * first + b * second, and the inner product of two such vectors follows from the three. `angle`,
`slerp`, `cosine`, `unit` and `norm2` are of this kind; torch computes all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from kvpolicy.dsl.execute.layer.evaluate import Evaluation
from kvpolicy.dsl.execute.operations.table import TORCH_FORMS
from kvpolicy.dsl.execute.tensors.values import Value, as_tensor, filled
from kvpolicy.dsl.ir.nodes import Node

_ONE, _ZERO = Value(1.0, finite=True), Value(0.0, finite=True)


Side = Callable[[Node], int | None]


def is_combination(node: Node, side: Side) -> bool:
    """Whether a node is a vector a * first + b * second with numbers a and b.

    Args:
        side: as in `Combinations`.
    """

    def number(operand: Node) -> bool:
        return "dim" not in operand.type.axes

    def vector(operand: Node) -> bool:
        return is_combination(operand, side)

    if number(node) or node.type.absent:
        return False
    if side(node) is not None:
        return True
    if node.operation.sums:
        return all(vector(operand) for operand in node.args)
    if node.operation.scales:
        x, y = node.args
        number_first = node.operation.commutative and number(x) and vector(y)
        return number_first or (vector(x) and number(y))
    if node.op == "choose":
        x, condition, y = node.args
        return vector(x) and number(condition) and vector(y)
    return False


def is_product(node: Node, side: Side) -> bool:
    """Whether a node is the inner product of two combinations."""
    if node.op != "sum" or node.axes != ("dim",):
        return False
    operand = node.args[0]
    if operand.op == "power":
        exponent = operand.args[1]
        return (
            exponent.op == "number"
            and exponent.value == 2
            and is_combination(operand.args[0], side)
        )
    return operand.op == "multiply" and all(is_combination(x, side) for x in operand.args)


@dataclass(frozen=True)
class Combination:
    """The vector a * first + b * second; a and b have no axis `dim`, None stands for 0."""

    a: Value | None
    b: Value | None

    def each(self, function: Callable[[Value], Value]) -> Combination:
        """`function` applied to a and b."""
        return Combination(*(None if x is None else function(x) for x in (self.a, self.b)))


@dataclass
class Combinations:
    """Values of expressions over two vectors per entry.

    Attributes:
        evaluation: gives other values, and gets the inner products by `prepare`.
        side: 0 for a node that is the first vector, 1 for the second, None for any other.
        inner: makes the inner products of the first with itself, of both, and of the second with
            itself; called at most once.
    """

    evaluation: Evaluation
    side: Side
    inner: Callable[[], Sequence[Value]]
    _inner_products: Sequence[Value] | None = None
    _known: dict[Node, Combination] = field(default_factory=dict)

    def prepare(self, nodes: Iterable[Node]) -> None:
        """Puts the inner products among nodes, given arguments first, into the evaluation."""
        for node in nodes:
            if is_product(node, self.side):
                self.evaluation.set_value(node, self._product(node.args[0]))

    def weights(self, node: Node) -> tuple[Value, Value] | None:
        """a and b of a vector; None if it is no combination."""
        if not is_combination(node, self.side):
            return None
        combination = self._vector(node)
        return combination.a or _ZERO, combination.b or _ZERO

    def _vector(self, node: Node) -> Combination:
        if node not in self._known:
            self._known[node] = self._find(node)
        return self._known[node]

    def _find(self, node: Node) -> Combination:
        side = self.side(node)
        if side is not None:
            return Combination(None, _ONE) if side else Combination(_ONE, None)
        if node.op == "choose":
            return self._chosen(node)
        x, *rest = node.args
        if not rest:  # `negate`
            return self._vector(x).each(lambda value: self._call(node, value))
        if node.operation.sums:
            return self._joined(node, self._vector(x), self._vector(*rest))
        vector, factor = (x, *rest) if "dim" in x.type.axes else (*rest, x)
        number = self.evaluation.value(factor)
        return self._vector(vector).each(lambda value: self._call(node, value, number))

    def _joined(self, node: Node, x: Combination, y: Combination) -> Combination:
        def combined(x_weight: Value | None, y_weight: Value | None) -> Value | None:
            if x_weight is None and y_weight is None:
                return None
            return self._call(node, x_weight or _ZERO, y_weight or _ZERO)

        return Combination(combined(x.a, y.a), combined(x.b, y.b))

    def _chosen(self, node: Node) -> Combination:
        x, y = self._vector(node.args[0]), self._vector(node.args[2])
        condition = self.evaluation.value(node.args[1])
        pairs = ((x.a, y.a), (x.b, y.b))
        # The node chooses between vectors; here it chooses between their weights.
        axes = tuple(axis for axis in node.type.axes if axis != "dim")
        node = replace(node, type=replace(node.type, axes=axes))
        return Combination(
            *(
                self._call(node, x_weight or _ZERO, condition, y_weight or _ZERO)
                for x_weight, y_weight in pairs
            )
        )

    def _product(self, node: Node) -> Value:
        """The inner product of two vectors."""
        x = y = self._vector(node.args[0])
        if node.op == "multiply":
            y = self._vector(node.args[1])
        if self._inner_products is None:
            self._inner_products = self.inner()
        first, cross, second, *_ = self._inner_products
        terms = ((x.a, y.a, first), (x.a, y.b, cross), (x.b, y.a, cross), (x.b, y.b, second))
        total = None
        for a, b, inner in terms:
            if a is not None and b is not None:
                part = self._times(self._times(a, b), inner)
                total = part if total is None else self._call("add", total, part)
        if total is None:
            return _ZERO
        # As any sum, an inner product of absent values is 0.
        data = filled(replace(total, data=as_tensor(total.data, self.evaluation.frame)), 0.0)
        return Value(data, total.axes, finite=total.finite)

    def _times(self, x: Value, y: Value) -> Value:
        return y if x is _ONE else x if y is _ONE else self._call("multiply", x, y)

    def _call(self, node: Node | str, *args: Value) -> Value:
        node = Node(node) if isinstance(node, str) else node
        return TORCH_FORMS[node.op](node, self.evaluation.frame, *args)
