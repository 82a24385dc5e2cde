"""Merging and sharing of entries in the interpreter.

Dimensions: G KV heads, M candidates of a layer, P dropped entries (of the head that drops most), D
head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from kvpolicy.dsl.data import arrays
from kvpolicy.dsl.data.arrays import Array
from kvpolicy.dsl.interpret.elementwise import mean
from kvpolicy.dsl.interpret.values import Values, name_of
from kvpolicy.dsl.ir import counts
from kvpolicy.dsl.ir.nodes import Merge, Node, Share, Type


@dataclass(frozen=True)
class Merged:
    """A layer after a merge.

    Attributes:
        keys, values: float64 [G, M, D]; receivers are changed, all others as they were.
        states: the merge's states, by name.
    """

    keys: np.ndarray
    values: np.ndarray
    states: dict[str, Array]


def merge(e: Values, rules: Merge, layer: int, kept: np.ndarray) -> Merged:
    """Adds what a layer drops to what it keeps.

    Args:
        e: values of the layer; `e.stored` holds the merge's states before it, too.
        rules: the program's section.
        layer: from 0.
        kept: bool [G, M]; every KV head drops its other entries, at least one head at least one.
    """
    values = _MergeValues(e, rules, layer, kept)
    vectors = {"key": e.layers[layer].keys, "value": e.layers[layer].values}
    merged = {
        name: values.written(x) if name in rules.apply else x.astype(np.float64)
        for name, x in vectors.items()
    }
    states = {name: values.state(name, layer) for name in rules.states}
    return Merged(merged["key"], merged["value"], states)


class _MergeValues(Values):
    """Values inside `merge`, where the axis `dropped` stands for each head's dropped entries."""

    def __init__(self, e: Values, rules: Merge, layer: int, kept: np.ndarray) -> None:
        super().__init__(
            e.bound, e.rules, e.layers, e.prompt, e.generated, e.stored, e.budgets, e.known,
            e.decided,
        )  # fmt: skip
        self.states = {**e.states, **rules.states}
        self.merge, self.layer, self.kept = rules, layer, kept
        dropped = [np.flatnonzero(row) for row in e.layers[layer].held & ~kept]
        most = max(len(row) for row in dropped)
        # Per head the places of its dropped entries in order, padded with places that are not real.
        self.places = np.array([np.pad(row, (0, most - len(row))) for row in dropped])
        self.real = np.array([np.arange(most) < len(row) for row in dropped])
        self._receivers: np.ndarray | None = None

    def value(self, node: Node, layer: int) -> Array:
        """Absent where a head drops fewer entries than another."""
        x = super().value(node, layer)
        if not {"kv", "dropped"} <= set(x.axes):
            return x
        return arrays.mask(x, Array.of(("kv", "dropped"), self.real))

    def special(self, node: Node, layer: int) -> Array:
        """Adds the operations that exist only here."""
        if node.op == "dropped":
            return self._at_dropped(self.value(node.args[0], layer))
        if node.op == "target":
            receivers = Array.of(("kv", "token", "dropped"), self.receivers())
            x = arrays.reduce(
                mean, arrays.mask(self.value(node.args[0], layer), receivers), ("token",)
            )
            return arrays.mask(x, Array.of(("kv", "dropped"), self.real))
        if node.op == "special":
            data = self._mass() if node.value == "mass" else self._members()
            return Array.of(("kv", "token"), data)
        return super().special(node, layer)

    def _at_dropped(self, x: Array) -> Array:
        """A value per token, read at the dropped entries."""
        axes = arrays.union(x, Array.of(("kv", "token"), np.zeros((0, 0))))
        shape = {"kv": self.kv, "token": self.places.shape[1]}
        index = self.places.reshape([shape.get(axis, 1) for axis in axes])
        kv, token = axes.index("kv"), axes.index("token")
        per_head = (np.repeat(part, self.kv // part.shape[kv], kv) for part in x.to(axes))
        data, present = (np.take_along_axis(part, index, token) for part in per_head)
        result = Array.of(["dropped" if axis == "token" else axis for axis in axes], data, present)
        return arrays.mask(result, Array.of(("kv", "dropped"), self.real))

    def size(self, axis: str, type_: Type, layer: int) -> int:
        """As in `Values`; `dropped` is P, the entries of the head that drops most."""
        return self.real.shape[1] if axis == "dropped" else super().size(axis, type_, layer)

    def receivers(self) -> np.ndarray:
        """Bool [G, M, P]: which kept entries receive each dropped one."""
        if self._receivers is None:
            into = self.merge.into
            chosen = self._nearest(into) if into.op == "nearest" else self._next(into)
            self._receivers = chosen & self.real[:, None]
        return self._receivers

    def _nearest(self, into: Node) -> np.ndarray:
        x = self.value(into.args[0], self.layer)
        vectors = self.spread_vectors(x)
        lengths = np.sqrt((vectors**2).sum(-1))  # [G, M]
        dropped = np.take_along_axis(vectors, self.places[:, :, None], 1)
        cosines = np.einsum("gmd,gpd->gmp", vectors, dropped) / (
            lengths[:, :, None] * np.take_along_axis(lengths, self.places, 1)[:, None]
        )
        cosines = np.float32(np.where(np.isnan(cosines), 0.0, cosines))
        cosines = np.where(self.kept[:, :, None], cosines, -np.inf)
        best = cosines.argmax(1)[:, None]  # the first of equal ones, so the lower position
        is_best = np.arange(cosines.shape[1])[:, None] == best
        nearest: np.ndarray = is_best & self.kept[:, :, None]
        return nearest

    def spread_vectors(self, x: Array) -> np.ndarray:
        """[G, M, D] data of a vector per token."""
        data, _ = x.to(("kv", "token", "dim"))
        return np.broadcast_to(data, (self.kv, *data.shape[1:]))

    def _next(self, into: Node) -> np.ndarray:
        number = counts.whole(self.number(into.args[0], self.layer), self.candidates(self.layer))
        is_after = np.arange(self.candidates(self.layer))[:, None] > self.places[:, None]
        follows = self.kept[:, :, None] & is_after
        chosen: np.ndarray = follows & (follows.cumsum(1) <= number)
        return chosen

    def _per_dropped(self, node: Node | None, default: float | bool) -> np.ndarray:
        """[G, P] values of a part of the merge."""
        x = Array.of((), default) if node is None else self.value(node, self.layer)
        data, present = x.to(("kv", "dropped"))
        data = data & present if data.dtype == np.bool_ else data
        return np.broadcast_to(data, self.real.shape)

    def _links(self) -> np.ndarray:
        """Bool [G, M, P]: which dropped entries are merged into which."""
        links: np.ndarray = self.receivers() & self._per_dropped(self.merge.accept, True)[:, None]
        return links

    def _own_weight(self) -> np.ndarray:
        x = Array.of((), 1.0) if self.merge.own is None else self.value(self.merge.own, self.layer)
        return np.broadcast_to(x.to(("kv",))[0], (self.kv,))[:, None]

    def _weights(self) -> np.ndarray:
        """[G, M, P] weights of the links, 0 where there is none."""
        weights = self._per_dropped(self.merge.weight, 1.0)[:, None]
        return np.where(self._links(), weights, 0.0)

    def _mass(self) -> np.ndarray:
        mass: np.ndarray = self._own_weight() + self._weights().sum(-1)
        return mass

    def _members(self) -> np.ndarray:
        members: np.ndarray = 1.0 + self._links().sum(-1)
        return members

    def written(self, vectors: np.ndarray) -> np.ndarray:
        """[G, M, D] vectors with the receivers changed; all reads precede all writes."""
        x = vectors.astype(np.float64)
        dropped = np.take_along_axis(x, self.places[:, :, None], 1)
        total = self._own_weight()[..., None] * x + np.einsum(
            "gmp,gpd->gmd", self._weights(), dropped
        )
        divide = self._mass()
        if self.merge.divide is not None:
            divide = self.spread(
                self.value(self.merge.divide, self.layer), ("kv", "token"), self.layer
            ).data
        changed = self._links().any(-1) & (divide != 0) & np.isfinite(divide)
        merged = total / np.where(changed, divide, 1.0)[..., None]
        # What would become infinite, rounded to the type of the cache, stays as it is.
        changed &= storable(merged, vectors.dtype)
        return np.where(changed[..., None], merged, x)


def storable(vectors: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Which vectors [..., D] have no number beyond the largest one of a dtype: bool [...]."""
    fits: np.ndarray = (np.abs(vectors) <= float(np.finfo(dtype).max)).all(-1)
    return fits


class _ShareValues(Values):
    """Values inside `share`: `own` and `below` are keys or values of two layers."""

    def __init__(self, e: Values, own: np.ndarray, below: np.ndarray) -> None:
        super().__init__(e.bound, e.rules, e.layers, e.prompt)
        self._vectors = {"own": own, "below": below}

    def special(self, node: Node, layer: int) -> Array:
        """Adds `own` and `below`."""
        if node.op == "special":
            return Array.of(("kv", "token", "dim"), self._vectors[name_of(node)])
        return super().special(node, layer)


def shared(e: Values, rules: Share) -> list[tuple[np.ndarray, np.ndarray]]:
    """Keys and values of every layer, float64 [G, N, D], as two layers read them back."""
    vectors = {
        name: [getattr(e.layers[layer], f"{name}s").astype(np.float64) for layer in e.every_layer]
        for name in ("key", "value")
    }
    for layer in e.every_layer:
        if not e.number(rules.when, layer):
            continue
        for name in rules.apply:
            own, below = vectors[name][layer], vectors[name][layer - 1]
            values = _ShareValues(e, own, below)
            direction = values.value(rules.direction, layer).to(("kv", "token", "dim"))[0]
            lengths = [np.sqrt((x**2).sum(-1, keepdims=True)) for x in (own, below)]
            # Both vectors stay without a direction, and with one that would become infinite by
            # itself or times the longer vector.
            most = np.maximum(1.0, np.maximum(*lengths)) * direction
            exceptions = ~storable(most, e.layers[layer].keys.dtype) | (direction == 0).all(-1)
            if rules.exceptions is not None:
                x = values.truth(rules.exceptions, layer)
                exceptions = exceptions | values.spread(x, ("kv", "token"), layer).data
            for target, x, length in zip((layer, layer - 1), (own, below), lengths, strict=True):
                kept = np.broadcast_to(exceptions[..., None], x.shape)
                vectors[name][target] = np.where(kept, x, length * direction)
    return list(zip(vectors["key"], vectors["value"], strict=True))
