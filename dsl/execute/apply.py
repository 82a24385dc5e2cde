"""The torch program on recorded tensors: for `kvpolicy run`, `test`, `diff`, the trial, and tests.

It runs a prefill and decode steps as a server does, on entries that it stores itself; several steps
are evaluated together if nothing leaves between them.

Dimensions: L layers, H query heads, G KV heads, N tokens of the prompt, n tokens of the last
prefill, M cached positions, D head size, T steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.data.recording import check_layer_queries
from kvpolicy.dsl.data.result import LayerValue, Result, StepResult, Steps
from kvpolicy.dsl.execute.decode.memory import Memory
from kvpolicy.dsl.execute.decode.requests import follow_together
from kvpolicy.dsl.execute.drive import drive
from kvpolicy.dsl.execute.layer.share import Shared
from kvpolicy.dsl.execute.prefill.finished import FinishedPrefill
from kvpolicy.dsl.execute.prefill.run import Run
from kvpolicy.dsl.execute.program import TorchProgram
from kvpolicy.dsl.execute.tensors.kernels import Entries
from kvpolicy.dsl.execute.tensors.values import Value, aligned
from kvpolicy.dsl.syntax.diagnostics import refused

_MOST = 2.0**62

Vectors = list[tuple[torch.Tensor, torch.Tensor]]


def apply(
    bound: Bound,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    steps: Steps | None = None,
    inv_freq: np.ndarray | None = None,
    *,
    report: bool = True,
) -> Result:
    """As `interpret`, by the torch program on the CPU; takes the same arguments.

    Args:
        report: False leaves out scores, budgets and reported lets, as in a server.

    Raises:
        PolicyError: tensors hold NaN or infinity, or lack queries that the policy reads.
    """
    tokens = k.shape[2]
    prefill = prefilled(TorchProgram(bound, report=report), q, k, v, inv_freq)
    finished, chosen = prefill.finished, prefill.chosen
    if prefill.first_run.not_finite or finished.not_finite:
        raise refused(bound.program.name, "data", "the tensors hold NaN or infinity")
    result = Result([x.numpy() for x in finished.kept], None, None)
    if tokens:
        result = _result(finished, chosen, prefill.vectors, tokens)
        result = _propagated(result, prefill.first_run, len(chosen))
    if steps is not None:
        if not all(np.isfinite(x).all() for x in steps):
            raise refused(bound.program.name, "data", "a decode step holds NaN or infinity")
        cache = _Cache(finished, prefill.vectors, torch.tensor(k[:0]).dtype)
        names = torch.cat([chosen, torch.arange(tokens, tokens + len(steps[0]))])
        result = replace(result, steps=_decode(cache, steps, inv_freq, names))
    return result


@dataclass(frozen=True)
class Prefilled:
    """A finished prefill of recorded tensors.

    Attributes:
        finished: the last prefill, whose entries are cached.
        first_run: the prefill before a restart; without one, the same.
        chosen: int64 [n], positions in the recording of the last prefill's tokens.
        vectors: per layer float64 keys and values [G, n, D], as they are cached.
    """

    finished: FinishedPrefill
    first_run: Run
    chosen: torch.Tensor
    vectors: Vectors


def prefilled(
    program: TorchProgram,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    inv_freq: np.ndarray | None = None,
) -> Prefilled:
    """Runs the prefill, and a second one where the policy restarts; as `interpret`.

    Args:
        q, k, v, inv_freq: as in `interpret`, but of the program's layers only.
    """
    recording = _Recording(program, *(torch.tensor(x) for x in (q, k, v)))
    prefill = drive(program, k.shape[2], recording)
    finished = prefill.run.finish()
    keys, values = (x[:, :, prefill.tokens] for x in (recording.k, recording.v))
    vectors = _stored(finished, keys, values, inv_freq)
    return Prefilled(finished, prefill.first_run, prefill.tokens, vectors)


@dataclass(frozen=True)
class _Recording:
    """Tensors of one prompt: q [L, H, T, D] of the last T tokens, k and v [L, G, N, D]."""

    program: TorchProgram
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def queries(self, layer: int, tokens: torch.Tensor, number: int) -> torch.Tensor:
        """As in `PromptTensors`; gives all queries that are recorded."""
        first_token, prompt = self.k.shape[2] - self.q.shape[2], self.k.shape[2]
        query_rows = tokens[tokens >= first_token] - first_token
        check_layer_queries(self.program.bound, prompt, layer, len(query_rows), len(tokens))
        return self.q[layer - self.program.layers.start][:, query_rows]

    def entries(self, layers: range, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As in `PromptTensors`."""
        first_layer = self.program.layers.start
        layer_rows = slice(layers.start - first_layer, layers.stop - first_layer)
        k, v = (x[layer_rows][:, :, tokens].flatten(0, 1) for x in (self.k, self.v))
        return k, v


def turned(keys: torch.Tensor, shift: torch.Tensor, inv_freq: np.ndarray) -> torch.Tensor:
    """Float64 keys [..., M, D] moved forward by int64 `shift` [..., M]: RoPE on i and i + D / 2."""
    angle = shift[..., None] * torch.tensor(inv_freq, dtype=torch.float64)
    x, y = keys.double().chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([x * cos - y * sin, y * cos + x * sin], -1)


# After the prefill.


def _stored(
    finished: FinishedPrefill,
    k_of_all: torch.Tensor,
    v_of_all: torch.Tensor,
    inv_freq: np.ndarray | None,
) -> Vectors:
    """Keys and values as they are cached, float64 [G, n, D] per layer, from [L, G, n, D]."""
    stored: Vectors = []
    layers = list(zip(finished.program.layers, k_of_all, v_of_all, strict=True))
    if finished.merges_need_ranks:
        for layer, k, v in layers:
            finished.begin_merge(layer, k, v)
    for place, (layer, k, v) in enumerate(layers):
        keys, values = finished.merged(layer, k, v)
        shift = finished.shift(layer)
        if shift is not None and inv_freq is not None:
            keys = turned(keys, shift, inv_freq)
        stored.append((keys, values))
        if place:
            # Everything stays where layers share, so that these are the entries as they are stored.
            below, own = ((k, v) for _, k, v in layers[place - 1 : place + 1])
            shared = finished.shared(layer, below, own)
            pair = stored[place - 1 : place + 1]
            stored[place - 1 : place + 1] = [
                (_read_back(k, shared.get("key")), _read_back(v, shared.get("value")))
                for k, v in pair
            ]
    return stored


def _read_back(x: torch.Tensor, shared: Shared | None) -> torch.Tensor:
    """A layer's vectors as they read back: those that share a direction keep their lengths."""
    if shared is None:
        return x
    direction, excepted = shared
    return torch.where(excepted[..., None], x, x.norm(dim=-1, keepdim=True) * direction)


def _result(
    finished: FinishedPrefill, chosen: torch.Tensor, vectors: Vectors, tokens: int
) -> Result:
    bound, rules = finished.program.bound, finished.program.bound.lowered.prefill
    kept, report = finished.kept, finished.program.report
    kv = bound.shape.kv_heads
    budgets = scores = None
    if report and rules.budget is not None:
        budgets = [
            _spread(x, ("kv",), (kv,)).clamp(-_MOST, _MOST).numpy().astype(np.int64)
            for x in finished.budgets()
        ]
    if report and rules.score is not None:
        scores = []
        for layer, x in enumerate(finished.result(rules.score)):
            places = finished.reached(layer)
            layer_scores = _spread(x, ("kv", "token"), (kv, len(places)))
            scores.append(_on_prompt(layer_scores, chosen[places], tokens, np.nan))
    merged = None
    if bound.prefill_changes_vectors:
        merged = [
            (_on_prompt(k, chosen, tokens, 0.0), _on_prompt(v, chosen, tokens, 0.0))
            for k, v in vectors
        ]
    names = () if rules.merge is None else rules.merge.states
    layers = range(bound.shape.layers)
    return Result(
        [_on_prompt(x, chosen, tokens, False) for x in kept],
        budgets,
        scores,
        merged=merged,
        thresholds={
            name: [_reported(finished.merge_states(layer).get(name)) for layer in layers]
            for name in names
        },
        named={
            name: [_reported(x) for x in finished.result(node)]
            for name, node in rules.lets.items()
            if report and name not in bound.propagation_lets
        },
    )


def _propagated(result: Result, first_run: Run, tokens: int) -> Result:
    bound, propagate = first_run.program.bound, first_run.program.bound.folded.propagate
    layers = range(bound.shape.layers)
    lets = {
        name: [_reported(first_run.propagation_lets.get(layer, {}).get(name)) for layer in layers]
        for name in (bound.propagation_lets if first_run.program.report else ())
    }
    result = replace(result, named={**result.named, **lets})
    if propagate is None or not first_run.propagated:
        return result
    by_layer = {layer: x.tolist() for layer, x in first_run.propagated.items()}
    positions = list(by_layer.values())[-1]
    return replace(
        result,
        selected_layer=first_run.selected_layer,
        propagated=by_layer if propagate.repeats else positions,
        positions=list(range(tokens)) if bound.restarts else positions,
    )


def _on_prompt(
    x: torch.Tensor, chosen: torch.Tensor, tokens: int, filler: float | bool
) -> np.ndarray:
    prompt_values = torch.full((x.shape[0], tokens, *x.shape[2:]), filler, dtype=x.dtype)
    prompt_values[:, chosen] = x
    return prompt_values.numpy()


def _spread(x: Value, axes: tuple[str, ...], shape: tuple[int, ...]) -> torch.Tensor:
    """Float64 data repeated along missing axes, NaN where absent."""
    return aligned(_present(x), x.axes, axes).expand(shape)


def _present(x: Value) -> torch.Tensor:
    """Float64 data, NaN where absent."""
    data = torch.as_tensor(x.data, dtype=torch.float64)
    if x.mask is None:
        return data
    return torch.where(aligned(x.mask, x.mask_axes, x.axes), data, torch.nan)


def _reported(x: Value | None) -> LayerValue:
    return None if x is None else _present(x).tolist()


# Decode steps.


class _Cache:
    """Cached keys and values of every layer, in the layout of its `Memory`."""

    def __init__(self, finished: FinishedPrefill, vectors: Vectors, dtype: torch.dtype) -> None:
        self.memory = Memory.after(finished)
        self.changes = finished.program.bound.changes_vectors
        self.position = finished.size
        self.dtype = dtype
        self.held: list[tuple[torch.Tensor, torch.Tensor]] = []  # positions [M], held [G, M]
        self.rows: Vectors = []
        for kept, (k, v) in zip(finished.kept, vectors, strict=True):
            columns = kept.any(0)
            self.held.append((columns.nonzero()[:, 0], kept[:, columns]))
            self.rows.append((k[:, columns].to(dtype), v[:, columns].to(dtype)))

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Adds the key and value [G, D] of the step's token."""
        positions, held = self.held[layer]
        new_position = torch.tensor([self.position])
        new_column = torch.ones(len(k), 1, dtype=torch.bool)
        self.held[layer] = (torch.cat([positions, new_position]), torch.cat([held, new_column], 1))
        pairs = zip(self.rows[layer], (k, v), strict=True)
        keys, values = (torch.cat([x, y[:, None].to(self.dtype)], 1) for x, y in pairs)
        self.rows[layer] = (keys, values)

    def leave(self, layer: int, kept: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Drops all entries but `kept` [G, M], which get the rows `k` and `v` [G, M, D]."""
        columns = kept.any(0)
        self.held[layer] = (self.held[layer][0][columns], kept[:, columns])
        self.rows[layer] = (k[:, columns].to(self.dtype), v[:, columns].to(self.dtype))


def _decode(
    cache: _Cache, steps: Steps, inv_freq: np.ndarray | None, names: torch.Tensor
) -> list[StepResult]:
    results, memory = [], cache.memory
    queries, keys, values = (torch.tensor(x) for x in steps)
    for step, (k, v) in enumerate(zip(keys, values, strict=True), 1):
        for layer in range(len(k)):
            cache.append(layer, k[layer], v[layer])
        cache.position += 1
        followed = False
        if memory is not None and memory.bound.leaves_at(step, memory.prompt):
            followed = True
            _follow(cache, memory, queries[memory.generated : step], inv_freq)
        results.append(_step_result(cache, names, followed))
    if memory is not None:
        _follow(cache, memory, queries[memory.generated :], inv_freq)
    return results


def _follow(
    cache: _Cache, memory: Memory, queries: torch.Tensor, inv_freq: np.ndarray | None
) -> None:
    """Takes the policy through the pending steps, as a server does.

    Args:
        queries: [T, L, H, D] of these steps.
    """
    if not len(queries):
        return
    staying = follow_together(
        [memory], [range(cache.position - len(queries), cache.position)],
        torch.tensor([cache.position - 1]), lambda: queries.permute(1, 2, 0, 3).flatten(0, 1),
        lambda held: in_one_pool(cache.rows, held), leaves=True,
    )  # fmt: skip
    if staying is None or not memory.numbers().finite:
        return
    slots = memory.bound.positions == "slots"
    choices = staying.choices(0, lambda layer, held: cache.rows[layer], slots=slots)
    for layer, choice in enumerate(choices):
        k, v = cache.rows[layer]
        merged_k, merged_v = choice.rows
        k = k if merged_k is None else merged_k.to(cache.dtype)
        v = v if merged_v is None else merged_v
        if choice.shift is not None and inv_freq is not None:
            k = turned(k, choice.shift, inv_freq)
        cache.leave(layer, choice.kept, k, v)


def in_one_pool(rows: Vectors, held: torch.Tensor) -> tuple[Entries, Entries]:
    """Keys and values [G, m, D] of every layer as entries of one pool.

    Args:
        held: bool [L * G, M], entries of each list; the m rows of a layer are its last m columns.
    """
    ids = torch.zeros(held.shape, dtype=torch.int64)
    first_row = 0
    for layer_ids, (k, _) in zip(ids.split(len(rows[0][0])), rows, strict=True):
        heads, number = k.shape[:2]
        places = torch.arange(first_row, first_row + heads * number).view(heads, number)
        layer_ids[:, ids.shape[1] - number :] = places
        first_row += heads * number
    keys, values = (
        torch.cat([x.flatten(0, 1) for x in vectors]) for vectors in zip(*rows, strict=True)
    )
    return Entries(keys, ids), Entries(values, ids)


def _step_result(cache: _Cache, names: torch.Tensor, followed: bool) -> StepResult:
    kept, vectors = [], []
    for (positions, held), (k, v) in zip(cache.held, cache.rows, strict=True):
        kept.append([names[positions[columns]].tolist() for columns in held])
        rows = zip(k, v, held, strict=True)
        vectors.append(
            [(x[columns].double().numpy(), y[columns].double().numpy()) for x, y, columns in rows]
        )
    memory, layers = cache.memory, range(len(cache.held))
    if memory is None:
        return StepResult(kept, vectors if cache.changes else None)
    named = {
        name: [_reported(values.get(layer)) if followed else None for layer in layers]
        for name, values in memory.reported.items()
    }
    thresholds = {
        name: [_reported(x) for x in values] for name, values in memory.thresholds().items()
    }
    return StepResult(kept, vectors if cache.changes else None, thresholds, named)
