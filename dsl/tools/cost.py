"""What a bound policy costs: a prefill, by expression, beside the model's own work, and in memory;
a request while it decodes, in memory and in operations of a step.

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
# What one attention map may take before KV heads are done in blocks.
_BLOCK = 64 << 20


@dataclass(frozen=True)
class Part:
    """What one expression costs, in all layers.

    Attributes:
        name: of the let, state or section whose value it is.
        work: operations and bytes.
        seconds: how long it takes on the GPU.
        span: the part of it that takes longest; None: it stands nowhere.
        squared: why it grows with the square of the prompt, as a sentence; empty: it does not.
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
        parts: by expression, the dearest first.
        prefill: seconds of the model's own work for the prompt, of all layers and tokens.
        bytes_read: bytes of queries, keys and values that the values of one layer need.
        peak: bytes of values that exist at once within a layer, in blocks of KV heads; without
            those of merging and sharing.
        held: bytes kept from layer to layer until the end.
    """

    parts: tuple[Part, ...]
    prefill: float
    bytes_read: int
    peak: int
    held: int

    @property
    def operations(self) -> float:
        """Operations of all layers."""
        return sum(part.work.operations for part in self.parts)

    @property
    def share(self) -> float:
        """How long all of it takes, as a share of the prefill's time."""
        return sum(map(self.share_of, self.parts))

    def share_of(self, part: Part) -> float:
        """How long an expression takes, as a share of the prefill's time."""
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

    It is reckoned for a GPU with generated kernels, from operations and bytes alone. What launching
    kernels takes is left out: for short prompts and small models that is most of the time. Where
    data decide how many tokens go deeper or how many entries stay, the most is reckoned with.

    Args:
        attended: the prefill's attention hands over the log-sum-exp of its logits, as FlashInfer
            and FlashAttention 3 do; else the keys are gone over once more.
    """
    nodes = _Nodes(bound, config, prompt, gpu, attended)
    sizes, chosen = nodes.sizes(0, prompt), nodes.of("keep", "propagate")
    layer = [node for node in chosen if nodes.phases.of(node) == Phase.LAYER]
    ends = [node for node in chosen if nodes.phases.of(node) == Phase.END]
    late = {x for node in ends for x in node.args}
    held = sum(sizes.of(node) * _VALUE for node in layer if node in late)
    return Cost(
        tuple(sorted(nodes.parts(), key=lambda part: -part.seconds)),
        gpu.seconds(config.prefill_work(prompt)),
        _read(layer, sizes),
        _peak(layer, sizes),
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
    """The values that a prefill computes, by the expression that they belong to.

    Args:
        prompt: N tokens.
        attended: as of `cost`.
    """

    def __init__(
        self, bound: Bound, config: ModelConfig, prompt: int, gpu: Gpu, attended: bool
    ) -> None:
        self.bound, self.prompt, self.element = bound, prompt, config.kv_bytes
        self.gpu, self.attended = gpu, attended
        self.phases = Phases(bound.propagates)
        self._lengths = [high for _, high in lengths(bound, prompt)]
        lists = bound.shape.layers * bound.shape.kv_heads
        mean = max_entries(bound, prompt) // lists
        # Where data decide, half of the entries leave most pairs of a dropped and a kept one.
        self._kept = mean if mean < prompt else prompt // 2
        self._acts = bound.propagation_layer(prompt)
        self._known: dict[tuple[object, ...], Sizes] = {}
        self._owners: dict[Node, tuple[str, Node]] = {}
        # Of nodes that several sections read the first one counts.
        self._sections: dict[str, list[Node]] = {
            section: list(self._section(roots)) for section, roots in _sections(bound).items()
        }

    def _section(self, roots: list[tuple[str, Node]]) -> Iterator[Node]:
        for name, root in roots:
            yield from self._own(root, name, root)

    def _own(self, node: Node, name: str, root: Node) -> Iterator[Node]:
        """The nodes below one that belong to nothing yet, each owned by the name next above it."""
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
        """Those of all sections."""
        return self.of(*self._sections)

    def sizes(self, layer: int, length: int) -> Sizes:
        """Sizes of a layer that so many tokens reach."""
        windows = [node for node in self.all() if node.operation.reads_queries]
        counts = (self.bound.window(node, self.prompt, layer, length) for node in windows)
        key = (length, *counts)
        if key not in self._known:
            given = (self.bound, self.prompt, layer, length, self._kept, self.element)
            self._known[key] = Sizes(*given, attended=self.attended)
        return self._known[key]

    def parts(self) -> Iterator[Part]:
        """What every expression costs in all layers."""
        sums: dict[str, _Sum] = {}
        for section, own in self._sections.items():
            for layer in range(self.bound.shape.layers):
                length = self._reached(section, layer)
                if length is None:
                    continue
                sizes = self.sizes(layer, length)
                for node in own:
                    name, root = self._owners[node]
                    work = sizes.work(node)
                    own_sum = sums.setdefault(name, _Sum(root))
                    own_sum.add(node, work, self.gpu.seconds(work))
        for name, each in sums.items():
            dearest = max(each.seconds, key=each.seconds.__getitem__)
            seconds = sum(each.seconds.values())
            yield Part(
                name, each.work, seconds, dearest.span or each.root.span, self._squared(dearest)
            )

    def _reached(self, section: str, layer: int) -> int | None:
        """Tokens of a layer at which a section is computed; None: it is not."""
        if section == "propagate":
            if self._acts is not None and layer != self._acts:
                return None
            return self.prompt if self.bound.restarts else self._lengths[layer]
        if section == "share" and layer not in self.bound.upper_layers:
            return None
        return self._lengths[layer]

    def _squared(self, node: Node) -> str:
        """Why computing a value grows with the square of the prompt."""
        if node.op == "nearest":
            return "it compares every dropped entry with every kept one"
        if "query" not in node.type.axes and not any("query" in x.type.axes for x in node.args):
            return ""
        windows = [each for each in node.walk() if each.operation.reads_queries]
        if any(not each.args for each in windows):
            return "it looks at every pair of tokens"
        needs = (self.bound.static.needs(each.args[0]) or frozenset() for each in windows)
        if any({"prompt", "length"} & each for each in needs):
            return "its window grows with the prompt, so that it looks at a share of all pairs"
        return ""


def _sections(bound: Bound) -> dict[str, list[tuple[str, Node]]]:
    """The roots of what a prefill computes, by section and with the names of their expressions."""
    rules, share = bound.lowered.prefill, bound.lowered.share
    found: dict[str, list[tuple[str, Node | None]]] = {"keep": [("keep", rules.keep)]}
    found["keep"] += [(name, x) for name, s in rules.states.items() for x in (s.start, s.next)]
    if rules.merge is not None:
        merge = rules.merge
        found["merge"] = [(f"merge.{name}", node) for name, node in merge.parts.items()]
        states = merge.states.items()
        found["merge"] += [(f"merge.{name}", x) for name, s in states for x in (s.start, s.next)]
    if share is not None:
        found["share"] = [("share.direction", share.direction), ("share.except", share.exceptions)]
    propagate = bound.lowered.propagate
    if propagate is not None:
        names = ("first", "every", "budget", "tokens")
        found["propagate"] = [(f"propagate.{name}", getattr(propagate, name)) for name in names]
    return {
        section: [(name, node) for name, node in roots if node is not None]
        for section, roots in found.items()
    }


def _read(nodes: list[Node], sizes: Sizes) -> int:
    """Bytes of a layer's keys, values and queries, each read once."""
    keys = sizes.axes["kv"] * sizes.tokens * sizes.axes["dim"]
    numbers = keys * (
        any("key" in node.operation.tensors for node in nodes)
        + any("value" in node.operation.tensors for node in nodes)
    )
    windows = [node for node in nodes if node.operation.reads_queries]
    asked = max(map(sizes.queries, windows), default=0)
    numbers += asked * sizes.axes["kv"] * sizes.axes["group"] * sizes.axes["dim"]
    return numbers * sizes.element


def _peak(nodes: list[Node], sizes: Sizes) -> int:
    """The most bytes alive at once, computing nodes in order and freeing at the last use."""
    last = {x: place for place, node in enumerate(nodes) for x in node.args}
    maps = [sizes.of(node) * _VALUE for node in nodes if "query" in node.type.axes]
    blocks = max(1, min(sizes.axes["kv"], math.ceil(max(maps, default=0) / _BLOCK)))
    keys = sizes.axes["kv"] * sizes.tokens * sizes.axes["dim"] * _VALUE
    alive: dict[Node, float] = {}
    peak = 0.0
    for place, node in enumerate(nodes):
        large = {"query", "dim"} & set(node.type.axes)
        size = sizes.of(node) * (1 if node.type.kind == "truth" else _VALUE)
        # A map that is too large for one KV head is made for some queries at a time.
        alive[node] = min(size // blocks, _BLOCK) if large else size
        # While a map is made, the float64 copy of the keys or the map before its softmax exists.
        scratch = max(alive[node], keys // blocks) if node.operation.reads_queries else 0
        peak = max(peak, sum(alive.values()) + scratch)
        for done in [each for each in alive if last.get(each, math.inf) <= place]:
            del alive[done]
    return int(peak)


def memory_of_decode(bound: Bound, prompt: int, element: int) -> tuple[int, int]:
    """Bytes that one request remembers for its decode steps: of states, and of queries.

    Args:
        prompt: N tokens.
        element: bytes of one number of a query.
    """
    shape = bound.shape
    entries = max(1, max_entries(bound, prompt) // (shape.layers * shape.kv_heads))
    axes = {"kv": shape.kv_heads, "group": shape.group, "token": entries, "dim": shape.head_dim}
    states = bound.folded.decode.states.values() if bound.folded.decode is not None else ()
    values = sum(math.prod(axes.get(axis, 1) for axis in x.type.axes) for x in states)
    # The newest query is at hand; only older ones are kept.
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
    always = dict.fromkeys(nodes_of(state_roots(rules.states)))
    leaving = nodes_of([rules.keep, *merge_roots(rules.merge)])
    every = sum(sizes.work(node).operations for node in always)
    costs = {"at every step": every} if every else {}
    costs["where entries leave"] = sum(
        sizes.work(node).operations for node in leaving if node not in always
    )
    return costs
