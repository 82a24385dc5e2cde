"""Expressions over two vectors per entry as sums of both: what needs few passes over them.

The two are those of two layers in `share`, of a dropped entry and its receiver in `merge`. An
expression that adds them, multiplies and divides them by numbers per entry, and multiplies them
with each other only below `sum[dim]`, is known from three inner products per entry: a vector is
a * first + b * second, and an inner product of two such is made of the three. `angle`, `slerp`,
`cosine`, `unit` and `norm2` are of this kind; what is not is left to torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from kvpolicy.dsl.ir import Node
from kvpolicy.dsl.torch_evaluate import Evaluation
from kvpolicy.dsl.torch_ops import OPERATIONS
from kvpolicy.dsl.torch_values import Value, as_tensor, filled

_ONE, _ZERO = Value(1.0, finite=True), Value(0.0, finite=True)


@dataclass(frozen=True)
class Combination:
    """a * first + b * second; values without the axis `dim`, None for 0."""

    a: Value | None
    b: Value | None

    def each(self, function: Callable[[Value], Value]) -> Combination:
        """The same done to both."""
        return Combination(*(None if x is None else function(x) for x in (self.a, self.b)))


@dataclass
class Combinations:
    """Values of expressions over two vectors per entry.

    Attributes:
        evaluation: it finds here the inner products that it needs.
        side: 0 for a node that is the first vector, 1 for the second, None for any other.
        inner: makes the inner products of the first with itself, with the second, and of the second
            with itself; called at most once.
    """

    evaluation: Evaluation
    side: Callable[[Node], int | None]
    inner: Callable[[], Sequence[Value]]
    _made: Sequence[Value] | None = None
    _known: dict[int, Combination | None] = field(default_factory=dict)

    def prepare(self, nodes: Iterable[Node]) -> None:
        """Makes the inner products among some nodes, arguments first, known to the evaluation."""
        for node in nodes:
            if node.op == "sum" and node.axes == ("dim",):
                found = self._product(node.args[0])
                if found is not None:
                    self.evaluation.known[id(node)] = found

    def weights(self, node: Node) -> tuple[Value, Value] | None:
        """a and b of a vector; None where it is not of this kind."""
        found = self._vector(node)
        return None if found is None else (found.a or _ZERO, found.b or _ZERO)

    def _vector(self, node: Node) -> Combination | None:
        if id(node) not in self._known:
            self._known[id(node)] = self._find(node)
        return self._known[id(node)]

    def _find(self, node: Node) -> Combination | None:
        if "dim" not in node.type.axes or node.type.absent:
            return None
        side = self.side(node)
        if side is not None:
            return Combination(None, _ONE) if side else Combination(_ONE, None)
        if node.op == "choose":
            return self._chosen(node)
        if node.op not in ("negate", "add", "subtract", "multiply", "divide"):
            return None
        parts = [self._vector(each) for each in node.args]
        if node.op in ("add", "subtract"):
            return None if None in parts else self._joined(node, *parts)
        if node.op == "negate":
            return parts[0] and parts[0].each(lambda x: self._call(node, x))
        if node.op == "multiply" and parts[0] is None:
            return self._scaled(node, parts[1], node.args[0])
        return self._scaled(node, parts[0], node.args[1])

    def _scaled(self, node: Node, vector: Combination | None, by: Node) -> Combination | None:
        if vector is None or "dim" in by.type.axes:
            return None
        number = self.evaluation.value(by)
        return vector.each(lambda x: self._call(node, x, number))

    def _joined(self, node: Node, x: Combination, y: Combination) -> Combination:
        def both(one: Value | None, other: Value | None) -> Value | None:
            if one is None and other is None:
                return None
            return self._call(node, one or _ZERO, other or _ZERO)

        return Combination(both(x.a, y.a), both(x.b, y.b))

    def _chosen(self, node: Node) -> Combination | None:
        x, y = self._vector(node.args[0]), self._vector(node.args[2])
        if x is None or y is None or "dim" in node.args[1].type.axes:
            return None
        condition = self.evaluation.value(node.args[1])
        pairs = ((x.a, y.a), (x.b, y.b))
        return Combination(
            *(self._call(node, one or _ZERO, condition, other or _ZERO) for one, other in pairs)
        )

    def _product(self, node: Node) -> Value | None:
        """The inner product of two vectors; None where they are not of this kind."""
        if node.op == "power" and node.args[1].op == "number" and node.args[1].value == 2:
            x = y = self._vector(node.args[0])
        elif node.op == "multiply":
            x, y = (self._vector(each) for each in node.args)
        else:
            return None
        if x is None or y is None:
            return None
        if self._made is None:
            self._made = self.inner()
        own, cross, other = self._made
        terms = ((x.a, y.a, own), (x.a, y.b, cross), (x.b, y.a, cross), (x.b, y.b, other))
        total = None
        for a, b, inner in terms:
            if a is not None and b is not None:
                part = self._call("multiply", self._call("multiply", a, b), inner)
                total = part if total is None else self._call("add", total, part)
        if total is None:
            return _ZERO
        # As any sum, that of absent numbers is 0.
        data = filled(replace(total, data=as_tensor(total.data, self.evaluation.frame)), 0.0)
        return Value(data, total.axes, finite=total.finite)

    def _call(self, node: Node | str, *args: Value) -> Value:
        node = Node(node) if isinstance(node, str) else node
        return OPERATIONS[node.op](node, self.evaluation.frame, *args)
