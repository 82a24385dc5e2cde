"""What an execution of a policy on recorded tensors returns; both executions return the same.

Dimensions: L layers, G KV heads, N tokens of the prompt, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from kvpolicy.dsl.data.arrays import Array

# Queries [T, L, H, D], keys and values [T, L, G, D] of T decode steps, after RoPE.
Steps = tuple[np.ndarray, np.ndarray, np.ndarray]
# A value of a layer: one number, lists of them (one per KV head, for example), or None if it has
# none so far.
LayerValue = float | list[Any] | None


@dataclass(frozen=True)
class StepResult:
    """What is cached after one decode step.

    Positions are those of the recording: the prompt's tokens have 0 .. N - 1 (also where a restart
    moved them), the token of step t (from 1) has N + t - 1.

    Attributes:
        kept: per layer and KV head, sorted positions.
        merged: per layer and KV head, (k, v), float64 [entries, D], in the order of `kept`: the
            vectors as they are cached. None unless the policy merges, shares or rotates keys.
        thresholds: by name of a state of the merge, its value per layer after the step.
        named: by name under `report`, its value per layer; None at layers where this step did not
            compute it.
    """

    kept: list[list[list[int]]]
    merged: list[list[tuple[np.ndarray, np.ndarray]]] | None = None
    thresholds: Mapping[str, list[LayerValue]] = field(default_factory=dict)
    named: Mapping[str, list[LayerValue]] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """What a policy decides for one prompt.

    Attributes:
        kept: per layer, bool [G, N]: true for the entries that stay; false for tokens that did not
            reach the layer.
        budgets: per layer, int64 [G]: the budget, floored; None if the policy has none.
        scores: per layer, float64 [G, N], NaN where absent; None if the policy has none.
        selected_layer: the layer at which `propagate.first` held; None if it never did.
        propagated: for `first` the positions that went deeper, ascending; for `every` such a list
            by layer, for layers that acted; None if nothing was propagated.
        positions: the positions at which the layers after the propagation, or the second pass of a
            restart, see the propagated tokens; None if nothing was propagated.
        merged: per layer (k, v), float64 [G, N, D]: the vectors as they are cached at the end of
            the prefill; rows that are not kept mean nothing. None unless the policy merges or
            rotates keys.
        thresholds, named: as of `StepResult`, at the end of the prefill.
        steps: one per decode step.
    """

    kept: list[np.ndarray]
    budgets: list[np.ndarray] | None
    scores: list[np.ndarray] | None
    selected_layer: int | None = None
    propagated: list[int] | dict[int, list[int]] | None = None
    positions: list[int] | None = None
    merged: list[tuple[np.ndarray, np.ndarray]] | None = None
    thresholds: Mapping[str, list[LayerValue]] = field(default_factory=dict)
    named: Mapping[str, list[LayerValue]] = field(default_factory=dict)
    steps: list[StepResult] = field(default_factory=list)


def reported(value: Array | None) -> LayerValue:
    """A value of a layer as results report it: a number, or lists of them, one per axis."""
    if value is None:
        return None
    numbers = np.where(value.present, value.data, np.nan)
    layer: LayerValue = numbers.astype(float).tolist()
    return layer
