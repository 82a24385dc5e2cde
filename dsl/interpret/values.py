"""Values of a policy's expressions: what the interpreter computes at the layers it is given.

Every value is computed from the definition in docs/language.md, without the rewriting that the
torch program uses, so that the two are independent. The prefill, the decode steps and the merges of
the interpreter say which entries there are; this says what expressions mean on them.

Dimensions: L layers, H query heads, G KV heads, M candidates of a layer, T queries, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.data import arrays
from kvpolicy.dsl.data.arrays import Array
from kvpolicy.dsl.ir import counts
from kvpolicy.dsl.ir.nodes import Node, Rules, State, Type
from kvpolicy.dsl.ir.once import once
from kvpolicy.dsl.ops.forms import form
from kvpolicy.dsl.ops.operations import Kind
from kvpolicy.dsl.syntax.diagnostics import refused

Decided = Callable[[str, int], Array]


@dataclass(frozen=True)
class Layer:
    """The entries of one layer that a selection chooses among.

    Attributes:
        positions: int64 [M], ascending.
        keys, values: [G, M, D].
        queries: [H, T, D], the last ones of this layer.
        query_positions: int64 [T].
        held: bool [G, M]: which KV head holds which entry.
    """

    positions: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    queries: np.ndarray
    query_positions: np.ndarray
    held: np.ndarray

    @property
    def ragged(self) -> bool:
        """Whether KV heads hold different entries."""
        return not self.held.all()


def name_of(node: Node) -> str:
    """What a node names: a state, or a special value of a merge or share."""
    return str(node.value)


class Values:
    """Values of nodes, each computed once per layer.

    Args:
        rules: the program's rules, to whose budget and states names refer.
        layers: by number; deeper ones may be added while lower ones are computed.
        prompt: N tokens.
        generated: which decode step, from 1; None in the prefill.
        stored: values of states before this step, by name and layer.
        budgets: per layer, the whole numbers [G] that the name `budget` means where the rules have
            no budget of their own.
        decided: in decode, from a let's name and a layer to what the prefill decided.
        known: values that are known already; more are added.
    """

    def __init__(
        self,
        bound: Bound,
        rules: Rules,
        layers: dict[int, Layer],
        prompt: int,
        generated: int | None = None,
        stored: Mapping[tuple[str, int], Array] | None = None,
        budgets: list[np.ndarray] | None = None,
        known: dict[tuple[object, ...], Array] | None = None,
        decided: Decided | None = None,
    ) -> None:
        self.bound, self.rules, self.layers = bound, rules, layers
        self.prompt, self.generated = prompt, generated
        self.stored, self.budgets, self.decided = stored or {}, budgets or [], decided
        self.own_budget = rules.budget  # what an unsized `top` fills
        self.states: dict[str, State] = dict(rules.states)
        self.kv = bound.shape.kv_heads
        self.every_layer = range(bound.shape.layers)
        self.known: dict[tuple[object, ...], Array] = {} if known is None else known
        self.updating: str | None = None  # the state whose `next` is being computed

    def value(self, node: Node, layer: int) -> Array:
        """The value of a node at a layer; absent where a KV head does not hold an entry."""
        key = (node, layer, self.updating if self._reads_old(node) else None)
        if key not in self.known:
            self.known[key] = self._masked(self._compute(node, layer), layer)
        return self.known[key]

    def _compute(self, node: Node, layer: int) -> Array:
        if self.bound.static.needs(node) is not None:
            number = self.number(node, layer)
            return Array.of((), number if isinstance(number, bool) else float(number))
        return self.special(node, layer)

    def special(self, node: Node, layer: int) -> Array:
        """The value of a node that data decide."""
        kind = node.operation.kind
        if node.operation.interpret is None:
            what = "a decode step" if self.generated else "the end of a layer's prefill"
            name = self.bound.program.name
            raise refused(name, "phase", f"`{node.op}` is not available at {what}")
        function = form(node.operation.interpret, "interpret")
        if kind is Kind.ARITHMETIC:
            return arrays.elementwise(function, *(self.value(arg, layer) for arg in node.args))
        if kind is Kind.LOGIC:
            return arrays.elementwise(function, *(self.truth(arg, layer) for arg in node.args))
        if kind is Kind.COMPARISON:
            return arrays.compare(function, *(self.value(arg, layer) for arg in node.args))
        if kind is Kind.REDUCTION:
            x = self.gathered(node.args[0], node.axes, layer)
            return self.own(arrays.reduce(function, x, node.axes), node.axes, layer)
        result: Array = function(self, node, layer)
        return result

    def truth(self, node: Node, layer: int) -> Array:
        """A truth value, false where absent."""
        x = self.value(node, layer)
        return Array.of(x.axes, x.data & x.present)

    def number(self, node: Node, layer: int) -> Fraction | float:
        """A scalar: exact if it is known without data."""
        if self.bound.static.needs(node) is not None:
            length = None if self.generated else self.candidates(layer)
            return self.bound.number(
                node, self.prompt, layer, length=length, generated=self.generated
            )
        return float(self.value(node, layer).data)

    def candidates(self, layer: int) -> int:
        """M, the entries that some KV head holds; N at a layer that has not been reached yet.

        Only values that need no data are asked for at such a layer.
        """
        return len(self.layers[layer].positions) if layer in self.layers else self.prompt

    def forget_maps(self, layer: int) -> None:
        """Drops the attention maps of a layer, which nothing across layers needs."""
        for key in [k for k, x in self.known.items() if k[1] == layer and "query" in x.axes]:
            del self.known[key]

    def _masked(self, x: Array, layer: int) -> Array:
        if layer not in self.layers or not self.layers[layer].ragged:
            return x
        if not {"kv", "token"} <= set(x.axes):
            return x
        held = self.layers[layer].held
        mask = held.reshape([n if axis in ("kv", "token") else 1 for axis, n in _sizes(x)])
        return Array.of(x.axes, x.data, x.present & mask)

    # States.

    def _reads_old(self, node: Node) -> bool:
        """Whether a node reads the state that is being updated, as it was before."""
        return self.updating is not None and self._reads(node, self.updating)

    @once
    def _reads(self, node: Node, state: str) -> bool:
        is_state = node.op == "state" and node.value == state
        return is_state or any(self._reads(arg, state) for arg in node.args)

    def state(self, name: str, layer: int) -> Array:
        """A state after this step."""
        key = (name, layer, "state")
        if key not in self.known:
            outer, self.updating = self.updating, name
            update = self.states[name].next
            if update is None:
                self.known[key] = self.before(name, layer)
            else:
                self.known[key] = self.value(update, layer)
            self.updating = outer
        return self.known[key]

    def before(self, name: str, layer: int) -> Array:
        """A state before this step: as stored; for new entries its `start`, or 0."""
        state = self.states[name]
        start = Array.of((), 0.0) if state.start is None else self.value(state.start, layer)
        start = self.broadcast(start, state.type, layer)
        old = self.stored.get((name, layer))
        if old is None:
            return start
        if "token" not in old.axes:
            return old
        missing = self.candidates(layer) - old.data.shape[old.axes.index("token")]
        if not missing:
            return old
        # `start` has an axis `kv` that `old` may lack, once KV heads hold different tokens.
        return arrays.join("token", old, arrays.last(start, "token", missing))

    # Across layers.

    def gathered(self, node: Node, axes: tuple[str, ...], layer: int) -> Array:
        """A node's value at this layer, or at all layers if `axes` names `layer`."""
        if "layer" not in axes:
            return self.value(node, layer)
        return self.stacked(lambda source: self.value(node, source), layer)

    def stacked(self, value: Callable[[int], Array], layer: int) -> Array:
        """The values of all layers, with the axis `layer` in front.

        A layer's token axis is the prompt's; values are absent at tokens that did not reach it.
        """
        values = []
        for source in self.every_layer:
            values.append(self._everywhere(value(source), source))
            if source != layer:
                self.forget_maps(source)
        return arrays.stack("layer", values)

    def own(self, x: Array, axes: tuple[str, ...], layer: int) -> Array:
        """This layer's part of what was computed across layers, at its own tokens."""
        if "layer" not in axes:
            return x
        if "layer" in x.axes:
            x = Array.of(x.axes[1:], x.data[layer], x.present[layer])
        return self._at_tokens(x, layer)

    def read_at(self, x: Array, source: int, layer: int) -> Array:
        """A value of another layer at this layer's tokens; absent at tokens it does not have."""
        return self._at_tokens(self._everywhere(x, source), layer)

    def _everywhere(self, x: Array, layer: int) -> Array:
        if "token" not in x.axes or not self.bound.propagates:
            return x
        dim, positions = x.axes.index("token"), self.layers[layer].positions
        shape = list(x.data.shape)
        shape[dim] = self.candidates(0)
        data, present = np.zeros(shape, x.data.dtype), np.zeros(shape, np.bool_)
        index: tuple[slice | np.ndarray, ...] = (*[slice(None)] * dim, positions)
        data[index], present[index] = x.data, x.present
        return Array.of(x.axes, data, present)

    def _at_tokens(self, x: Array, layer: int) -> Array:
        if "token" not in x.axes or not self.bound.propagates:
            return x
        dim, positions = x.axes.index("token"), self.layers[layer].positions
        return Array.of(x.axes, x.data.take(positions, dim), x.present.take(positions, dim))

    def spread(self, x: Array, axes: tuple[str, ...], layer: int) -> Array:
        """The array with the axes `axes`, repeated along those of `kv`, `token` that it lacks."""
        sizes = {"kv": self.kv, "token": self.candidates(layer)}
        shape = tuple(sizes[axis] for axis in axes)
        data, present = x.to(axes)
        return self._masked(
            Array.of(axes, np.broadcast_to(data, shape), np.broadcast_to(present, shape)), layer
        )

    def broadcast(self, x: Array, type_: Type, layer: int) -> Array:
        """The array repeated along those axes of a type that it lacks."""
        missing = [axis for axis in type_.axes if axis not in x.axes]
        if not missing:
            return x
        axes = arrays.union(x, *(Array.of((axis,), [0.0]) for axis in missing))
        sizes = {axis: self.size(axis, type_, layer) for axis in missing} | dict(_sizes(x))
        shape = tuple(sizes[axis] for axis in axes)
        data, present = (np.broadcast_to(part, shape) for part in x.to(axes))
        return self._masked(Array.of(axes, data, present), layer)

    def size(self, axis: str, type_: Type, layer: int) -> int:
        """Length of an axis of a type at a layer."""
        extent = type_.extent(axis)
        if extent is not None and axis == "query":
            return self.asking(extent.kind, extent.count, layer)
        if extent is not None and extent.count is not None:
            return counts.whole(self.number(extent.count, layer), len(self.every_layer))
        shape = self.bound.shape
        tokens = self.candidates(layer)
        return {"kv": self.kv, "group": shape.group, "token": tokens, "dim": shape.head_dim}[axis]

    def asking(self, kind: str, count: Node | None, layer: int) -> int:
        """Number of queries in a window, or along the axis `query`."""
        queries = len(self.layers[layer].query_positions)
        if kind == "new" and self.generated:
            return 1
        most = queries if self.generated else self.candidates(layer)
        return most if count is None else counts.whole(self.number(count, layer), most)


def _sizes(x: Array) -> list[tuple[str, int]]:
    return list(zip(x.axes, x.data.shape, strict=True))
