"""`kvpolicy run`: a policy applied to recorded tensors. The output is described in docs/run.md."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
from kvpolicy.dsl.bind.bind import bind
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.data.given import with_data
from kvpolicy.dsl.data.recording import Recording, read_recording
from kvpolicy.dsl.data.result import Result, StepResult
from kvpolicy.dsl.syntax.diagnostics import refused
from kvpolicy.dsl.tools.commands import execute, overrides


def main(args: argparse.Namespace) -> int:
    """Runs the command; raises PolicyError where the input cannot be used."""
    [program] = with_data([load(args.file).executable()], args.data)
    inputs = read_recording(args.tensors)
    bound = bind(program, inputs.shape, overrides(args.set), fold_interval=args.fold_interval)
    inputs.check_queries(bound)
    result = execute(
        bound, args.execution, inputs.q, inputs.k, inputs.v, inputs.steps, inputs.inv_freq
    )
    output = report(result, args.scores)
    if bound.propagates:
        output.update(propagation(result))
    if args.merged:
        add_merged(output, result, inputs)
    text = json.dumps(output, separators=(",", ":")) + "\n"
    if args.out == "-":
        sys.stdout.write(text)
        return 0
    try:
        Path(args.out).write_text(text, encoding="utf-8")
    except OSError as error:
        raise refused(args.out, "data", f"cannot be written: {error.strerror}") from None
    return 0


def report(result: Result, scores: bool = False) -> dict[str, Any]:
    """The result as JSON values; see docs/run.md."""
    kept = [[np.flatnonzero(head).tolist() for head in layer] for layer in result.kept]
    budgets = result.budgets or [layer.sum(-1) for layer in result.kept]
    output: dict[str, Any] = {
        "kept": kept,
        "budgets": [[_number(budget) for budget in layer.tolist()] for layer in budgets],
    }
    if scores and result.scores is not None:
        output["scores"] = [
            [[_number(score) for score in head] for head in layer.astype(np.float32).tolist()]
            for layer in result.scores
        ]
    output.update(_values(result))
    if result.steps:
        output["steps"] = [{"kept": step.kept, **_values(step)} for step in result.steps]
    return output


def _values(result: Result | StepResult) -> dict[str, object]:
    """Thresholds of merges and reported lets, per layer."""
    values: dict[str, object] = {
        name: _layers(per_layer) for name, per_layer in result.named.items()
    }
    thresholds = {name: _layers(per_layer) for name, per_layer in result.thresholds.items()}
    if len(thresholds) == 1:
        values["thresholds"] = next(iter(thresholds.values()))
    elif thresholds:
        values["thresholds"] = thresholds
    return values


def _layers(per_layer: list[Any]) -> list[Any]:
    return [_layers(x) if isinstance(x, list) else _number(x) for x in per_layer]


def propagation(result: Result) -> dict[str, object]:
    """Which tokens went deeper, as JSON values; None if no layer acted."""
    return {
        "selected_layer": result.selected_layer,
        "propagated": result.propagated,
        "positions": result.positions,
    }


def add_merged(output: dict[str, Any], result: Result, given: Recording) -> None:
    """Adds the largest differences of cached keys and values from recorded ones, per layer."""
    keys, values = given.k, given.v
    if result.merged is not None:
        pairs = [
            [(k[head], v[head]) for head, k, v in zip(kept, *vectors, strict=True)]
            for kept, vectors in zip(result.kept, result.merged, strict=True)
        ]
        output["merged"] = _differences(pairs, result.kept, keys, values)
    if given.steps is not None:
        # Steps follow the prompt: [T, L, G, D] after [L, G, N, D].
        keys, values = (
            np.concatenate([x, step.transpose(1, 2, 0, 3)], 2)
            for x, step in zip((keys, values), given.steps[1:], strict=True)
        )
    for step, step_output in zip(result.steps, output.get("steps", ()), strict=True):
        if step.merged is not None:
            step_output["merged"] = _differences(step.merged, step.kept, keys, values)


def _differences(
    pairs: list[Any], kept: list[Any], keys: np.ndarray, values: np.ndarray
) -> list[dict[str, Any]]:
    """The largest differences per layer, as JSON; `pairs` and `kept` are per layer and KV head."""
    result = []
    for layer, (heads, places) in enumerate(zip(pairs, kept, strict=True)):
        largest = {"key": 0.0, "value": 0.0}
        for head, ((k, v), place) in enumerate(zip(heads, places, strict=True)):
            for name, x, recorded in (("key", k, keys), ("value", v, values)):
                difference = np.abs(x - recorded[layer, head][place])
                largest[name] = float(np.maximum(largest[name], difference.max(initial=0.0)))
        result.append({name: _number(x) for name, x in largest.items()})
    return result


def _number(x: float | None) -> float | int | str | None:
    """A number as JSON: null if absent (NaN), text if infinite."""
    if x is None or isinstance(x, int) or math.isfinite(x):
        return x
    return None if math.isnan(x) else ("inf" if x > 0 else "-inf")
