"""Makes IR nodes: shares equal ones, derives when they are known, and limits their number."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction

from kvpolicy.dsl.ir.host import NotStatic, Value, evaluator
from kvpolicy.dsl.ir.nodes import AXES, Extent, Node, Type, When
from kvpolicy.dsl.ir.once import once
from kvpolicy.dsl.ops.operations import Kind, Operation
from kvpolicy.dsl.ops.table import OPERATIONS
from kvpolicy.dsl.syntax.source import Span

MAX_NODES = 10_000
MAX_DEPTH = 200

_WITH_EXTENT = ("query", "past")


class TooLarge(Exception):
    """The policy's graph exceeds the limits."""


def in_order(axes: Iterable[str]) -> tuple[str, ...]:
    """Axes without repetition, in the canonical order."""
    present = set(axes)
    return tuple(axis for axis in AXES if axis in present)


def union(nodes: Iterable[Node]) -> tuple[str, ...]:
    """The axes of nodes that are combined by name, in the canonical order."""
    return in_order(axis for node in nodes for axis in node.type.axes)


def extents(nodes: Iterable[Node], axis: str) -> list[Extent]:
    """The different extents of an axis among nodes; at most one, if they can be combined."""
    axis_extents = (node.type.extent(axis) for node in nodes)
    return list(dict.fromkeys(extent for extent in axis_extents if extent is not None))


def _extent(
    axis: str, result: tuple[str, ...], extent: Extent | None, args: tuple[Node, ...]
) -> Extent | None:
    if axis not in result:
        return None
    if extent is not None and extent.axis == axis:
        return extent
    return next(iter(extents(args, axis)), None)


class Graph:
    """The nodes of one program. Equal operations on equal arguments are one node."""

    def __init__(self) -> None:
        self.nodes: dict[tuple[object, ...], Node] = {}
        self.depths: dict[Node, int] = {}
        self._literals = evaluator({})
        self._numbered: dict[tuple[object, ...], int] = {}

    def make(
        self,
        op: str,
        args: tuple[Node, ...] = (),
        *,
        kind: str = "number",
        axes: tuple[str, ...] | None = None,
        over: tuple[str, ...] = (),
        unit: str | None = None,
        absent: bool | None = None,
        value: Fraction | bool | str | None = None,
        when: When = When.LOAD,
        exact: bool | None = None,
        span: Span | None = None,
        extent: Extent | None = None,
    ) -> Node:
        """A node whose type, unless given, follows from its arguments.

        `axes` are the result's, `over` the operation's own; `when` is the earliest moment apart
        from the arguments; `absent` defaults to whether an argument may be absent; `extent` is
        that of an axis which the operation makes. The arguments have at most one of each axis'
        `extents`.

        Raises:
            TooLarge: the graph has too many nodes or is too deep.
        """
        row = OPERATIONS[op]
        result = union(args) if axes is None else axes
        if absent is None:
            absent = any(arg.type.absent for arg in args)
        if exact is None:
            exact = row.exact
        exact = exact and not result and all(arg.type.exact for arg in args)
        when = max([when, *(arg.when for arg in args)])
        if "layer" in over or row.across_layers:
            when = self._across_layers(row, when)
        window, reach = (_extent(axis, result, extent, args) for axis in _WITH_EXTENT)
        type_ = Type(kind, result, unit, absent, exact, window, reach)
        key: tuple[object, ...] = (op, args, over, type(value), value, type_, when)
        if op == "top":  # kept apart, so that messages find each where it was written
            key += (span,)
        if key not in self.nodes:
            node = Node(op, args, over, value, type=type_, when=when, span=span)
            self._register(node)
            self.nodes[key] = node
        return self.nodes[key]

    def literal(self, node: Node) -> Value | None:
        """The value of a node that literals alone decide; None: another node."""
        try:
            return self._literals(node)
        except NotStatic:
            return None

    @once
    def definition_id(self, node: Node) -> int:
        """A number that expressions of the same definition share.

        Literals are computed; names of lets and the order of commutative arguments do not matter.
        Two parameters never share it, because they may be set apart.
        """
        parts = [self.definition_id(arg) for arg in node.args]
        if node.operation.commutative:
            parts.sort()
        key: tuple[object, ...] = (node.op, type(node.value), node.value, node.axes, *parts)
        value = self.literal(node)
        if value is not None:
            key = (type(value), value)
        return self._numbered.setdefault(key, len(self._numbered))

    @staticmethod
    def _across_layers(row: Operation, when: When) -> When:
        """When an operation across layers is known: `past` and `at` need no deeper layer."""
        if when in (When.LOAD, When.PROMPT, When.STEP) or row.kind is Kind.LOOK:
            return when
        return When.END

    def relabel(
        self,
        node: Node,
        *,
        name: str | None = None,
        origin: str | None = None,
        span: Span | None = None,
    ) -> Node:
        """A copy of a node with the name, origin or span that is given."""
        key = ("relabel", node, name, origin, span)
        if key not in self.nodes:
            copy = replace(
                node,
                name=name or node.name,
                origin=origin or node.origin,
                span=span or node.span,
            )
            self._register(copy)
            self.nodes[key] = copy
        return self.nodes[key]

    def _register(self, node: Node) -> None:
        depth = 1 + max((self.depths[arg] for arg in node.args), default=0)
        self.depths[node] = depth
        if depth > MAX_DEPTH or len(self.depths) > MAX_NODES:
            raise TooLarge
