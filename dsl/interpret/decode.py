"""Decode steps of the interpreter: what is cached, what leaves, what is remembered.

Dimensions: G KV heads, M cached positions of a layer, D head size, T steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.data.arrays import Array
from kvpolicy.dsl.data.result import LayerValue, StepResult, Steps, reported
from kvpolicy.dsl.interpret.merge import merge
from kvpolicy.dsl.interpret.values import Decided, Layer, Values
from kvpolicy.dsl.ir.nodes import Rules


@dataclass
class Cache:
    """The entries of one request between decode steps.

    Attributes:
        layers: their entries; keys and values of the dtype in which they are stored.
        prompt: N tokens.
        states: by name and layer; their axis `token` is the layer's entries.
        merge_states: by name and layer.
        budgets: per layer the prefill's numbers [G], or None.
        decided: from a `let`'s name and a layer to its value in the prefill.
        position: position of the next token.
        generated: decode steps so far.
    """

    bound: Bound
    layers: list[Layer]
    prompt: int
    states: dict[tuple[str, int], Array]
    merge_states: dict[tuple[str, int], Array]
    budgets: list[np.ndarray] | None
    decided: Decided
    position: int
    generated: int = 0

    def leave(self, layer: int, kept: np.ndarray) -> None:
        """Drops every entry that is not kept (bool [G, M]); states follow their entries."""
        entries = self.layers[layer]
        kept_by_any = kept.any(0)
        self.layers[layer] = replace(
            entries,
            positions=entries.positions[kept_by_any],
            keys=np.where(kept[..., None], entries.keys, 0)[:, kept_by_any],
            values=np.where(kept[..., None], entries.values, 0)[:, kept_by_any],
            held=kept[:, kept_by_any],
        )
        for name, state_layer in self.states:
            state = self.states[name, state_layer]
            if state_layer == layer and "token" in state.axes:
                dim, places = state.axes.index("token"), np.flatnonzero(kept_by_any)
                data, present = state.data.take(places, dim), state.present.take(places, dim)
                self.states[name, state_layer] = Array.of(state.axes, data, present)

    def append(self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        """Adds the step's token, q [H, D], k and v [G, D], and forgets old queries."""
        entries, position = self.layers[layer], [self.position]
        limit = self.bound.step_queries(self.prompt)
        queries = np.concatenate([entries.queries, q[:, None]], 1)
        first = max(0, queries.shape[1] - limit)
        self.layers[layer] = Layer(
            np.concatenate([entries.positions, position]).astype(np.int64),
            np.concatenate([entries.keys, k[:, None].astype(entries.keys.dtype)], 1),
            np.concatenate([entries.values, v[:, None].astype(entries.values.dtype)], 1),
            queries[:, first:],
            np.concatenate([entries.query_positions, position])[first:],
            np.concatenate([entries.held, np.ones((len(k), 1), np.bool_)], 1),
        )


def decode(
    cache: Cache, steps: Steps, inv_freq: np.ndarray | None, names: np.ndarray
) -> list[StepResult]:
    """Applies the rules of decode to the recorded steps.

    Args:
        cache: after the prefill; changed.
        steps: q [T, L, H, D], k and v [T, L, G, D].
        inv_freq: as in `interpret`.
        names: position in the recording of each position in the cache.
    """
    results = []
    rules, folded_rules = cache.bound.program.decode, cache.bound.folded.decode
    for q, k, v in zip(*steps, strict=True):
        cache.generated += 1
        leaves = cache.bound.leaves_at(cache.generated, cache.prompt)
        named: dict[str, list[LayerValue]] = {}
        for layer in range(len(cache.layers)):
            cache.append(layer, q[layer], k[layer], v[layer])
            if rules is not None and folded_rules is not None:
                _step(cache, rules, folded_rules, layer, leaves, inv_freq, named)
        cache.position += 1
        results.append(_result(cache, names, named))
    return results


def _step(
    cache: Cache,
    rules: Rules,
    folded_rules: Rules,
    layer: int,
    leaves: bool,
    inv_freq: np.ndarray | None,
    named: dict[str, list[LayerValue]],
) -> None:
    """One layer at one step: states advance, then entries leave.

    Args:
        rules: the program's rules of decode.
        folded_rules: those of the bound policy, with only states and `let`s that something reads.
        leaves: whether entries may leave.
        inv_freq: as in `interpret`.
        named: reported `let`, by name -> its values at the layers below; this layer's is added.
    """
    bound = cache.bound
    layers = {layer: cache.layers[layer]}
    stored = {**cache.states, **cache.merge_states}
    e = Values(
        bound, rules, layers, cache.prompt, cache.generated, stored, cache.budgets,
        decided=cache.decided,
    )  # fmt: skip
    for name in folded_rules.states:
        cache.states[name, layer] = e.state(name, layer)
    for name in folded_rules.lets:
        value = e.value(rules.lets[name], layer) if leaves else None
        named.setdefault(name, []).append(reported(value))
    if not leaves or rules.keep is None:
        return
    held = cache.layers[layer].held
    kept = e.spread(e.truth(rules.keep, layer), ("kv", "token"), layer).data & held
    if (kept == held).all():
        return
    if rules.merge is not None:
        merged = merge(e, rules.merge, layer, kept)
        for name, state in merged.states.items():
            cache.merge_states[name, layer] = state
        _store(cache, layer, merged.keys, merged.values)
    if bound.positions == "slots" and inv_freq is not None:
        dropped = held & ~kept
        shift = dropped.sum(-1, keepdims=True) - dropped.cumsum(-1)
        keys = turned(cache.layers[layer].keys.astype(np.float64), shift, inv_freq)
        _store(cache, layer, keys, cache.layers[layer].values)
    cache.leave(layer, kept)


def _store(cache: Cache, layer: int, keys: np.ndarray, values: np.ndarray) -> None:
    entries = cache.layers[layer]
    dtype = entries.keys.dtype
    keys, values = as_stored(keys, dtype), as_stored(values, dtype)
    cache.layers[layer] = replace(entries, keys=keys, values=values)


def as_stored(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Keys or values rounded once to the dtype in which entries are stored."""
    return x.astype(dtype)


def turned(keys: np.ndarray, shift: np.ndarray, inv_freq: np.ndarray) -> np.ndarray:
    """Keys [G, M, D] moved forward by `shift` [G, M] positions: RoPE on dimensions i, i + D / 2."""
    angle = shift[..., None] * np.asarray(inv_freq, np.float64)
    cos, sin = np.cos(angle), np.sin(angle)
    x, y = np.split(keys, 2, -1)
    return np.concatenate([x * cos - y * sin, y * cos + x * sin], -1)


def _result(cache: Cache, names: np.ndarray, named: dict[str, list[LayerValue]]) -> StepResult:
    kept, vectors = [], []
    for entries in cache.layers:
        kept.append([names[entries.positions[held]].tolist() for held in entries.held])
        rows = zip(entries.keys, entries.values, entries.held, strict=True)
        vectors.append([(k[held].astype(float), v[held].astype(float)) for k, v, held in rows])
    rules = None if cache.bound.folded.decode is None else cache.bound.program.decode
    section = None if rules is None else rules.merge
    states = () if section is None else section.states
    thresholds = {
        name: [reported(cache.merge_states.get((name, i))) for i in range(len(cache.layers))]
        for name in states
    }
    merged = vectors if cache.bound.changes_vectors else None
    return StepResult(kept, merged, thresholds, named)
