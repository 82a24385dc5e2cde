"""Expressions of the language as lines of Triton, on tiles with the axes group, query and token.

A tile has three dimensions, of size 1 where a value lacks the axis: query heads of one KV head,
queries, tokens; in a kernel over vectors two, tokens and `dim`. Absent values are conditions
beside the data, as in the torch program, and are applied where a reduction or a store reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvpolicy.dsl.bind.kernel_values import finite
from kvpolicy.dsl.codegen.leaves import Leaves
from kvpolicy.dsl.codegen.tiles import SEEN, TILE, Condition, Tile, conjunction, together
from kvpolicy.dsl.ir.nodes import Node
from kvpolicy.dsl.ops.forms import form
from kvpolicy.dsl.ops.operations import Operation
from kvpolicy.dsl.ops.table import OPERATIONS

# What a kernel has at hand: the tile of a node, or None.
Leaf = Callable[["Writer", Node], Tile | None]


@dataclass
class Writer(Leaves):
    """Writes the lines of one kernel's body.

    Attributes:
        leaf: what the kernel has at hand.
    """

    leaf: Leaf = lambda writer, node: None

    def value(self, node: Node) -> Tile:
        """The tile of a node."""
        if node not in self.given:
            self.given[node] = self._make(node)
        return self.given[node]

    def _make(self, node: Node) -> Tile:
        static = self.bound.static.needs(node)
        if static is not None:
            return self._number(node, exact=not static)
        if node in self.stored:
            name, axes = self.stored[node]
            return self._load(node.name or node.op, name, axes, node)
        leaf = self.leaf(self, node)
        if leaf is not None:
            return leaf
        row = node.operation
        if row.is_reduction and node.axes == ("group",):
            return self._over_group(node)
        assert row.triton is not None  # checked by `Fusion`
        if "{" in row.triton:
            return self.arithmetic(node, row.triton)
        tile: Tile = form(row.triton, "codegen")(self, node)
        return tile

    # Elementwise.

    def arithmetic(self, node: Node, template: str, *, clean: bool = False) -> Tile:
        """The tile of a text with the node's arguments filled in.

        Args:
            node: whose arguments they are.
            template: the text, with `{0}` and `{1}` for the arguments.
            clean: whether it cannot be NaN, whatever its row says.
        """
        tiles = [self.value(argument) for argument in node.args]
        axes = frozenset().union(*(tile.axes for tile in tiles))
        clean = (
            clean
            or node.type.kind == "truth"
            or (not node.operation.may_be_nan and all(finite(argument) for argument in node.args))
        )
        text = template.format(*(tile.text for tile in tiles))
        name = self.named(node.name or node.op, text)
        if not clean:
            self.line(f"{name} = tl.where({name} == {name}, {name}, 0.0)  # no NaN")
        present = together(*tiles)
        if node.type.kind == "truth":  # a comparison with an absent value is false
            conditions = (Condition(name, axes), *present)
            all_axes = frozenset().union(axes, *(condition.axes for condition in present))
            return Tile(f"({conjunction(conditions)})", all_axes)
        return Tile(name, axes, present)

    def truth(self, node: Node) -> Tile:
        """A truth value, false where it is absent."""
        x = self.value(node)
        if not x.present:
            return x
        axes = frozenset().union(x.axes, *(condition.axes for condition in x.present))
        return Tile(f"({conjunction((Condition(x.text, x.axes), *x.present))})", axes)

    # Reductions within a tile.

    def _over_group(self, node: Node) -> Tile:
        x = self.value(node.args[0])
        self.comment(node)
        tile = self.reduced(node.op, x, ("group",), node)
        name = self.named(node.name or f"{node.op}_of_group", tile.text)
        row, is_part = node.operation, node.value == "part"
        if row.keeps_finite and not (row.always_finite or is_part or finite(node.args[0])):
            self.line(f"{name} = tl.where({name} == {name}, {name}, 0.0)  # no NaN")
        return replace(tile, text=name)

    def reduced(self, op: str, x: Tile, over: tuple[str, ...], node: Node) -> Tile:
        """A reduction of a tile over some of its axes, skipping absent values and padding."""
        row = OPERATIONS[op]
        if row.averages:
            total = self.reduced("sum", x, over, node)
            number = self.number(x, over, node)
            divisor = number.text if number.text == "GROUP" else f"tl.maximum({number.text}, 1)"
            return Tile(f"{total.text} / {divisor}", total.axes | number.axes)  # of nothing: 0
        truth = node.args[0].type.kind == "truth"
        conditions = (*x.present, *self.padding(over, x))
        fixed = tuple(condition for condition in conditions if not condition.axes & set(over))
        inner = tuple(condition for condition in conditions if condition.axes & set(over))
        text = of_each(row, x.text, truth)
        axes = (x.axes if text != "1.0" else frozenset()).union(
            *(condition.axes for condition in inner)
        )
        if inner:
            text = self.named("present", f"tl.where({conjunction(inner)}, {text}, {nothing(row)})")
        axes_wanted = set(over) | (x.axes if not inner else set())
        if not axes_wanted <= axes:
            text = f"({text} + tl.zeros({self.shape(axes_wanted)}, tl.float32))"
        for axis in over:
            text = f"{row.triton}({text}, {TILE.index(axis)}, keep_dims=True)"
        if fixed:
            text = self.named(f"{op}_of_present", text)
            text = f"tl.where({conjunction(fixed)}, {text}, {nothing(row)})"
            axes = axes.union(*(condition.axes for condition in fixed))
        text = f"({text} > 0)" if row.result == "truth" else text
        return Tile(text, (axes | x.axes) - set(over))

    def number(self, x: Tile, over: tuple[str, ...], node: Node) -> Tile:
        """Number of values that are present along some axes."""
        tile = self.known_number(x, over)
        if tile is not None:
            return tile
        return self.counted(x, over, node)

    def counted(self, x: Tile, over: tuple[str, ...], node: Node) -> Tile:
        """That number, counted in this tile."""
        return self.reduced("count", replace(x, text="1.0"), over, of_numbers(node))

    def known_number(self, x: Tile, over: tuple[str, ...]) -> Tile | None:
        """That number without counting, as a query sees the tokens up to its own; None: unknown."""
        inner = [condition for condition in x.present if condition.axes & set(over)]
        if self.steps and (inner or (self.causal and "query" in over)):
            return None
        if any(condition.text != SEEN.text for condition in inner) or "token" in over:
            return None
        sizes = ["GROUP"] if "group" in over else []
        if "query" in over:
            sizes.append(f"tl.minimum(queries, tokens - {self.token})" if inner else "queries")
        fixed = tuple(condition for condition in x.present if condition not in inner)
        axes = frozenset().union(
            *(condition.axes for condition in fixed), ("token",) if inner else ()
        )
        size = " * ".join(sizes)
        return Tile(f"tl.where({conjunction(fixed)}, {size}, 0)" if fixed else size, axes)

    def padding(self, over: tuple[str, ...], x: Tile) -> tuple[Condition, ...]:
        """Conditions that exclude the padding of some axes."""
        group, conditions = self.bound.shape.group, []
        if "group" in over and group & (group - 1):
            conditions.append(Condition("(group < GROUP)", frozenset(("group",))))
        if SEEN not in x.present:  # which excludes padding too
            if self.causal and {"query", "token"} & set(over):
                return (*conditions, SEEN)
            if "query" in over:
                conditions.append(Condition("(row < queries)", frozenset(("query",))))
            if "token" in over:
                conditions.append(Condition(self.held, frozenset(("token",))))
        return tuple(conditions)


def nothing(row: Operation) -> str:
    """The text of a reduction of no value; kernels reduce truth values as 0 and 1."""
    if row.infinite_of_none:
        return f'float("{row.of_none}")'
    return "0" if row.result == "truth" else "0.0"


def of_each(row: Operation, text: str, truth: bool) -> str:
    """The text that a reduction takes for a value: 1 or 0 for a truth value or a count."""
    if row.result == "truth":
        return f"tl.where({text}, 1, 0)"
    if row.whole:  # it counts
        return f"tl.where({text}, 1.0, 0.0)" if truth else "1.0"
    return text


def joined(row: Operation, name: str, text: str) -> str:
    """A line that joins a part to a reduction."""
    if row.result == "truth":
        return f"{name} = tl.maximum({name}, {text}.to(tl.int32))"
    extreme = OPERATIONS[row.of_two].triton if row.of_two else None
    return f"{name} += {text}" if extreme is None else f"{name} = {extreme.format(name, text)}"


def of_numbers(node: Node) -> Node:
    """A node whose argument counts as a number, so that present values are counted."""
    x = node.args[0]
    if x.type.kind == "number":
        return node
    return replace(node, args=(replace(x, type=replace(x.type, kind="number")),))
