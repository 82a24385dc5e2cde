"""Which parts of a bound policy become generated kernels, and why the others do not.

A kernel computes reductions of attention over queries (`columns`: a value per token) or over tokens
(`rows`: a value per query), and of keys and values over `dim` (`vectors`), each with the
elementwise expression inside. Reductions of one window that do not depend on each other share one
pass over the keys: a `Bundle`. What follows per token (elementwise steps, pooling, reductions of
the group) is computed with them, as the bundle's tail.

Dimensions: G KV heads, H query heads, N tokens of a layer, W queries of a window, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.bind.kernel_values import (
    exponent,
    finite,
    looks_across,
    needs_no_tensor,
    window_key,
)
from kvpolicy.dsl.ir.nodes import Node, State, When
from kvpolicy.dsl.ir.traverse import nodes_of
from kvpolicy.dsl.ops.operations import Kind

_PER_TOKEN = frozenset(("kv", "group", "token"))
# Level of nodes that depend on themselves, through a state: no bundle computes these.
_LATE = 1 << 30


class Unsupported(Exception):
    """Why a reduction stays with torch."""


@dataclass(frozen=True, eq=False)
class Reduction:
    """A reduction that a kernel computes.

    Attributes:
        node: the reduction.
        role: `columns`, `rows` or `vectors`.
        window: an `attn` or `logits` in it, which says how many queries; None for vectors.
        inputs: values computed before that the kernel reads.
        rest: axes of the reduction that remain for torch, on small tensors.
    """

    node: Node
    role: str
    window: Node | None
    inputs: tuple[Node, ...]
    rest: tuple[str, ...]

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes of what the kernel stores, in canonical order."""
        last = "query" if self.role == "rows" else "token"
        group = "group" in self.node.args[0].type.axes
        group = group and (self.role == "rows" or "group" not in self.node.axes)
        return ("kv", "group", last) if group else ("kv", last)


@dataclass(frozen=True, eq=False)
class Bundle:
    """What one generated source computes.

    Attributes:
        window: an `attn` or `logits` of its window; None if only vectors are reduced.
        reductions: in order.
        tail: values per token that are computed from the reductions, arguments first.
        outputs: reductions and tail values that something outside of the bundle reads.
        inputs: values computed before that the kernels read.
    """

    window: Node | None
    reductions: tuple[Reduction, ...]
    tail: tuple[Node, ...]
    outputs: tuple[Node, ...]
    inputs: tuple[Node, ...]

    @cached_property
    def reads_values(self) -> bool:
        """Whether the kernels read the tensor `value`."""
        nodes = (node for reduction in self.reductions for node in reduction.node.walk())
        return any("value" in node.operation.tensors for node in nodes)

    @cached_property
    def finite(self) -> frozenset[Node]:
        """Outputs whose present values are all finite."""
        return frozenset(node for node in self.outputs if finite(node))


class Fusion:
    """The bundles of a policy's prefill, or of its decode steps.

    Args:
        roots: values that are computed at a layer or later, as they are evaluated.
        states: states as they are evaluated, by name, without those known before.
        steps: whether for decode steps, else for a prefill.

    Attributes:
        bundles: in an order in which each needs only those before it.
        bundle_of: output -> its bundle.
        reasons: reduction that stays with torch -> why; of those over `query` or `dim`, or of
            attention over `token`.
    """

    def __init__(
        self,
        bound: Bound,
        roots: Iterable[Node | None],
        states: Mapping[str, State] | None = None,
        *,
        steps: bool = False,
    ) -> None:
        self.bound, self.steps = bound, steps
        self._latest = When.STEP if steps else When.LAYER
        self._states = states or {}
        self.roots = [root for root in roots if root is not None]
        nodes = list(nodes_of(self.roots))
        self.reasons: dict[Node, str] = {}
        self._reductions: dict[Node, Reduction] = {}
        self._levels: dict[Node, int] = {}
        for node in nodes:
            role = _role(node)
            if role is None:
                continue
            try:
                self._reductions[node] = self._supported(node, role)
            except Unsupported as reason:
                self.reasons[node] = str(reason)
        bundles = self._grouped(nodes)
        outputs = self._outputs(bundles)
        self.bundles = [
            bundle for bundle in (self._needed(x, outputs) for x in bundles) if bundle.outputs
        ]
        self.bundle_of = {node: bundle for bundle in self.bundles for node in bundle.outputs}

    def inside(self) -> Iterator[Node]:
        """Nodes that kernels compute, or read as numbers of the host."""
        for bundle in self.bundles:
            seen = {*bundle.inputs}
            for node in (*(reduction.node for reduction in bundle.reductions), *bundle.tail):
                yield from node.walk(seen)

    def left(self) -> list[Node]:
        """Nodes that stay with torch."""
        nodes: dict[Node, None] = {}
        waiting = list(self.roots)
        while waiting:
            node = waiting.pop()
            if node not in nodes and node not in self.bundle_of:
                nodes[node] = None
                waiting.extend(() if node.operation.is_window else node.args)
            elif node in self.bundle_of:
                waiting.extend(x for x in self.bundle_of[node].inputs if x not in nodes)
        return list(nodes)

    @cached_property
    def reads_of_layers(self) -> bool:
        """Whether kernels read values that all KV heads of a layer share, but not all layers."""
        return any(_of_layer(x) for bundle in self.bundles for x in bundle.inputs)

    # What a kernel can compute.

    def _supported(self, node: Node, role: str) -> Reduction:
        x = node.args[0]
        if node.when > self._latest:
            raise Unsupported("it looks at other layers")
        seen: set[Node] = set()
        inputs: list[Node] = []
        windows: list[Node] = []
        waiting = [x]
        while waiting:
            value = waiting.pop()
            if value in seen or needs_no_tensor(value, self.bound):
                continue
            seen.add(value)
            reduction = self._reductions.get(value)
            is_input = not {"query", "dim"} & set(value.type.axes)
            is_input = is_input or (reduction is not None and reduction.role == "rows")
            if is_input:
                inputs.append(value)
            elif value.operation.is_window:
                windows.append(value)
            elif value.op != "index":
                waiting.extend(value.args)
            self._check(value, role, is_input)
        if role != "vectors" and not any(w.operation.reads_queries for w in windows):
            raise Unsupported("no attention in it")
        if role == "rows" and not any(w.operation.softmax for w in windows):
            raise Unsupported("logits reduced over tokens")
        if len({window_key(w, self.bound, self.steps) for w in windows}) > 1:
            raise Unsupported("windows of different sizes in one expression")
        torch_axes = {
            "columns": ("kv", "token"),
            "vectors": ("kv", "token"),
            "rows": ("kv", "group"),
        }
        rest = tuple(axis for axis in node.axes if axis in torch_axes[role])
        if node.op == "var" and (rest or role == "rows"):
            raise Unsupported("a variance over tokens or KV heads")
        if any(looks_across(value, self.bound) for value in inputs):
            raise Unsupported("it looks at other layers")
        window = next((w for w in windows if w.op != "distance"), None)
        return Reduction(node, role, window, tuple(inputs), rest)

    def _check(self, node: Node, role: str, is_input: bool) -> None:
        """Raises `Unsupported` if a kernel cannot compute, or read, a value inside a reduction."""
        axes = set(node.type.axes)
        if is_input:
            allowed = {"kv", "token"} if role == "vectors" else _PER_TOKEN | {"query"}
            if not axes <= allowed:
                raise Unsupported(f"`{node.op}` has the axes {', '.join(node.type.axes)}")
        elif role == "vectors":
            if "query" in axes or "group" in axes:
                raise Unsupported("queries and `dim` in one expression")
            if node.operation.kind is not Kind.VECTOR:
                self._check_arithmetic(node)
        elif "dim" in axes:
            raise Unsupported("queries and `dim` in one expression")
        elif node.operation.is_window:
            if (
                node.operation.reads_queries
                and node.args
                and self.bound.static.needs(node.args[0]) is None
            ):
                raise Unsupported("the window's size depends on data")
        elif node.op == "index":
            if node.axes != ("query",):
                raise Unsupported("`index` of an axis other than query or token")
        elif node.operation.is_reduction:
            if node.axes != ("group",) or node.op == "var":
                raise Unsupported(f"`{node.op}[{', '.join(node.axes)}]` inside another reduction")
        else:
            self._check_arithmetic(node)

    def _check_arithmetic(self, node: Node) -> None:
        if not node.operation.in_kernels:
            raise Unsupported(f"`{node.op}` has no kernel")
        if node.op == "power" and exponent(node) is None:
            raise Unsupported("a power that is not 1, 2, 3, 4 or 1/2")
        if node.op == "exp" and any(
            not part.operation.in_kernels and not part.operation.softmax
            for part in node.args[0].walk()
            if part.type.axes or not part.operation.known_to_host
        ):
            raise Unsupported("`exp` may leave the range of float32")

    # What shares a pass.

    def _level(self, node: Node) -> int:
        """Length of the longest chain of bundles that a node needs, its own included."""
        if node not in self._levels:
            self._levels[node] = _LATE  # while it is not known
            self._levels[node] = self._find_level(node)
        return self._levels[node]

    def _find_level(self, node: Node) -> int:
        reduction = self._reductions.get(node)
        if reduction is not None:
            return 1 + max((self._level(value) for value in reduction.inputs), default=0)
        if node.op == "state":
            state = self._states.get(node.symbol)
            expression = None if state is None else (state.next or state.start)
            return 0 if expression is None else self._level(expression)
        if node.op == "before":
            start = self._states[node.symbol].start
            return 0 if start is None else self._level(start)
        args = () if node.operation.is_window else node.args
        return max((self._level(argument) for argument in args), default=0)

    def _grouped(self, nodes: list[Node]) -> list[Bundle]:
        groups: dict[tuple[int, tuple[object, ...]], list[Reduction]] = {}
        vectors_by_level: dict[int, list[Reduction]] = {}
        for reduction in self._reductions.values():
            level = self._level(reduction.node)
            if level >= _LATE:
                continue
            if reduction.window is None:
                vectors_by_level.setdefault(level, []).append(reduction)
            else:
                queries = window_key(reduction.window, self.bound, self.steps)
                groups.setdefault((level, queries), []).append(reduction)
        # What a prefill computes of all queries also runs chunk by chunk, maybe without the tensor
        # `value`; it shares its pass with nothing else.
        shared = ("recent", "new", "all") if self.steps else ("recent",)
        for level, vectors in vectors_by_level.items():
            keys = [key for key in groups if key[0] == level and key[1][0] in shared]
            groups.setdefault(keys[0] if keys else (level, ("none",)), []).extend(vectors)
        bundles = []
        for level, queries in sorted(groups, key=lambda key: key[0]):
            reductions = tuple(groups[level, queries])
            window = next(
                (reduction.window for reduction in reductions if reduction.window is not None), None
            )
            rides = queries[0] in (*shared, "none")
            tail = self._tail(nodes, reductions, level) if rides else ()
            bundles.append(Bundle(window, reductions, tail, (), ()))
        return bundles

    def _tail(
        self, nodes: list[Node], reductions: tuple[Reduction, ...], level: int
    ) -> tuple[Node, ...]:
        bundle_nodes = {
            reduction.node
            for reduction in reductions
            if not reduction.rest and reduction.role != "rows"
        }
        pooled: set[Node] = set()
        tail = []
        for node in nodes:
            if node in self._reductions or not self._follows(node, bundle_nodes, level):
                continue
            pools, reads_pooled = node.operation.kind is Kind.POOL, bool(pooled & {*node.args})
            if pools and reads_pooled:
                continue
            if pools or reads_pooled:
                pooled.add(node)
            bundle_nodes.add(node)
            tail.append(node)
        return tuple(tail)

    def _follows(self, node: Node, bundle_nodes: set[Node], level: int) -> bool:
        """Whether a value per token can be computed with the bundle's other values."""
        axes, static = set(node.type.axes), self.bound.static
        if not {"kv", "token"} <= axes <= _PER_TOKEN or node.when > self._latest:
            return False
        if not bundle_nodes & {*node.args}:
            return False
        if node.operation.kind is Kind.POOL:
            if static.needs(node.args[1]) is None:
                return False
            return node.op == "maxpool" or finite(node.args[0])
        if node.operation.is_reduction:
            return node.axes == ("group",) and node.op != "var"
        try:
            self._check_arithmetic(node)
        except Unsupported:
            return False
        return all(x in bundle_nodes or self._readable(x, level) for x in node.args)

    def _readable(self, node: Node, level: int) -> bool:
        if needs_no_tensor(node, self.bound):
            return True
        if not set(node.type.axes) <= _PER_TOKEN or node.when > self._latest:
            return False
        if self._level(node) >= level:
            return False
        if looks_across(node, self.bound):
            return False
        return not any(part.operation.value == "state" for part in node.walk())

    # What is read.

    def _outputs(self, bundles: list[Bundle]) -> set[Node]:
        """Nodes of bundles that something outside of them reads."""
        bundle_of = {x.node: bundle for bundle in bundles for x in bundle.reductions}
        bundle_of |= {node: bundle for bundle in bundles for node in bundle.tail}
        outputs: set[Node] = set()
        seen: set[Node] = set()
        waiting = list(self.roots)
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            owner = bundle_of.get(node)
            # A mask from tokens' places costs torch nothing; a kernel would store one more tensor.
            masks = node.op == "mask" and needs_no_tensor(node.args[1], self.bound)
            if owner is None or masks:
                waiting.extend(() if node.operation.is_window else node.args)
                continue
            outputs.add(node)
            waiting.extend(_inputs_of(owner, self.bound))
        return outputs

    def _needed(self, bundle: Bundle, outputs: set[Node]) -> Bundle:
        """The bundle with its outputs and inputs, without what no output needs."""
        needed = outputs & {*bundle.tail, *(reduction.node for reduction in bundle.reductions)}
        for node in reversed(bundle.tail):
            if node in needed:
                needed.update(node.args)
        tail = tuple(node for node in bundle.tail if node in needed)
        reductions = tuple(reduction for reduction in bundle.reductions if reduction.node in needed)
        window = bundle.window if any(reduction.window for reduction in reductions) else None
        draft = Bundle(window, reductions, tail, (), ())
        nodes = [*(reduction.node for reduction in reductions), *tail]
        bundle_outputs = tuple(node for node in nodes if node in outputs)
        return Bundle(window, reductions, tail, bundle_outputs, _inputs_of(draft, self.bound))


def _inputs_of(bundle: Bundle, bound: Bound) -> tuple[Node, ...]:
    """Values computed before that the kernels of a bundle read."""
    bundle_nodes = {*bundle.tail, *(reduction.node for reduction in bundle.reductions)}
    inputs = dict.fromkeys(node for reduction in bundle.reductions for node in reduction.inputs)
    for node in bundle.tail:
        args = node.args[:1] if node.operation.kind is Kind.POOL else node.args
        for argument in args:
            if argument not in bundle_nodes and not needs_no_tensor(argument, bound):
                inputs[argument] = None
    return tuple(inputs)


def _of_layer(node: Node) -> bool:
    """Whether a value without the axis `kv` follows from a layer's KV heads, or is remembered."""
    return "kv" not in node.type.axes and any(
        "kv" in part.axes or part.operation.kind is Kind.REMEMBERED for part in node.walk()
    )


def _role(node: Node) -> str | None:
    """The role of a reduction over large tensors of one layer; None: another node."""
    looks = {"layer", "past", "dropped"} & set(node.axes)
    if not node.operation.is_reduction or looks:
        return None
    axes = set(node.args[0].type.axes)
    if "dropped" in axes:
        return None
    if "dim" in axes:
        return "vectors" if "dim" in node.axes else None
    if not {"query", "token"} <= axes:
        return None
    if "query" in node.axes:
        return "columns"
    return "rows" if "token" in node.axes else None
