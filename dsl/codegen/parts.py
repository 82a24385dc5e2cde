"""Parts of a generated file: the kernels that it completes, their tiles and their results."""

from __future__ import annotations

from dataclasses import dataclass

from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.bind.kernel_values import finite
from kvpolicy.dsl.codegen.fusion import Bundle
from kvpolicy.dsl.codegen.shapes import TileShape
from kvpolicy.dsl.codegen.tiles import Arguments
from kvpolicy.dsl.ir import counts
from kvpolicy.dsl.ir.nodes import Node
from kvpolicy.dsl.ops.operations import Kind


@dataclass(frozen=True)
class Output:
    """A tensor that a file's kernels make.

    Attributes:
        node: the node whose value, or part of it, it holds.
        part: `value`; `there`, where it is present; `sum` and `count` of a mean that torch
            completes.
        axes: its axes; with `splits` one more in front, of splits of the keys or parts of the
            queries, over which torch completes the reduction.
    """

    name: str
    node: Node
    part: str
    axes: tuple[str, ...]
    splits: bool = False
    stage: bool = False  # only the tail reads it

    @property
    def truth(self) -> bool:
        return self.part == "there" or (self.part == "value" and self.node.type.kind == "truth")


class Parts:
    """The parts of one file."""

    def __init__(self, bundle: Bundle, bound: Bound, float32: bool, steps: bool) -> None:
        self.bundle, self.bound, self.steps = bundle, bound, steps
        self.arguments = Arguments(steps)
        self.results: list[Output] = []
        self.inputs = {*bundle.inputs}
        self.outputs = {*bundle.outputs}
        self.columns = [reduction for reduction in bundle.reductions if reduction.role == "columns"]
        self.vectors = [reduction for reduction in bundle.reductions if reduction.role == "vectors"]
        self.rows = [reduction for reduction in bundle.reductions if reduction.role == "rows"]
        self.pools = any(node.operation.kind is Kind.POOL for node in bundle.tail)
        nodes = [n for reduction in (*self.columns, *self.rows) for n in reduction.node.walk()]
        self.softmax = any(node.operation.softmax for node in nodes)
        self.window = self._window()
        simple = len(self.columns) < 2 and all(
            reduction.node.op != "var" for reduction in self.columns
        )
        few = steps and self.window is None
        self.tiles = TileShape.of(bound.shape, self.window, float32, simple, few)
        # Otherwise a program goes over the queries of its block of keys tile by tile.
        self.one_tile = self.tiles.one_tile
        # If it stores nothing but sums or extremes of queries, other programs may add to them.
        self.in_parts = (
            bool(self.columns)
            and not (steps or self.one_tile or self.rows or self.vectors or bundle.tail)
            and all(_adds_to(reduction.node) for reduction in self.columns)
        )

    def _window(self) -> int | None:
        """Number of queries of the window; None: it depends on the prompt or the layer."""
        node = self.bundle.window
        if node is None or not node.args:
            return None
        if self.bound.static.needs(node.args[0]) != frozenset():
            return None
        return counts.whole(self.bound.number(node.args[0], 1), 2**31)


def _adds_to(node: Node) -> bool:
    """Whether a reduction of all queries follows from those of parts of them."""
    row = node.operation
    return (row.adds_up or row.infinite_of_none) and finite(node.args[0])
