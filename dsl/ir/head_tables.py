"""Values that follow from tensors of the model, known for every layer and head before a prefill.

Dimensions: L layers, G KV heads, R query heads per KV head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from itertools import product

from kvpolicy.dsl.ir import counts
from kvpolicy.dsl.ir.host import Evaluator, NotStatic, Value, combined, reduced
from kvpolicy.dsl.ir.nodes import HeadTable, ModelShape, Node, When
from kvpolicy.dsl.ir.once import once
from kvpolicy.dsl.ops.operations import Kind

_AXES = ("layer", "kv", "group")
# Operations that have no form for numbers of the host.
_OPERATIONS = ("data", "index", "rank", "top")

# A layer, a KV head, and a query head among those that read it.
_Place = tuple[int, int, int]
_Values = dict[_Place, Value | None]


def has_head_table(node: Node) -> bool:
    """Whether `HeadTables` can compute a value: data decide it, and each step works on numbers."""
    return node.when is When.LOAD and node.reads_data and all(map(_is_computed, node.walk()))


def _is_computed(node: Node) -> bool:
    row = node.operation
    if node.reads_data:
        fills_budget = node.op == "top" and len(node.args) == 1
        steps = row.elementwise or row.is_reduction or node.op in _OPERATIONS
        return steps and not fills_budget
    known = row.known_to_host or row.kind is Kind.BRANCH or row.shares_out or node.op == "at"
    return (known or row.host is not None) and not node.type.axes


class HeadTables:
    """The values of nodes at every layer and head.

    Args:
        shape: of the model.
        number: gives the values of scalars that no tensor decides, see `host.evaluator`.
        tensors: those that come with the model, by name.
    """

    def __init__(
        self, shape: ModelShape, number: Evaluator, tensors: Mapping[str, HeadTable]
    ) -> None:
        self._number, self._tensors = number, tensors
        self._sizes = (shape.layers, shape.kv_heads, shape.group)
        layers, heads, members = map(range, self._sizes)
        self._places: list[_Place] = [*product(layers, heads, members)]

    def of(self, node: Node) -> HeadTable:
        """The table of a node that `has_head_table`."""
        values, axes = self._values(node), node.type.axes
        layers = range(self._sizes[0])
        rows = (tuple(values[place] for place in self._places_of(axes, i)) for i in layers)
        return HeadTable(axes, tuple(rows))

    def _places_of(self, axes: Sequence[str], layer: int) -> list[_Place]:
        """The places of a layer along some axes, the first ones along the others."""
        ranges = [
            range(size if axis in axes else 1)
            for axis, size in zip(_AXES[1:], self._sizes[1:], strict=True)
        ]
        return [(layer, kv, member) for kv, member in product(*ranges)]

    @once
    def _values(self, node: Node) -> _Values:
        if not node.reads_data:
            by_layer = [self._scalar(node, layer) for layer in range(self._sizes[0])]
            return {place: by_layer[place[0]] for place in self._places}
        if node.op == "data":
            return self._delivered(self._tensors[node.symbol])
        args = [self._values(arg) for arg in node.args]
        if node.operation.is_reduction:
            return self._by_contest(node.axes, partial(_reduced, node, args[0]))
        if node.op in ("rank", "top"):
            return self._by_contest(node.axes, partial(_sorted, node, args))
        if node.op == "index":
            axis = _AXES.index(node.axes[0])
            return {place: Fraction(place[axis]) for place in self._places}
        return {place: combined(node, [arg[place] for arg in args]) for place in self._places}

    def _scalar(self, node: Node, layer: int) -> Value | None:
        try:
            return self._number(node, layer)
        except NotStatic:  # it is absent
            return None

    def _delivered(self, tensor: HeadTable) -> _Values:
        values: _Values = {}
        for layer, numbers in enumerate(tensor.layers):
            values.update(zip(self._places_of(tensor.axes, layer), numbers, strict=True))
        heads = [axis in tensor.axes for axis in _AXES[1:]]
        return {
            (layer, kv, member): values[layer, kv * heads[0], member * heads[1]]
            for layer, kv, member in self._places
        }

    def _by_contest(
        self, axes: tuple[str, ...], decide: Callable[[list[_Place]], _Values]
    ) -> _Values:
        """What is decided among the places that differ in some axes alone, for each such group.

        Places of a group come in the order of the axes as written, the last running fastest.
        """
        order = [_AXES.index(axis) for axis in axes]
        groups: dict[tuple[int, ...], list[_Place]] = {}
        for place in sorted(self._places, key=lambda place: [place[i] for i in order]):
            key = tuple(i for axis, i in enumerate(place) if axis not in order)
            groups.setdefault(key, []).append(place)
        result: _Values = {}
        for places in groups.values():
            result.update(decide(places))
        return result


def _reduced(node: Node, x: _Values, places: list[_Place]) -> _Values:
    return dict.fromkeys(places, reduced(node, [x[place] for place in places]))


def _sorted(node: Node, args: list[_Values], places: list[_Place]) -> _Values:
    """`top` or `rank` among places: higher numbers first, equal ones in the order of places."""
    numbers = {place: args[0][place] for place in places}
    present = {place: -counts.ordered(x) for place, x in numbers.items() if x is not None}
    ranks = {place: rank for rank, place in enumerate(sorted(present, key=present.__getitem__))}
    if node.op == "rank":
        return {place: Fraction(ranks[place] + 1) if place in ranks else None for place in places}
    sizes = [counts.whole(args[1][place] or 0, len(places)) for place in places]
    pairs = zip(places, sizes, strict=True)
    return {place: place in ranks and ranks[place] < size for place, size in pairs}
