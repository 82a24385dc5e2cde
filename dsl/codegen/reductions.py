"""Reductions in generated kernels: over queries, over tokens of a row, over `dim`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvpolicy.dsl.bind.kernel_values import finite
from kvpolicy.dsl.codegen.expressions import Leaf, Writer, joined, nothing, of_each
from kvpolicy.dsl.codegen.fusion import Reduction
from kvpolicy.dsl.codegen.parts import Parts
from kvpolicy.dsl.codegen.tiles import Condition, Tile, conjunction
from kvpolicy.dsl.ir.nodes import Node
from kvpolicy.dsl.ops.operations import Kind
from kvpolicy.dsl.ops.table import OPERATIONS


@dataclass
class Statistic:
    """One reduction over queries: in one tile, or over blocks of queries.

    Attributes:
        one_tile: whether one tile holds all queries.
        in_parts: whether other programs reduce other queries.
        parts: part of the result -> its tile, after `end`.
        state: names of the values that are carried from tile to tile and to `end`.
    """

    reduction: Reduction
    writer: Writer
    one_tile: bool
    in_parts: bool

    def __post_init__(self) -> None:
        node = self.reduction.node
        self.node = node
        self.x = self.writer.value(node.args[0])
        self.over = tuple(axis for axis in ("query", "group") if axis in node.axes)
        self.axes = frozenset(self.reduction.axes) - {"kv"}
        self.parts: dict[str, Tile] = {}
        self.name = self.writer.arguments.fresh(node.name or f"{node.op}_of_queries")
        self.state = [self.name]

    def _new(self, suffix: str) -> str:
        return self.writer.arguments.fresh(f"{self.name}_{suffix}")

    def start(self, writer: Writer) -> None:
        """Writes the values to start from."""
        if self.one_tile:
            return
        size = shape(self.reduction, "column")
        op, row = self.node.op, self.node.operation
        if row.averages:
            self.known = self.writer.known_number(self.x, self.over) if op == "mean" else None
            # Names that the loop's lines make do not exist after the loop.
            if self.known is not None and not self.writer.is_outside(self.known.text):
                self.known = None
            if self.known is None:
                self.count = self._kept(writer, "count", size)
        if op == "var":
            self.spread = self._kept(writer, "spread", size)
        kind = "sum" if row.averages else op
        begin(writer, kind, self.name, size)
        if self._compensated(kind):
            self.lost = self._kept(writer, "lost", size)

    def _kept(self, writer: Writer, suffix: str, size: str) -> str:
        """Writes one more value to carry, 0 at first, and returns its name."""
        name = self._new(suffix)
        writer.line(f"{name} = tl.zeros({size}, tl.float32)")
        self.state.append(name)
        return name

    def add(self, writer: Writer) -> None:
        """Writes the reduction of one tile of queries."""
        op = self.node.op
        if op == "var":
            self._variance(writer)
            return
        if self.one_tile and op == "mean" and self.reduction.rest:
            self.count = self._new("count")
            self.state.append(self.count)
            writer.line(f"{self.count} = {writer.number(self.x, self.over, self.node).text}")
            op = "sum"
        if self.one_tile:
            writer.line(f"{self.name} = {writer.reduced(op, self.x, self.over, self.node).text}")
            return
        kind = "sum" if op == "mean" else op
        text = writer.reduced(kind, self.x, self.over, self.node).text
        if not self._compensated(kind):
            writer.line(joined(OPERATIONS[kind], self.name, text))
        else:  # what rounding loses is added later (Kahan)
            part, total = self._new("part"), self._new("total")
            writer.line(f"{part} = {text} - {self.lost}")
            writer.line(f"{total} = {self.name} + {part}")
            writer.line(f"{self.lost} = ({total} - {self.name}) - {part}")
            writer.line(f"{self.name} = {total}")
        if op == "mean" and self.known is None:
            writer.line(f"{self.count} += {writer.counted(self.x, self.over, self.node).text}")

    def _compensated(self, kind: str) -> bool:
        return kind == "sum" and self.node.op != "var" and finite(self.node.args[0])

    def _variance(self, writer: Writer) -> None:
        """Writes the variance of a tile, joined to that of earlier tiles (Chan et al., 1979)."""
        number, mean = self._new("number"), self._new("mean")
        count = writer.number if self.one_tile else writer.counted
        writer.line(f"{number} = ({count(self.x, self.over, self.node).text}) * 1.0")
        total = writer.reduced("sum", self.x, self.over, self.node).text
        writer.line(f"{mean} = {total} / tl.maximum({number}, 1.0)")
        squares = replace(self.x, text=f"(({self.x.text} - {mean}) * ({self.x.text} - {mean}))")
        squares = replace(squares, axes=self.x.axes | self.axes)
        spread = writer.reduced("sum", squares, self.over, self.node).text
        if self.one_tile:
            writer.line(f"{self.name} = {spread} / tl.maximum({number}, 1.0)")
            return
        tile_spread, share, shift = self._new("own"), self._new("share"), self._new("apart")
        writer.line(f"{tile_spread} = {spread}")
        writer.line(f"{share} = {number} / tl.maximum({self.count} + {number}, 1.0)")
        writer.line(f"{shift} = {mean} - {self.name}")
        writer.line(f"{self.spread} += {tile_spread} + {shift} * {shift} * {self.count} * {share}")
        writer.line(f"{self.name} += {shift} * {share}")
        writer.line(f"{self.count} += {number}")

    def end(self, writer: Writer) -> None:
        """Writes the reduction of all queries and sets `parts`."""
        op, row, rest = self.node.op, self.node.operation, self.reduction.rest
        if op == "var" and not self.one_tile:
            writer.line(f"{self.name} = {self.spread} / tl.maximum({self.count}, 1.0)")
        if op == "mean":
            self._mean(writer, bool(rest))
            return
        # What is added to a part may be infinite too.
        is_part = rest or self.in_parts or self.node.value == "part"
        if row.keeps_finite and not (row.always_finite or is_part):
            self._clean(writer)
        truth = row.result == "truth" and not self.one_tile
        self.parts["value"] = Tile(f"({self.name} > 0)" if truth else self.name, self.axes)

    def _clean(self, writer: Writer) -> None:
        """Writes 0 for NaN, which a sum of infinities may be."""
        if not finite(self.node.args[0]):
            writer.line(f"{self.name} = tl.where({self.name} == {self.name}, {self.name}, 0.0)")

    def _mean(self, writer: Writer, rest: bool) -> None:
        if self.one_tile and not rest:  # a quotient already
            self._clean(writer)
            self.parts["value"] = Tile(self.name, self.axes)
            return
        known_number = None if self.one_tile else self.known
        number = self.count if known_number is None else known_number.text
        if rest:
            self.parts = {"sum": Tile(self.name, self.axes), "count": Tile(number, self.axes)}
            return
        writer.line(f"{self.name} = {self.name} / tl.maximum({number}, 1)")
        self._clean(writer)
        self.parts["value"] = Tile(self.name, self.axes)


def vector_writer(made: Parts, given: Leaf, outer: Writer) -> Writer:
    """A writer for one block of keys or values that adds to the lines of `outer`.

    Args:
        given: gives the tiles of the bundle's inputs.
    """

    def leaf(writer: Writer, node: Node) -> Tile | None:
        if node.operation.kind is not Kind.VECTOR:
            return given(writer, node)
        tile = "k_tile" if node.op == "key" else "v_tile"
        name = writer.named(f"{node.op}s", f"{tile}.to(tl.float32)")
        return Tile(name, frozenset(("token", "dim")))

    return Writer(
        made.bound, made.arguments, {}, made.steps, token="entry_column", held="entry_held",
        lines=outer.lines, leaf=leaf,
    )  # fmt: skip


def vector_parts(writer: Writer, made: Parts, each: Reduction) -> dict[str, Tile]:
    """Writes a reduction over `dim`, and returns its tiles by part of the result.

    Absent values count for nothing.
    """
    node, row = each.node, each.node.operation
    writer.comment(node)
    x = writer.value(node.args[0])
    name = writer.arguments.fresh(node.name or f"{node.op}_of_dim")
    axes = frozenset(("token",))

    def folded(op: str, text: str) -> str:
        return _over_dim(made, op, replace(x, text=text))

    if row.averages:
        number = writer.arguments.fresh(f"{name}_number")
        writer.line(f"{number} = {folded('count', '1.0')}")
        total = writer.arguments.fresh(f"{name}_sum")
        writer.line(f"{total} = {folded('sum', x.text)}")
        if each.rest:
            return {"sum": Tile(_wide(total), axes), "count": Tile(_wide(number), axes)}
        writer.line(f"{name} = {total} / tl.maximum({number}, 1.0)")
        if node.op == "var":
            deviation = f"({x.text} - {name}[:, None])"
            spread = folded("sum", f"{deviation} * {deviation}")
            writer.line(f"{name} = {spread} / tl.maximum({number}, 1.0)")
    else:
        term = of_each(row, x.text, node.args[0].type.kind == "truth")
        writer.line(f"{name} = {folded(node.op, term)}")
    is_part = each.rest or node.value == "part"
    if not (finite(node.args[0]) or row.always_finite or is_part):
        writer.line(f"{name} = tl.where({name} == {name}, {name}, 0.0)")
    text = f"({_wide(name)} > 0)" if row.result == "truth" else _wide(name)
    return {"value": Tile(text, axes)}


def _over_dim(parts: Parts, op: str, x: Tile) -> str:
    conditions = list(x.present)
    if parts.tiles.dim != parts.bound.shape.head_dim:  # the rest of a tile is padding
        conditions.append(Condition("(dim < HEAD_DIM)[None, :]", frozenset(("dim",))))
    text, row = x.text, OPERATIONS[op]
    if "dim" not in x.axes or text == "1.0":
        text = f"({text} + tl.zeros([BLOCK_N, HEAD_DIM_P], tl.float32))"
    if conditions:
        text = f"tl.where({conjunction(tuple(conditions))}, {text}, {nothing(row)})"
    return f"{row.triton}({text}, 1)"


def _wide(name: str) -> str:
    return f"{name}[None, None, :]"


def shape(each: Reduction, kind: str) -> str:
    group = "GROUP_P" if "group" in each.axes else "1"
    return f"[{group}, 1, BLOCK_N]" if kind == "column" else f"[{group}, BLOCK_W, 1]"


def begin(writer: Writer, op: str, name: str, size: str) -> None:
    """Writes the start of a reduction: its result of no value."""
    row = OPERATIONS[op]
    dtype = "tl.int32" if row.result == "truth" else "tl.float32"
    writer.line(f"{name} = tl.full({size}, {nothing(row)}, {dtype})")


def fold(op: str, name: str, text: str, before: Writer, writer: Writer, size: str) -> None:
    """Writes a reduction of rows: its start and what a tile adds."""
    begin(before, op, name, size)
    writer.line(joined(OPERATIONS[op], name, text))
