"""Readable Triton source of a bundle: one file with its kernels and a function `run`.

A window takes two passes over the keys: the first makes the log-sum-exp of each query's row, the
second the probabilities, whatever the policy computes of them, and the reductions, one block of
keys after the other, so that nothing of size [H, W, n] is written. Pooling needs neighbours and
follows as a third, small kernel over values per token.

Dimensions: G KV heads, H query heads, n tokens of a layer, W queries of a window, D head size,
S splits of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.codegen.causal import skips
from kvpolicy.dsl.codegen.expressions import Writer
from kvpolicy.dsl.codegen.forms import PREFILL, STEPS
from kvpolicy.dsl.codegen.parts import Parts, Result
from kvpolicy.dsl.codegen.reductions import Statistic, VectorWriter, fold, shape
from kvpolicy.dsl.codegen.regions import Bundle, Reduction
from kvpolicy.dsl.codegen.run import run_text
from kvpolicy.dsl.codegen.stores import places, store, store_row
from kvpolicy.dsl.codegen.text import HEADER, QUERIES, ROW, columns, indented, row_pass, rows, tail
from kvpolicy.dsl.codegen.tiles import SEEN, TILE, Tile, conjunction
from kvpolicy.dsl.ir.nodes import Node
from kvpolicy.dsl.ir.written import written

_BODY = " " * 8


@dataclass(frozen=True)
class Source:
    """A generated file and how to call it.

    Attributes:
        text: Python.
        results: what `run` returns, in order.
        tensors: its `inputs`: a node, the axes of the tensor, and whether that is where the node's
            value is present instead of its data.
        numbers: its `numbers`: how each is made of a node.
        order: at decode steps: whether it reads in which order a KV head's own entries come.
    """

    text: str
    results: tuple[Result, ...]
    tensors: tuple[tuple[Node, tuple[str, ...], bool], ...]
    numbers: tuple[tuple[str, Node], ...]
    order: bool


def generate(bundle: Bundle, bound: Bound, *, single: bool = False, steps: bool = False) -> Source:
    """The source of a bundle.

    Args:
        single: queries and keys are float32, else of two bytes.
        steps: for decode steps, else for a prefill.
    """
    return Generator(bundle, bound, single, STEPS if steps else PREFILL).source()


class Generator(Parts):
    """Writes one source."""

    def source(self) -> Source:
        """All of the file."""
        parts = []
        if self.softmax:
            parts.append(row_pass(self.form))
        if self.columns or self.vectors:
            parts.append(self._columns())
        if self.rows:
            parts.append(self._rows())
        if self.pools:
            parts.append(self._tail())
        bundle, sizes = self.bundle, self.bound.shape
        outputs = "\n".join(
            f"    {each}" for each in dict.fromkeys(map(_described, bundle.outputs))
        )
        heads = f"{sizes.group} query heads per KV head of size {sizes.head_dim}"
        header = HEADER.format(
            policy=self.bound.program.name,
            outputs=outputs,
            sizes=f"decode steps, {heads}" if self.form.steps else heads,
        )
        parts = [each.strip("\n") for each in (header, *parts, run_text(self))]
        text = "\n\n\n".join(parts) + "\n"
        results = tuple(each for each in self.results if not each.stage)
        numbers, tensors = self.arguments.numbers.values(), self.arguments.tensors.values()
        tensors = tuple((node, self.arguments.axes(node), there) for node, there in tensors)
        return Source(text, results, tensors, tuple(numbers), "tl.load(ranks" in text)

    def writer(self, indent: str, rows: bool) -> Writer:
        """A writer for one of the kernels."""
        sizes = {"group": "GROUP_P", "query": "BLOCK_W" if rows else "1", "token": "BLOCK_N"}
        leaf = self._leaf if rows else self.input
        # The queries of several decode steps are evaluated as if each step were by itself.
        window = self.bundle.window
        causal = self.form.steps and window is not None and window.value == "new"
        return Writer(
            self.bound, self.arguments, indent, sizes, self.form, causal=causal, leaf=leaf
        )

    # Leaves.

    def input(self, writer: Writer, node: Node) -> Tile | None:
        return writer.load(node) if id(node) in self.inputs else None

    def _leaf(self, writer: Writer, node: Node) -> Tile | None:
        """What a kernel over queries has at hand."""
        every = frozenset(TILE)
        if node.op == "attn":
            return Tile(writer.named("attn", "tl.exp(logits - lse)"), every, (SEEN,))
        if node.op == "logits":
            return Tile("logits", every, (SEEN,))
        if node.op == "log" and _unmasked(node.args[0]).op == "attn":
            x = writer.value(node.args[0])
            return Tile("(logits - lse)", every, x.present)
        if node.op == "index" and node.axes == ("query",):
            name = writer.named("index", "row.to(tl.float32)")
            return Tile(name, frozenset(("query",)))
        if node.op == "distance":
            return self._distance(writer)
        return self.input(writer, node)

    def _distance(self, writer: Writer) -> Tile:
        axes = frozenset(("query", "token"))
        if self.form.steps:
            far = "(asked_at - at[None, None, :]).to(tl.float32)"
            return Tile(writer.named("distance", far), axes, (SEEN,))
        asked = "tokens - queries + row"
        name = writer.named("distance", f"({asked} - token).to(tl.float32)")
        writer.line("if POSITIONS:")
        own = f"tl.load(positions + {asked}, mask=row < queries, other=0)"
        writer.line(f"    far = {own} - tl.load(positions + token, mask=held, other=0)")
        writer.line(f"    {name} = far.to(tl.float32)")
        return Tile(name, axes, (SEEN,))

    # The second pass: values per token.

    def _columns(self) -> str:
        depth = _BODY if self.whole or not self.columns else _BODY + "    "
        writer = self.writer(depth, True)
        before = replace(writer, lines=[], indent=_BODY)
        made: list[tuple[Reduction, Statistic]] = []
        for each in self.columns:
            writer.comment(each.node)
            statistic = Statistic(each, writer, whole=self.whole)
            statistic.start(before)
            statistic.add(writer)
            made.append((each, statistic))
        flag = self.flags and bool(self.columns) and not self.softmax
        if flag:
            writer.line('wrong = tl.where(tl.abs(logits) < float("inf"), 0, 1)')
            writer.line(f"unusable {'=' if self.whole else '+='} tl.sum(wrong)")
            before.line("unusable = 0")
        after = replace(self.writer(_BODY, False), lines=[], used=writer.used)
        for each, statistic in made:
            statistic.end(after)
            self._hand_out(after, each, statistic.parts)
        self._vectors(after, flag)
        if not self.pools:
            self._finish(after)
        body = self._assembled(before.lines, writer.lines, after.lines)
        self.column_arguments = [*writer.used, *(each.name for each in self.results)]
        numbers = self._numbers("tokens", "queries", "blocks", *writer.used)
        return columns(self.form, self.column_arguments, body, numbers)

    def _numbers(self, *names: str) -> str:
        """Arguments that change from prompt to prompt, for which nothing is compiled anew."""
        own = (name for name in names if name not in self.arguments.tensors)
        return ", ".join(f'"{name}"' for name in own)

    def _assembled(self, before: list[str], inner: list[str], after: list[str]) -> str:
        """The loop over blocks of keys, and below it that over queries, unless one tile is all."""
        lines: list[str] = []
        hoisted = self.columns and self.whole
        if hoisted:
            lines += indented(self._queries(""), "    ")
        lines += indented(self.form.block(), "    ")
        ranks = self.form.ranks([*before, *inner, *after])
        lines += [f"{_BODY}{line}" for line in ranks]
        lines += places(after, _BODY, self.form)
        if self.reads_keys:
            lines += indented(self.form.tile("k"), _BODY)
        if self.columns and not hoisted:
            lines += before
            lines += self._loop()
        if self.columns:
            deep = _BODY if hoisted else _BODY + "    "
            lines += indented(
                "scores = tl.dot(asked, tl.trans(k_tile), input_precision=PRECISION)\n"
                "logits = tl.reshape(scores * SCALE, (GROUP_P, BLOCK_W, BLOCK_N))\n"
                f"seen = {self.form.seen}",
                deep,
            )
        lines += inner
        return "\n".join([*lines, *after]) + "\n"

    def _loop(self) -> list[str]:
        causal = all(skips(each) for each in self.columns)
        lines = []
        causal = causal and not self.form.steps
        if causal and not (self.flags and not self.softmax):
            lines.append(f"{_BODY}# Earlier queries do not see these tokens.")
            first = "tl.maximum(block * BLOCK_N - (tokens - queries), 0) // BLOCK_W * BLOCK_W"
            lines.append(f"{_BODY}first = {first}")
        else:
            lines.append(f"{_BODY}first = 0")
        lines.append(f"{_BODY}for start in range(first, queries, BLOCK_W):")
        return [*lines, *indented(self._queries("start + "), _BODY + "    ")]

    def _queries(self, start: str) -> str:
        """Loads of a tile of queries, and of the log-sum-exp of their rows."""
        lse = ""
        if self.softmax:
            place = "place = (head * GROUP + group) * queries + row"
            there = "there = (group < GROUP) & (row < queries)"
            load = "lse = tl.load(row_lse + place, mask=there, other=0.0)"
            lse = f"{place}\n{there}\n{load}"
        row = ROW.format(start=start, at=self.form.row_at, lse=lse)
        return (QUERIES.format(start=start) + row).rstrip()

    def _hand_out(self, writer: Writer, each: Reduction, parts: dict[str, Tile]) -> None:
        """Stores what a reduction gives, or leaves it to the tail of the same kernel."""
        node, base = each.node, each.node.name or each.node.op
        if "value" in parts:
            writer.given[id(node)] = parts["value"]
        read_by_tail = any(id(node) in map(id, other.args) for other in self.bundle.tail)
        if id(node) not in self.outputs and not (self.pools and read_by_tail):
            return
        for part, tile in parts.items():
            name = self.arguments.fresh(f"{base}_out" if part == "value" else f"{base}_{part}")
            stage = id(node) not in self.outputs
            self.results.append(Result(name, node, part, each.axes, stage=stage))
            store(writer, name, each.axes, tile, truth=self.results[-1].truth)

    def _vectors(self, writer: Writer, flagged: bool) -> None:
        """Reductions over `dim` of the same block of keys and values."""
        if self.reads_values:
            writer.lines += indented(self.form.tile("v"), _BODY)
        if not self.vectors and not flagged:
            return
        inner = VectorWriter.of(self, self.input, writer)
        for each in self.vectors:
            self._hand_out(writer, each, inner.parts(each))
        inner.check(writer, flagged, self.reads_values, self.vectors)

    def _finish(self, writer: Writer) -> None:
        """The tail's values that are read outside."""
        for node in self.bundle.tail:
            if id(node) not in self.outputs:
                continue
            tile = writer.value(node)
            axes = tuple(axis for axis in ("kv", "group", "token") if axis in node.type.axes)
            base = node.name or node.op
            name = self.arguments.fresh(f"{base}_out")
            self.results.append(Result(name, node, "value", axes))
            store(writer, name, axes, tile, truth=node.type.kind == "truth")
            if tile.present and node.type.kind != "truth":
                there = self.arguments.fresh(f"{base}_there_out")
                self.results.append(Result(there, node, "there", axes))
                every = frozenset().union(*(each.axes for each in tile.present))
                store(writer, there, axes, Tile(conjunction(tile.present), every), truth=True)

    # Values per query.

    def _rows(self) -> str:
        writer = self.writer(_BODY, True)
        before = replace(writer, lines=[], indent="    ")
        after = replace(writer, lines=[], indent="    ")
        own: list[Result] = []
        for each in self.rows:
            writer.comment(each.node)
            x = writer.value(each.node.args[0])
            base = each.node.name or each.node.op
            over = tuple(axis for axis in each.node.axes if axis == "token")
            kinds = ("sum", "count") if each.node.op == "mean" else (each.node.op,)
            for kind in kinds:
                part = kind if each.node.op == "mean" else "value"
                tile = replace(x, text="1.0") if part == "count" else x
                made = writer.reduced(kind, tile, over, each.node)
                name = self.arguments.fresh(f"{base}_{part}" if part != "value" else base)
                fold(kind, name, made.text, before, writer, shape(each, "row"))
                out = self.arguments.fresh(f"{name}_out")
                result = Result(out, each.node, part, each.axes, splits=True)
                own.append(result)
                store_row(after, out, each.axes, name, kind)
        self.results += own
        self.row_arguments = [*writer.used, *(each.name for each in own)]
        lines = {"before": before.lines, "body": writer.lines, "after": after.lines}
        numbers = self._numbers("tokens", "queries", "blocks", *writer.used)
        return rows(self.form, self.row_arguments, lines, self._queries("start + "), numbers)

    # Values per token that need their neighbours.

    def _tail(self) -> str:
        stages = [each for each in self.results if not each.splits and each.part == "value"]
        writer = self.writer("    ", False)
        writer.stored = {id(each.node): (each.name, each.axes) for each in stages}
        known = len(self.results)
        self._finish(writer)
        self.tail_reads, self.tail_used = list(writer.reads), list(writer.used)
        self.tail_results = [each.name for each in self.results[known:]]
        names = [*self.tail_reads, *self.tail_used, *self.tail_results]
        body = [*places(writer.lines, "    ", self.form), *writer.lines]
        return tail(self.form, names, body, self._numbers("tokens", *writer.used))


def _unmasked(node: Node) -> Node:
    while node.op == "mask":
        node = node.args[0]
    return node


def _described(node: Node) -> str:
    return f"{node.name}: {written(node)}" if node.name else written(node)
