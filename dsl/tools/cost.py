"""What a bound policy costs: in a prefill and while a request decodes.

In a prefill: the time of each expression beside the model's own work, and memory. While a request
decodes: memory, and operations of a step.

Dimensions: L layers, G KV heads, N tokens of the prompt.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.bind.bounds import max_entries
from kvpolicy.dsl.bind.gpu import USUAL_GPU, Gpu
from kvpolicy.dsl.bind.lengths import lengths
from kvpolicy.dsl.bind.model_config import ModelConfig
from kvpolicy.dsl.bind.work import Sizes, Work
from kvpolicy.dsl.ir.lower import Phase, Phases
from kvpolicy.dsl.ir.nodes import Node
from kvpolicy.dsl.ir.traverse import merge_roots, nodes_of, state_roots
from kvpolicy.dsl.syntax.source import Span

_VALUE = 8  # bytes of float64
# Bytes of attention maps above which KV heads are computed in blocks.
_BLOCK = 64 << 20


@dataclass(frozen=True)
class ExpressionCost:
    """What one expression costs, in all layers.

    Attributes:
        name: the let, state or section whose value it is.
        work: operations and bytes.
        seconds: time on the GPU.
        span: place of the part that takes longest; None if it has no place in the file.
        squared: why the cost grows with the square of the prompt, as a clause; empty if not.
    """

    name: str
    work: Work
    seconds: float
    span: Span | None
    squared: str


@dataclass(frozen=True)
class Cost:
    """What scoring and choosing for one prompt cost.

    Attributes:
        parts: costs by expression, the largest first.
        prefill: seconds of the model's own work for the prompt, of all layers and tokens.
        bytes_read: bytes of one layer's queries, keys and values, each read once.
        peak: most bytes of values that exist at once within a layer, in blocks of KV heads;
            without merging and sharing.
        held: bytes of values of all layers that are kept until the last layer.
    """

    parts: tuple[ExpressionCost, ...]
    prefill: float
    bytes_read: int
    peak: int
    held: int

    @property
    def operations(self) -> float:
        """Operations of all expressions in all layers."""
        return sum(part.work.operations for part in self.parts)

    @property
    def share(self) -> float:
        """Time of all expressions, as a share of the prefill's time."""
        return sum(map(self.share_of, self.parts))

    def share_of(self, part: ExpressionCost) -> float:
        """Time of an expression, as a share of the prefill's time."""
        return part.seconds / self.prefill


def cost(
    bound: Bound,
    config: ModelConfig,
    prompt: int,
    gpu: Gpu = USUAL_GPU,
    *,
    attended: bool = True,
) -> Cost:
    """The cost of scoring and choosing for one prompt of N tokens, at least 1.

    It follows from operations and bytes alone, on a GPU with generated kernels. The time of kernel
    launches is left out; for short prompts and small models it is most of the time. If data decide
    how many tokens go deeper or how many entries stay, the upper bound is used.

    Args:
        attended: whether the prefill's attention returns the log-sum-exp of its logits, as
            FlashInfer and FlashAttention 3 do; if not, the keys are read once more.
    """
    nodes = _Nodes(bound, config, prompt, gpu, attended)
    sizes, values = nodes.sizes(0, prompt), nodes.of("keep", "propagate")
    layer_values = [node for node in values if nodes.phases.of(node) == Phase.LAYER]
    end_values = [node for node in values if nodes.phases.of(node) == Phase.END]
    end_arguments = {x for node in end_values for x in node.args}
    held = sum(sizes.elements(node) * _VALUE for node in layer_values if node in end_arguments)
    return Cost(
        tuple(sorted(nodes.parts(), key=lambda part: -part.seconds)),
        gpu.seconds(config.prefill_work(prompt)),
        _read(layer_values, sizes),
        _peak(layer_values, sizes),
        int(held) * bound.shape.layers,
    )


@dataclass
class _Sum:
    """The cost of one expression so far."""

    root: Node
    work: Work = field(default_factory=Work)
    seconds: dict[Node, float] = field(default_factory=dict)

    def add(self, node: Node, work: Work, seconds: float) -> None:
        self.work += work
        self.seconds[node] = self.seconds.get(node, 0.0) + seconds


class _Nodes:
    """The values that a prefill computes, grouped by section and expression.

    Args:
        prompt: N tokens.
        attended: see `cost`.
    """

    def __init__(
        self, bound: Bound, config: ModelConfig, prompt: int, gpu: Gpu, attended: bool
    ) -> None:
        self.bound, self.prompt, self.element = bound, prompt, config.element_bytes
        self.gpu, self.attended = gpu, attended
        self.phases = Phases(bound.propagates)
        self._lengths = [high for _, high in lengths(bound, prompt)]
        lists = bound.shape.layers * bound.shape.kv_heads
        mean = max_entries(bound, prompt) // lists
        # If all may stay: half of them, which gives the most pairs of a dropped and a kept entry.
        self._kept = mean if mean < prompt else prompt // 2
        self._acts = bound.propagation_layer(prompt)
        self._known: dict[tuple[object, ...], Sizes] = {}
        self._owners: dict[Node, tuple[str, Node]] = {}
        # A node that several sections read counts in the first of them.
        self._sections: dict[str, list[Node]] = {
            section: list(self._section(roots)) for section, roots in _sections(bound).items()
        }

    def _section(self, roots: list[tuple[str, Node]]) -> Iterator[Node]:
        for name, root in roots:
            yield from self._own(root, name, root)

    def _own(self, node: Node, name: str, root: Node) -> Iterator[Node]:
        """Nodes that tensors decide, arguments first; the nearest name above a node owns it."""
        if node in self._owners:
            return
        if node.name is not None:
            name, root = node.name, node
        self._owners[node] = name, root
        for argument in node.args:
            yield from self._own(argument, name, root)
        if self.bound.static.needs(node) is None and self.phases.of(node) != Phase.PLAN:
            yield node

    def of(self, *sections: str) -> list[Node]:
        """Values of sections that tensors decide, arguments before users."""
        return [node for name in sections for node in self._sections.get(name, ())]

    def all(self) -> list[Node]:
        """Values of all sections that tensors decide."""
        return self.of(*self._sections)

    def sizes(self, layer: int, length: int) -> Sizes:
        """Sizes of the values of a layer that `length` tokens reach."""
        windows = [node for node in self.all() if node.operation.reads_queries]
        counts = (self.bound.window(node, self.prompt, layer, length) for node in windows)
        key = (length, *counts)
        if key not in self._known:
            arguments = (self.bound, self.prompt, layer, length, self._kept, self.element)
            self._known[key] = Sizes(*arguments, attended=self.attended)
        return self._known[key]

    def parts(self) -> Iterator[ExpressionCost]:
        """The cost of every expression in all layers."""
        sums: dict[str, _Sum] = {}
        for section, nodes in self._sections.items():
            for layer in range(self.bound.shape.layers):
                length = self._reached(section, layer)
                if length is None:
                    continue
                sizes = self.sizes(layer, length)
                for node in nodes:
                    name, root = self._owners[node]
                    work = sizes.work(node)
                    subtotal = sums.setdefault(name, _Sum(root))
                    subtotal.add(node, work, self.gpu.seconds(work))
        for name, total in sums.items():
            dearest = max(total.seconds, key=total.seconds.__getitem__)
            seconds = sum(total.seconds.values())
            yield ExpressionCost(
                name, total.work, seconds, dearest.span or total.root.span, self._squared(dearest)
            )

    def _reached(self, section: str, layer: int) -> int | None:
        """Number of tokens for which a layer computes a section; None if it does not."""
        if section == "propagate":
            if self._acts is not None and layer != self._acts:
                return None
            return self.prompt if self.bound.restarts else self._lengths[layer]
        if section == "share" and layer not in self.bound.upper_layers:
            return None
        return self._lengths[layer]

    def _squared(self, node: Node) -> str:
        """Why computing a value grows with the square of the prompt; empty if it does not."""
        if node.op == "nearest":
            return "it compares every dropped entry with every kept one"
        if "query" not in node.type.axes and not any("query" in x.type.axes for x in node.args):
            return ""
        windows = [window for window in node.walk() if window.operation.reads_queries]
        if any(not window.args for window in windows):
            return "it looks at every pair of tokens"
        needs = (self.bound.static.needs(window.args[0]) or frozenset() for window in windows)
        if any({"prompt", "length"} & names for names in needs):
            return "its window grows with the prompt, so that it looks at a share of all pairs"
        return ""


def _sections(bound: Bound) -> dict[str, list[tuple[str, Node]]]:
    """Name and root of each expression that a prefill computes, by section."""
    rules, share = bound.lowered.prefill, bound.lowered.share
    sections: dict[str, list[tuple[str, Node | None]]] = {"keep": [("keep", rules.keep)]}
    sections["keep"] += [(name, x) for name, s in rules.states.items() for x in (s.start, s.next)]
    if rules.merge is not None:
        merge = rules.merge
        sections["merge"] = [(f"merge.{name}", node) for name, node in merge.parts.items()]
        states = merge.states.items()
        sections["merge"] += [(f"merge.{name}", x) for name, s in states for x in (s.start, s.next)]
    if share is not None:
        sections["share"] = [
            ("share.direction", share.direction),
            ("share.except", share.exceptions),
        ]
    propagate = bound.lowered.propagate
    if propagate is not None:
        names = ("first", "every", "budget", "tokens")
        sections["propagate"] = [(f"propagate.{name}", getattr(propagate, name)) for name in names]
    return {
        section: [(name, node) for name, node in roots if node is not None]
        for section, roots in sections.items()
    }


def _read(nodes: list[Node], sizes: Sizes) -> int:
    """Bytes of a layer's keys, values and queries that nodes read, each read once."""
    keys = sizes.axes["kv"] * sizes.tokens * sizes.axes["dim"]
    numbers = keys * (
        any("key" in node.operation.tensors for node in nodes)
        + any("value" in node.operation.tensors for node in nodes)
    )
    windows = [node for node in nodes if node.operation.reads_queries]
    queries = max(map(sizes.queries, windows), default=0)
    numbers += queries * sizes.axes["kv"] * sizes.axes["group"] * sizes.axes["dim"]
    return numbers * sizes.element


def _peak(nodes: list[Node], sizes: Sizes) -> int:
    """The most bytes alive at once, computing nodes in order and freeing at the last use."""
    last_use = {x: place for place, node in enumerate(nodes) for x in node.args}
    maps = [sizes.elements(node) * _VALUE for node in nodes if "query" in node.type.axes]
    blocks = max(1, min(sizes.axes["kv"], math.ceil(max(maps, default=0) / _BLOCK)))
    keys = sizes.axes["kv"] * sizes.tokens * sizes.axes["dim"] * _VALUE
    alive: dict[Node, float] = {}
    peak = 0.0
    for place, node in enumerate(nodes):
        large = {"query", "dim"} & set(node.type.axes)
        size = sizes.elements(node) * (1 if node.type.kind == "truth" else _VALUE)
        # A map too large even for one KV head is made for some queries at a time.
        alive[node] = min(size // blocks, _BLOCK) if large else size
        # While a map is made, the float64 copy of the keys or the map before its softmax exists.
        scratch = max(alive[node], keys // blocks) if node.operation.reads_queries else 0
        peak = max(peak, sum(alive.values()) + scratch)
        for unused in [value for value in alive if last_use.get(value, math.inf) <= place]:
            del alive[unused]
    return int(peak)


def memory_of_decode(bound: Bound, prompt: int, element: int) -> tuple[int, int]:
    """(bytes of states, bytes of queries) that one request remembers for its decode steps.

    Args:
        prompt: N tokens.
        element: bytes of one number of a query.
    """
    shape = bound.shape
    entries = max(1, max_entries(bound, prompt) // (shape.layers * shape.kv_heads))
    axes = {"kv": shape.kv_heads, "group": shape.group, "token": entries, "dim": shape.head_dim}
    states = bound.folded.decode.states.values() if bound.folded.decode is not None else ()
    values = sum(math.prod(axes.get(axis, 1) for axis in x.type.axes) for x in states)
    # A window of one is the newest query, which is at hand.
    queries = bound.step_queries(prompt)
    remembered = queries * shape.heads * shape.head_dim if queries > 1 else 0
    return shape.layers * values * _VALUE, shape.layers * remembered * element


def decode_cost(bound: Bound, prompt: int) -> dict[str, float]:
    """Operations per layer of a decode step: at every step, and where entries leave."""
    shape = bound.shape
    entries = max(1, max_entries(bound, prompt) // (shape.layers * shape.kv_heads)) + 1
    sizes = Sizes(bound, prompt, 0, entries, entries - 1, _VALUE, step=True)
    rules = bound.lowered.decode
    if rules is None:
        return {}
    step_nodes = dict.fromkeys(nodes_of(state_roots(rules.states)))
    leaving_nodes = nodes_of([rules.keep, *merge_roots(rules.merge)])
    step_operations = sum(sizes.work(node).operations for node in step_nodes)
    costs = {"at every step": step_operations} if step_operations else {}
    costs["where entries leave"] = sum(
        sizes.work(node).operations for node in leaving_nodes if node not in step_nodes
    )
    return costs
