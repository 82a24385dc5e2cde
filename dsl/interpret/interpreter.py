"""The interpreter: it defines what a policy does. Clear over fast; numpy, float64.

`interpret` applies a policy to one whole prompt and the decode steps after it, `InterpretedPrompt`
takes the steps one by one. `values.py` says what expressions mean, `select.py` how they select,
`merge.py` what becomes of dropped entries, `decode.py` what a decode step does.

Dimensions: L layers, H query heads, G KV heads, N tokens of the prompt, D head size, T steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.data.arrays import Array
from kvpolicy.dsl.data.recording import check_layer_queries
from kvpolicy.dsl.data.result import LayerValue, Result, StepResult, Steps, reported
from kvpolicy.dsl.interpret.decode import Cache, as_stored, decode, turned
from kvpolicy.dsl.interpret.merge import merge, shared
from kvpolicy.dsl.interpret.select import whole_budget
from kvpolicy.dsl.interpret.values import Layer, Values
from kvpolicy.dsl.ir.nodes import Node, Propagate, Rules
from kvpolicy.dsl.syntax.diagnostics import refused

_MOST = 2.0**62  # stands for infinity in reported budgets


@np.errstate(all="ignore")  # what overflows is infinite, and decides as such
def interpret(
    bound: Bound,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    steps: Steps | None = None,
    inv_freq: np.ndarray | None = None,
) -> Result:
    """Applies a policy to the tensors of one whole prompt, and of the decode steps after it.

    Without hidden states, deeper layers take the recorded rows of the propagated tokens. A restart
    likewise takes the recorded rows of the chosen tokens.

    Args:
        bound: the policy with its model and parameters.
        q: [L, H, T, D] queries after RoPE; T is N, or at least `bound.queries(N)` last ones.
        k: [L, G, N, D] keys after RoPE.
        v: [L, G, N, D] values.
        steps: queries, keys and values of each decode step's token, see `decode`.
        inv_freq: [D / 2] angle per position by which RoPE turns dimensions i and i + D / 2, for
            `positions: slots`; without it keys are not turned.

    Raises:
        PolicyError: the policy needs data that these tensors do not hold, or they hold NaN or
            infinity.
    """
    prompt = InterpretedPrompt(bound, q, k, v, inv_freq)
    return prompt.result if steps is None else replace(prompt.result, steps=prompt.follow(steps))


class InterpretedPrompt:
    """A prompt to which a policy was applied; the decode steps after it may come one by one.

    Args:
        bound, q, k, v, inv_freq: as in `interpret`.

    Attributes:
        result: what the policy decided for the prompt.
    """

    def __init__(
        self,
        bound: Bound,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        inv_freq: np.ndarray | None = None,
    ) -> None:
        _check_finite(bound, {"q": q, "k": k, "v": v})
        tokens = k.shape[2]
        first_pass = _Pass(bound, q, k, v, tokens)
        propagated = first_pass.run(bound.propagates)
        lets = first_pass.propagation_lets(propagated)
        self._chosen, self._last, self._inv_freq = np.arange(tokens), first_pass, inv_freq
        if bound.restarts and propagated:
            self._chosen = chosen = next(iter(propagated.values()))
            rows = chosen[chosen >= tokens - q.shape[2]] - (tokens - q.shape[2])
            self._last = _Pass(bound, q[:, :, rows], k[:, :, chosen], v[:, :, chosen], tokens)
            self._last.run(propagate=False)
        self._last.decide(inv_freq)
        result = _result(self._last, self._chosen, tokens)
        result = replace(result, named={**result.named, **lets} if tokens else {})
        propagate = bound.program.propagate
        if propagated and propagate is not None:
            positions = list(propagated.values())[-1].tolist()
            repeats = propagate.repeats
            result = replace(
                result,
                selected_layer=None if repeats else next(iter(propagated)),
                propagated={i: x.tolist() for i, x in propagated.items()} if repeats else positions,
                positions=list(range(len(self._chosen))) if bound.restarts else positions,
            )
        self.result = result

    @cached_property
    def _cache(self) -> Cache:
        return self._last.cache()

    def follow(self, steps: Steps) -> list[StepResult]:
        """What is cached after each of the decode steps that come next.

        Raises:
            PolicyError: the steps hold NaN or infinity.
        """
        _check_finite(
            self._last.bound, dict(zip(("q_step", "k_step", "v_step"), steps, strict=True))
        )
        first, cache = self._last.prompt, self._cache
        new_positions = np.arange(first, first + cache.generated + len(steps[0]))
        return decode(cache, steps, self._inv_freq, np.concatenate([self._chosen, new_positions]))


def _check_finite(bound: Bound, tensors: Mapping[str, np.ndarray]) -> None:
    for name, tensor in tensors.items():
        if not np.isfinite(tensor).all():
            message = f"`{name}` holds NaN or infinity; nothing can be decided by it"
            raise refused(bound.program.name, "data", message)


@dataclass
class _Pass:
    """One prefill, over n tokens: the N of the prompt, or those that a restart chose.

    `k` and `v` have n tokens, `q` the last T of them; `prompt` is N.
    """

    bound: Bound
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    prompt: int
    kept: list[np.ndarray] = field(default_factory=list)  # per layer, bool [G, its tokens]
    vectors: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    merge_states: dict[tuple[str, int], Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.e = Values(self.bound, self.bound.program.prefill, {}, self.prompt)
        self.keep = self.e.rules.keep or Node("all")
        self.tokens = self.k.shape[2]

    def run(self, propagate: bool) -> dict[int, np.ndarray]:
        """Makes the layers, of the tokens that reach them.

        Returns:
            The positions that go deeper, ascending, by layer that acted.
        """
        rules = self.bound.program.propagate if propagate else None
        positions = np.arange(self.tokens)
        propagated: dict[int, np.ndarray] = {}
        for layer in self.e.every_layer:
            self.e.layers[layer] = self._layer(layer, positions)
            if rules is None or not len(positions) or (propagated and not rules.repeats):
                continue
            if self.e.truth(rules.moment, layer).data:
                propagated[layer] = positions = self._chosen(rules, layer, positions)
                if self.bound.restarts:
                    return propagated
        return propagated

    def propagation_lets(self, propagated: dict[int, np.ndarray]) -> dict[str, list[LayerValue]]:
        """Reported `let`s on which `propagate` is decided, at the layers where it is tested."""
        lets, rules = self.e.rules.lets, self.bound.program.propagate
        first = rules is not None and not rules.repeats
        last = next(iter(propagated)) if first and propagated else len(self.e.every_layer) - 1
        return {
            name: [
                reported(self.e.value(lets[name], layer) if layer <= last else None)
                for layer in self.e.every_layer
            ]
            for name in self.bound.propagation_lets
        }

    def _layer(self, layer: int, positions: np.ndarray) -> Layer:
        first = self.tokens - self.q.shape[2]
        query_positions = positions[positions >= first]
        check_layer_queries(self.bound, self.prompt, layer, len(query_positions), len(positions))
        held = np.ones((self.k.shape[1], len(positions)), np.bool_)
        k, v = self.k[layer][:, positions], self.v[layer][:, positions]
        return Layer(
            positions, k, v, self.q[layer][:, query_positions - first], query_positions, held
        )

    def _chosen(self, rules: Propagate, layer: int, positions: np.ndarray) -> np.ndarray:
        """The positions in `propagate.tokens`; all if it holds none."""
        self.e.own_budget = rules.budget
        # All KV heads have one set here; a set that fills a budget is still computed for each.
        chosen = self.e.spread(self.e.truth(rules.tokens, layer), ("kv", "token"), layer).data[0]
        self.e.own_budget = self.e.rules.budget
        return positions[chosen] if chosen.any() else positions

    def decide(self, inv_freq: np.ndarray | None) -> None:
        """Selects at every layer, then merges and rotates."""
        e = self.e
        for layer in e.every_layer:
            self.kept.append(e.spread(e.truth(self.keep, layer), ("kv", "token"), layer).data)
            for name in self.bound.folded.prefill.states:
                e.state(name, layer)
            e.forget_maps(layer)
        share = self.bound.program.share
        if share is not None and self.bound.folded.share is not None:
            self.vectors = shared(e, share)
            return
        for layer, kept in enumerate(self.kept):
            entries = e.layers[layer]
            keys, values = entries.keys.astype(np.float64), entries.values.astype(np.float64)
            if e.rules.merge is not None and not kept.all():
                merged = merge(e, e.rules.merge, layer, kept)
                keys, values = merged.keys, merged.values
                for name, state in merged.states.items():
                    self.merge_states[name, layer] = state
            if self.bound.positions == "slots" and inv_freq is not None:
                # Tokens that did not reach the layer take no slot there either.
                dropped = np.ones((len(kept), self.tokens), np.bool_)
                dropped[:, entries.positions] = ~kept
                shift = dropped.sum(-1, keepdims=True) - dropped.cumsum(-1)
                keys = turned(keys, shift[:, entries.positions], inv_freq)
            self.vectors.append((keys, values))

    def cache(self) -> Cache:
        """The cache with which decode begins."""
        bound, e = self.bound, self.e
        decode = bound.folded.decode or Rules()
        states = {
            (name, layer): e.state(name, layer)
            for name, state in decode.states.items()
            for layer in e.every_layer
            if state.inherited
        }
        merging = decode.merge.states if decode.merge else {}
        inherited = {name for name, state in merging.items() if state.inherited}
        merge_states = {key: x for key, x in self.merge_states.items() if key[0] in inherited}
        budgets = None
        if e.rules.budget is not None:
            budgets = [
                e.spread(whole_budget(e, layer), ("kv",), layer).data for layer in e.every_layer
            ]
        dtype = self.k.dtype
        queries = bound.step_queries(self.prompt)
        layers = []
        for entries, (keys, values) in zip(e.layers.values(), self.vectors, strict=True):
            first = max(0, len(entries.query_positions) - queries)
            layers.append(
                replace(
                    entries,
                    keys=as_stored(keys, dtype),
                    values=as_stored(values, dtype),
                    queries=entries.queries[:, first:],
                    query_positions=entries.query_positions[first:],
                )
            )
        cache = Cache(
            bound, layers, self.prompt, states, merge_states, budgets,
            lambda name, layer: e.value(e.rules.decided[name], layer), self.tokens,
        )  # fmt: skip
        for layer, kept in enumerate(self.kept):
            cache.leave(layer, kept)
        return cache


def _result(last_pass: _Pass, chosen: np.ndarray, tokens: int) -> Result:
    """The result of a pass over the tokens `chosen` of N."""
    e, bound = last_pass.e, last_pass.bound
    kv = last_pass.k.shape[1]
    kept, budgets, scores, merged = [], [], [], []
    for layer in e.every_layer:
        positions = chosen[e.layers[layer].positions]
        kept.append(_on_prompt(last_pass.kept[layer], positions, tokens, False))
        if e.rules.budget is not None:
            budget = e.spread(whole_budget(e, layer), ("kv",), layer).data
            budgets.append(np.clip(budget, -_MOST, _MOST).astype(np.int64))
        if e.rules.score is not None:
            score = e.spread(e.value(e.rules.score, layer), ("kv", "token"), layer)
            present = np.where(score.present, score.data, np.nan)
            scores.append(_on_prompt(present, positions, tokens, np.nan))
        keys, values = (_on_prompt(x, positions, tokens, 0.0) for x in last_pass.vectors[layer])
        merged.append((keys, values))
    names = () if e.rules.merge is None else e.rules.merge.states
    thresholds = {
        name: [reported(last_pass.merge_states.get((name, layer))) for layer in e.every_layer]
        for name in names
    }
    lets = {name: e.rules.lets[name] for name in bound.folded.prefill.lets}
    named = {
        name: [reported(e.value(let, layer)) for layer in e.every_layer]
        for name, let in lets.items()
        if name not in bound.propagation_lets
    }
    if tokens == 0:
        return Result([np.zeros((kv, 0), np.bool_) for _ in kept], None, None)
    return Result(
        kept,
        budgets or None,
        scores or None,
        merged=merged if bound.prefill_changes_vectors else None,
        thresholds=thresholds,
        named=named,
    )


def _on_prompt(x: np.ndarray, positions: np.ndarray, tokens: int, fill: float | bool) -> np.ndarray:
    """[G, N, ...] from [G, n, ...] values at `positions`; `fill` elsewhere."""
    result = np.full((len(x), tokens, *x.shape[2:]), fill, x.dtype)
    result[:, positions] = x
    return result
