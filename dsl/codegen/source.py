"""Readable Triton source of a bundle: the functions that complete the frames of its kernels.

A window takes two passes over the keys: the first makes the log-sum-exp of each query's row, the
second the probabilities, what the policy computes from them, and the reductions, one block of keys
after the other, so that nothing of size [H, W, N] is written. Pooling needs neighbours and follows
as a third, small kernel over values per token. The program is given the kernels from outside; a
file's `TEMPLATE` says what their launches need to know of it.

Dimensions: G KV heads, H query heads, N tokens of a layer, W queries of a window, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.codegen.causal import skips
from kvpolicy.dsl.codegen.expressions import Writer
from kvpolicy.dsl.codegen.fusion import Bundle, Reduction
from kvpolicy.dsl.codegen.leaves import comment_on
from kvpolicy.dsl.codegen.parts import Output, Parts
from kvpolicy.dsl.codegen.reductions import Statistic, fold, shape, vector_parts, vector_writer
from kvpolicy.dsl.codegen.stores import store, store_row
from kvpolicy.dsl.codegen.text import HEADER, TILES, Definitions
from kvpolicy.dsl.codegen.tiles import SEEN, TILE, Tile, conjunction
from kvpolicy.dsl.ir.nodes import Node


@dataclass(frozen=True)
class GeneratedFile:
    """A generated file and how its kernels are called.

    Attributes:
        text: Python source.
        results: the tensors that they return, in order.
        tensors: their `inputs`: node, axes of the tensor, and whether it holds where the node's
            value is present instead of its data.
        numbers: their `numbers`: how each is made (see `Arguments`), and of which node.
        order: whether they read the order of a KV head's own entries, at decode steps.
        token_bytes: bytes that they write per token and KV head.
    """

    text: str
    results: tuple[Output, ...]
    tensors: tuple[tuple[Node, tuple[str, ...], bool], ...]
    numbers: tuple[tuple[str, Node], ...]
    order: bool
    token_bytes: int


def generate(
    bundle: Bundle, bound: Bound, *, float32: bool = False, steps: bool = False
) -> GeneratedFile:
    """The source of a bundle.

    Args:
        float32: whether queries and keys are float32, else of two bytes.
        steps: whether for decode steps, else for a prefill.
    """
    return Generator(bundle, bound, float32, steps).source()


_LOOP = ("start", "tile", "store")


@dataclass(frozen=True)
class _Function:
    """A function: its arguments, its lines, and the state that it takes and returns."""

    given: tuple[str, ...]
    lines: list[str]
    state: tuple[list[str], list[str]]


class Generator(Parts):
    """Writes one source."""

    def source(self) -> GeneratedFile:
        """The whole file."""
        functions: dict[str, dict[str, _Function]] = {}
        if self.columns or self.vectors:
            functions["columns"] = self._columns()
        if self.rows:
            functions["rows"] = self._rows()
        if self.pools:
            functions["tail"] = self._tail()
        names, texts = self._names(), []
        for kernel, parts in functions.items():
            for part, function in parts.items():
                texts.append(
                    names.function(
                        f"{kernel}_{part}", function.given, function.lines, function.state
                    )
                )
        text = "\n\n\n".join([self._header(), *texts, self._template(functions)])
        results = tuple(output for output in self.results if not output.stage)
        arguments = self.arguments
        tensors = tuple(
            (node, arguments.axes(node), present) for node, present in arguments.tensors.values()
        )
        numbers, token_bytes = tuple(arguments.numbers.values()), self._token_bytes()
        return GeneratedFile(
            f"{text}\n", results, tensors, numbers, "entries.rank" in text, token_bytes
        )

    def _token_bytes(self) -> int:
        """Bytes of results per token and KV head, in the types that launches give them."""
        total = 0
        for output in self.results:
            if "token" in output.axes:
                size = 1 if output.truth else 4 if output.stage or output.splits else 8
                total += size * (self.bound.shape.group if "group" in output.axes else 1)
        return total

    def _header(self) -> str:
        outputs = "\n".join(
            f"    {line}" for line in dict.fromkeys(map(comment_on, self.bundle.outputs))
        )
        sizes = self.bound.shape
        heads = f"{sizes.group} query heads per KV head of size {sizes.head_dim}"
        return HEADER.format(
            policy=self.bound.program.name,
            outputs=outputs,
            sizes=f"decode steps, {heads}" if self.steps else heads,
        ).strip("\n")

    def _names(self) -> Definitions:
        """Names that functions may use: sizes, inputs, numbers and results."""
        shape, tiles = self.bound.shape, self.tiles
        sizes = {
            "GROUP": shape.group, "GROUP_P": tiles.group, "BLOCK_W": tiles.query_tile,
            "HEAD_DIM": shape.head_dim, "HEAD_DIM_P": tiles.dim,
        }  # fmt: skip
        texts = {name: f"inputs[{i}]" for i, name in enumerate(self.arguments.tensors)}
        for i, (name, (how, _)) in enumerate(self.arguments.numbers.items()):
            kind = "tl.float32" if how in ("value", "width") else "tl.int32"
            texts[name] = f"tl.cast(numbers[{i}], {kind})"
        texts |= {output.name: f"results[{i}]" for i, output in enumerate(self.results)}
        return Definitions(sizes, texts)

    def _template(self, functions: dict[str, dict[str, _Function]]) -> str:
        """`TEMPLATE`: what the launches of the kernels need to know."""
        tiles, checks, kernels = self.tiles, self._checks(), {}
        for kernel, parts in (("columns", _LOOP), ("rows", _LOOP), ("tail", ("store",))):
            names = [
                f"{kernel}_{part}" if part in functions.get(kernel, ()) else "None"
                for part in parts
            ]
            entry = names[0] if len(names) == 1 else f"({', '.join(names)})"
            kernels[kernel] = entry if kernel in functions else "None"
        facts = {
            "steps": self.steps,
            "group": self.bound.shape.group,
            "head_dim": self.bound.shape.head_dim,
            "padded": (tiles.group, tiles.dim),
            "query_tile": tiles.query_tile,
            "one_tile": self.one_tile,
            "block": tiles.block,
            "launch": {"num_warps": tiles.warps, "num_stages": tiles.stages},
            "row_pass": tiles.row_pass,
            "softmax": self.softmax,
            "checks": checks,
            "reads_keys": bool(self.columns) or "keys" in checks,
            "skips": self._skips(),
            "in_parts": self.in_parts,
            "returned": tuple(i for i, output in enumerate(self.results) if not output.stage),
        }
        results = [
            f"        ({output.axes}, {output.truth}, {output.splits}),  # {output.name}"
            for output in self.results
        ]
        lines = [f'    "{name}": {value!r},' for name, value in facts.items()]
        lines += ['    "results": (', *results, "    ),"]
        lines += [f'    "{name}": {text},' for name, text in kernels.items()]
        return "\n".join(["TEMPLATE = {", *lines, "}"]).replace("'", '"')

    def _checks(self) -> tuple[str, ...]:
        """What kernels check for NaN and infinity, with which a prompt stays whole."""
        ops = {node.op for reduction in self.vectors for node in reduction.node.walk()}
        checks = ["logits"] if self.columns and not self.softmax else []
        return (*checks, *(f"{op}s" for op in ("key", "value") if op in ops))

    def _skips(self) -> bool:
        """Whether a prefill may skip the queries before a block of keys."""
        looped = bool(self.columns) and not self.one_tile and not self.steps
        return looped and self.softmax and all(skips(x.node) for x in self.columns)

    def writer(self, over_queries: bool) -> Writer:
        """A writer for one of the functions."""
        sizes = {
            "group": "GROUP_P", "query": "BLOCK_W" if over_queries else "1", "token": "BLOCK_N",
        }  # fmt: skip
        leaf = self._leaf if over_queries else self.input
        # The queries of several decode steps are evaluated as if each step were by itself.
        window = self.bundle.window
        causal = self.steps and window is not None and window.value == "new"
        return Writer(self.bound, self.arguments, sizes, self.steps, causal=causal, leaf=leaf)

    # Leaves.

    def input(self, writer: Writer, node: Node) -> Tile | None:
        return writer.load(node) if node in self.inputs else None

    def _leaf(self, writer: Writer, node: Node) -> Tile | None:
        """The tile of a node that a kernel over queries has at hand, or None."""
        axes = frozenset(TILE)
        if node.op == "attn":
            return Tile(writer.named("attn", "tl.exp(logits - lse)"), axes, (SEEN,))
        if node.op == "logits":
            return Tile("logits", axes, (SEEN,))
        if node.op == "log" and _unmasked(node.args[0]).op == "attn":
            x = writer.value(node.args[0])
            return Tile("(logits - lse)", axes, x.present)
        if node.op == "index" and node.axes == ("query",):
            name = writer.named("index", "row.to(tl.float32)")
            return Tile(name, frozenset(("query",)))
        if node.op == "distance":
            return self._distance(writer)
        return self.input(writer, node)

    def _distance(self, writer: Writer) -> Tile:
        name = writer.named("distance", "(asked_at - at).to(tl.float32)")
        if not self.steps:
            writer.line("if positions is not None:")
            query = "tl.load(positions + asked_at, mask=row < queries, other=0)"
            writer.line(f"    far = {query} - tl.load(positions + token, mask=held, other=0)")
            writer.line(f"    {name} = far.to(tl.float32)")
        return Tile(name, frozenset(("query", "token")), (SEEN,))

    # The second pass: values per token.

    def _columns(self) -> dict[str, _Function]:
        writer = self.writer(True)
        start = replace(writer, lines=[])
        statistics: list[tuple[Reduction, Statistic]] = []
        for reduction in self.columns:
            writer.comment(reduction.node)
            statistic = Statistic(reduction, writer, self.one_tile, self.in_parts)
            statistic.start(start)
            statistic.add(writer)
            statistics.append((reduction, statistic))
        end = self.writer(False)
        for reduction, statistic in statistics:
            statistic.end(end)
            self._hand_out(end, reduction, statistic.parts)
        inner = vector_writer(self, self.input, end)
        for reduction in self.vectors:
            self._hand_out(end, reduction, vector_parts(inner, self, reduction))
        if not self.pools:
            self._finish(end)
        state = [name for _, statistic in statistics for name in statistic.state]
        store = _Function(("state", "k_tile", "v_tile", *TILES, "results"), end.lines, (state, []))
        if not self.columns:
            return {"store": store}
        return self._loop(state, [] if self.one_tile else start.lines, writer.lines, store)

    def _loop(
        self, state: list[str], start_lines: list[str], tile_lines: list[str], store: _Function
    ) -> dict[str, _Function]:
        """Functions of a kernel over queries; without `start_lines`, of a single tile of them."""
        arguments = ("state", "asked", "logits", "seen", *TILES)
        start = {"start": _Function((), start_lines, ([], state))} if start_lines else {}
        tile = _Function(arguments, tile_lines, (state if start_lines else [], state))
        return {**start, "tile": tile, "store": store}

    def _hand_out(self, writer: Writer, reduction: Reduction, parts: dict[str, Tile]) -> None:
        """Hands a reduction to the tail of the same kernel, and stores it for other readers."""
        node, base = reduction.node, reduction.node.name or reduction.node.op
        if "value" in parts:
            writer.given[node] = parts["value"]
        read_by_tail = any(node in value.args for value in self.bundle.tail)
        if node not in self.outputs and not (self.pools and read_by_tail):
            return
        for part, tile in parts.items():
            name = self.arguments.fresh(f"{base}_out" if part == "value" else f"{base}_{part}")
            stage = node not in self.outputs
            self.results.append(
                Output(name, node, part, reduction.axes, splits=self.in_parts, stage=stage)
            )
            store(writer, name, reduction.axes, tile, truth=self.results[-1].truth)

    def _finish(self, writer: Writer) -> None:
        """Stores the tail's values that are read outside."""
        for node in self.bundle.tail:
            if node not in self.outputs:
                continue
            tile = writer.value(node)
            axes = tuple(axis for axis in ("kv", "group", "token") if axis in node.type.axes)
            base = node.name or node.op
            name = self.arguments.fresh(f"{base}_out")
            self.results.append(Output(name, node, "value", axes))
            store(writer, name, axes, tile, truth=node.type.kind == "truth")
            if tile.present and node.type.kind != "truth":
                presence = self.arguments.fresh(f"{base}_there_out")
                self.results.append(Output(presence, node, "there", axes))
                all_axes = frozenset().union(*(condition.axes for condition in tile.present))
                store(writer, presence, axes, Tile(conjunction(tile.present), all_axes), truth=True)

    # Values per query.

    def _rows(self) -> dict[str, _Function]:
        writer = self.writer(True)
        start, end = replace(writer, lines=[]), replace(writer, lines=[])
        state = []
        for reduction in self.rows:
            writer.comment(reduction.node)
            x = writer.value(reduction.node.args[0])
            base = reduction.node.name or reduction.node.op
            over = tuple(axis for axis in reduction.node.axes if axis == "token")
            kinds = ("sum", "count") if reduction.node.op == "mean" else (reduction.node.op,)
            for kind in kinds:
                part = kind if reduction.node.op == "mean" else "value"
                tile = replace(x, text="1.0") if part == "count" else x
                result = writer.reduced(kind, tile, over, reduction.node)
                name = self.arguments.fresh(f"{base}_{part}" if part != "value" else base)
                fold(kind, name, result.text, start, writer, shape(reduction, "row"))
                state.append(name)
                out = self.arguments.fresh(f"{name}_out")
                self.results.append(Output(out, reduction.node, part, reduction.axes, splits=True))
                store_row(end, out, reduction.axes, name, kind)
        store = _Function(("state", "row", "head", "queries", "results"), end.lines, (state, []))
        return self._loop(state, start.lines, writer.lines, store)

    # Values per token that need their neighbours.

    def _tail(self) -> dict[str, _Function]:
        stages = [output for output in self.results if not output.splits and output.part == "value"]
        writer = self.writer(False)
        writer.stored = {output.node: (output.name, output.axes) for output in stages}
        self._finish(writer)
        arguments = ("entries", "positions", "order", "inputs", "numbers", "results")
        return {"store": _Function(arguments, writer.lines, ([], []))}


def _unmasked(node: Node) -> Node:
    while node.op == "mask":
        node = node.args[0]
    return node
