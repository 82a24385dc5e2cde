"""What a bound policy costs: operations, bytes read and memory, by the torch program's plan.

Counts are of the work that the definition asks for: a multiplication and an addition are 2, any
other elementwise step is 1 per value, a selection of the best of M values is M * log2(M).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from kvpolicy.dsl.bind import Bound
from kvpolicy.dsl.ir import Node
from kvpolicy.dsl.lower import Phase, Phases
from kvpolicy.dsl.traverse import merge_roots, nodes_of, propagate_roots, state_roots

_VALUE = 8  # bytes of float64
_SELECTIONS = ("top", "fill", "rank")
_SOFTMAX = 5  # scale, subtract, exponential, sum, divide


@dataclass(frozen=True)
class Cost:
    """Of one prompt.

    Attributes:
        operations: per layer, number of operations by what causes them.
        at_end: operations after the last layer.
        bytes_read: per layer, bytes of queries, keys and values.
        peak: bytes of values that exist at once within a layer, in blocks of KV heads.
        held: bytes kept from layer to layer until the end.
    """

    operations: Mapping[str, float]
    at_end: float
    bytes_read: int
    peak: int
    held: int

    def total(self, layers: int) -> float:
        """Operations of the whole prefill."""
        return layers * sum(self.operations.values()) + self.at_end


class Sizes:
    """How many numbers a node has for a prompt of N tokens."""

    def __init__(self, bound: Bound, prompt: int) -> None:
        shape = bound.shape
        self.axes = {
            "kv": shape.kv_heads,
            "group": shape.group,
            "query": bound.queries(prompt),
            "token": prompt,
            "dim": shape.head_dim,
            "past": shape.layers,
            "dropped": prompt,
        }

    def of(self, node: Node) -> int:
        """Values of one layer."""
        return math.prod(self.axes.get(axis, 1) for axis in node.type.axes)


def cost(bound: Bound, prompt: int, element: int, block_bytes: int = 64 << 20) -> Cost:
    """The cost of scoring and choosing for one prompt.

    Args:
        bound: the policy.
        prompt: N tokens.
        element: bytes of one number of the model's queries, keys and values.
        block_bytes: what one attention map may take before KV heads are done in blocks.
    """
    shape, sizes, phases = bound.shape, Sizes(bound, prompt), Phases(bound.propagates)
    rules = bound.lowered
    early = propagate_roots(bound.propagate_lowered)
    nodes = list(nodes_of([rules.keep, *state_roots(rules.states), *early]))
    layer = [node for node in nodes if phases.of(node) == Phase.LAYER]
    ends = [node for node in nodes if phases.of(node) == Phase.END]
    operations: dict[str, float] = {}
    for node in layer:
        name = _name(node)
        operations[name] = operations.get(name, 0.0) + _operations(node, sizes, bound)
    held = {id(x) for node in ends for x in node.args}
    handed = sum(sizes.of(node) * _VALUE for node in layer if id(node) in held)
    reads = {node.op for node in layer}
    numbers = prompt * shape.kv_heads * shape.head_dim
    read = numbers * (bool(reads & {"attn", "logits", "key"}) + ("value" in reads))
    if bound.lowered.merge is not None:
        operations["merging"] = _merge_operations(bound, prompt)
    read += bound.queries(prompt) * shape.heads * shape.head_dim * bool(reads & {"attn", "logits"})
    return Cost(
        operations,
        shape.layers * sum(_operations(node, sizes, bound) for node in ends),
        read * element,
        _peak(layer, sizes, bound, block_bytes),
        handed * shape.layers,
    )


def _merge_operations(bound: Bound, entries: int) -> float:
    """Finding the receivers of one layer's dropped entries among its kept ones, by cosines."""
    shape = bound.shape
    kept = min(entries, bound.max_entries(entries) // (shape.layers * shape.kv_heads))
    return 2.0 * shape.kv_heads * kept * (entries - kept) * shape.head_dim


def memory_of_decode(bound: Bound, prompt: int, element: int) -> tuple[int, int]:
    """Bytes that one request remembers for its decode steps: of states, and of queries.

    Args:
        bound: the policy.
        prompt: N tokens.
        element: bytes of one number of a query.
    """
    shape = bound.shape
    entries = max(1, bound.max_entries(prompt) // (shape.layers * shape.kv_heads))
    axes = {"kv": shape.kv_heads, "group": shape.group, "token": entries, "dim": shape.head_dim}
    states = bound.decode.states.values() if bound.decode is not None else ()
    values = sum(math.prod(axes.get(axis, 1) for axis in x.type.axes) for x in states)
    # The newest query is at hand; only older ones are kept.
    queries = bound.step_queries(prompt)
    remembered = queries * shape.heads * shape.head_dim if queries > 1 else 0
    return shape.layers * values * _VALUE, shape.layers * remembered * element


def decode_cost(bound: Bound, prompt: int) -> dict[str, float]:
    """Operations per layer of a decode step: at every step, and where entries leave."""
    shape = bound.shape
    entries = max(1, bound.max_entries(prompt) // (shape.layers * shape.kv_heads)) + 1
    sizes = Sizes(bound, prompt)
    sizes.axes.update(token=entries, query=bound.step_queries(prompt), dropped=1)
    rules = bound.decode_lowered
    always = list(nodes_of(state_roots(rules.states)))
    known = {id(node) for node in always}
    leaving = [
        node for node in nodes_of([rules.keep, *merge_roots(rules.merge)]) if id(node) not in known
    ]
    every = sum(_operations(node, sizes, bound) for node in always)
    costs = {"at every step": every} if every else {}
    costs["where entries leave"] = sum(_operations(node, sizes, bound) for node in leaving)
    return costs


def _name(node: Node) -> str:
    if node.op in ("attn", "logits"):
        return "attention of the window"
    if node.op in ("key", "value"):
        return "keys and values"
    if node.op in _SELECTIONS:
        return "selection"
    return "pooling" if node.op.endswith("pool") else "other arithmetic"


def _operations(node: Node, sizes: Sizes, bound: Bound) -> float:
    own = sizes.of(node)
    inner = sizes.of(node.args[0]) if node.args else own
    if node.op in ("attn", "logits"):
        return own * (2 * bound.shape.head_dim + (_SOFTMAX if node.op == "attn" else 0))
    if node.op in _SELECTIONS:
        return inner * max(1.0, math.log2(max(2, inner)))
    return float(max(own, inner))


def _peak(nodes: list[Node], sizes: Sizes, bound: Bound, block_bytes: int) -> int:
    """The most bytes alive at once, computing nodes in order and freeing at the last use."""
    last = {id(x): place for place, node in enumerate(nodes) for x in node.args}
    maps = [sizes.of(node) * _VALUE for node in nodes if "query" in node.type.axes]
    blocks = 1
    if maps:
        blocks = max(1, min(bound.shape.kv_heads, math.ceil(max(maps) / block_bytes)))
    keys = sizes.axes["kv"] * sizes.axes["token"] * sizes.axes["dim"] * _VALUE
    alive: dict[int, int] = {}
    peak = 0
    for place, node in enumerate(nodes):
        large = {"query", "dim"} & set(node.type.axes)
        size = sizes.of(node) * (1 if node.type.kind == "truth" else _VALUE)
        # A map that is too large for one KV head is made for some queries at a time.
        alive[id(node)] = min(size // blocks, block_bytes) if large else size
        # While a map is made, the float64 copy of the keys or the map before its softmax exists.
        scratch = 0
        if node.op in ("attn", "logits"):
            scratch = max(alive[id(node)], keys // blocks)
        peak = max(peak, sum(alive.values()) + scratch)
        for name in [name for name in alive if last.get(name, math.inf) <= place]:
            del alive[name]
    return peak
