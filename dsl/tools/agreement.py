"""Whether two executions of a policy did the same: the first difference of their results.

Dimensions: L layers, G KV heads, N tokens of the prompt, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
from kvpolicy.dsl.data.result import LayerValue, Result, StepResult
from kvpolicy.dsl.tools.units import positions_text

# Tolerances of vectors, which are stored in float32 and may be rounded apart.
_RELATIVE, _ABSOLUTE = 3e-7, 1e-7
# (relative, absolute) tolerances: of numbers computed in float64, of those computed from vectors
# that have been stored anew, and of whole ones.
_COMPUTED, _OF_STORED, _WHOLE = (1e-9, 1e-12), (1e-6, 1e-7), (0.0, 0.0)


@dataclass(frozen=True)
class Difference:
    """Where two results differ.

    Attributes:
        section: section that decides it: `propagate`, `budget`, `score`, `keep` or `merge`; or the
            name of a reported let.
        step: decode step, from 1; 0 for the prefill.
        text: what the first result has and what the second one has.
    """

    section: str
    step: int
    text: str


def difference(expected: Result, actual: Result) -> Difference | None:
    """The first difference, in the order in which a policy decides; None if there is none.

    Budgets, scores and reported lets are compared if both results have them. Entries and budgets
    must be equal; scores, reported lets and states of a merge up to the rounding of float64,
    vectors, and what decode steps compute from vectors that have changed, up to that of float32.
    """
    return next(_differences(expected, actual), None)


def _differences(expected: Result, actual: Result) -> Iterator[Difference]:
    if expected.selected_layer != actual.selected_layer:
        text = f"tokens leave after {_layer(expected)} and after {_layer(actual)}"
        yield Difference("propagate", 0, text)
    if expected.propagated != actual.propagated or expected.positions != actual.positions:
        text = f"{_propagated(expected)} go deeper, and {_propagated(actual)}"
        yield Difference("propagate", 0, text)
    yield from _numbers("budget", expected.budgets, actual.budgets, _WHOLE)
    yield from _numbers("score", expected.scores, actual.scores, _COMPUTED)
    yield from _entries(_positions(expected.kept), _positions(actual.kept), 0)
    for layer, (a, b) in enumerate(zip(expected.merged or (), actual.merged or (), strict=True)):
        for head, kept in enumerate(expected.kept[layer]):
            expected_rows, actual_rows = [x[head][kept] for x in a], [x[head][kept] for x in b]
            where = f"{_head(layer, head)},"
            yield from _vectors(expected_rows, actual_rows, np.flatnonzero(kept).tolist(), where, 0)
    yield from _reported(expected, actual, 0, _COMPUTED)
    for step, (first, second) in enumerate(zip(expected.steps, actual.steps, strict=True), 1):
        yield from _entries(first.kept, second.kept, step)
        for layer, heads in enumerate(zip(first.merged or (), second.merged or (), strict=True)):
            for head, (x, y) in enumerate(zip(*heads, strict=True)):
                yield from _vectors(x, y, first.kept[layer][head], f"{_head(layer, head)},", step)
        yield from _reported(first, second, step, _OF_STORED if first.merged else _COMPUTED)


def _layer(result: Result) -> str:
    return "no layer" if result.selected_layer is None else f"layer {result.selected_layer}"


def _propagated(result: Result) -> str:
    propagated = result.propagated
    if isinstance(propagated, dict):
        return ", ".join(f"{positions_text(x)} (layer {i})" for i, x in propagated.items())
    return "all tokens" if propagated is None else positions_text(propagated)


def _positions(kept: list[np.ndarray]) -> list[list[list[int]]]:
    return [[np.flatnonzero(head).tolist() for head in layer] for layer in kept]


def _head(layer: int, head: int) -> str:
    return f"layer {layer}, KV head {head}"


def _numbers(
    section: str,
    expected: list[Any] | None,
    actual: list[Any] | None,
    tolerance: tuple[float, float],
) -> Iterator[Difference]:
    """The first difference of each layer between numbers [G] or [G, N]."""
    if expected is None or actual is None:
        return
    for layer, (a, b) in enumerate(zip(expected, actual, strict=True)):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        differs = ~np.isclose(a, b, *tolerance, equal_nan=True)
        if differs.any():
            head, *position = np.argwhere(differs)[0].tolist()
            where = f", position {position[0]}" if position else ""
            place = (head, *position)
            yield Difference(
                section, 0, f"{_head(layer, head)}{where}: {a[place]:g} and {b[place]:g}"
            )


def _reported(
    expected: Result | StepResult,
    actual: Result | StepResult,
    step: int,
    tolerance: tuple[float, float],
) -> Iterator[Difference]:
    """Differences between states of the merge and between reported lets."""
    for name, layer, text in _values(expected.thresholds, actual.thresholds, tolerance):
        yield Difference("merge", step, f"layer {layer}: `{name}` is {text}")
    if expected.named and actual.named:
        for name, layer, text in _values(expected.named, actual.named, tolerance):
            yield Difference(name, step, f"layer {layer}: {text}")


def _values(
    expected: Mapping[str, list[LayerValue]],
    actual: Mapping[str, list[LayerValue]],
    tolerance: tuple[float, float],
) -> Iterator[tuple[str, int, str]]:
    """Name, layer and both values as text where they differ; a missing name has no values."""
    for name in sorted({*expected, *actual}):
        first, second = expected.get(name, []), actual.get(name, [])
        for layer, (a, b) in enumerate(zip_longest(first, second)):
            if not _close(a, b, tolerance):
                yield name, layer, f"{a} and {b}"


def _close(a: LayerValue, b: LayerValue, tolerance: tuple[float, float]) -> bool:
    if a is None or b is None:
        return a is b
    return np.shape(a) == np.shape(b) and np.allclose(a, b, *tolerance, equal_nan=True)


def _entries(expected: list[Any], actual: list[Any], step: int) -> Iterator[Difference]:
    for layer, heads in enumerate(zip(expected, actual, strict=True)):
        for head, (a, b) in enumerate(zip(*heads, strict=True)):
            if a != b:
                text = f"{_head(layer, head)}: {positions_text(a)} stay, and {positions_text(b)}"
                yield Difference("keep", step, text)


def _vectors(
    expected: Sequence[np.ndarray],
    actual: Sequence[np.ndarray],
    positions: Sequence[int],
    where: str,
    step: int,
) -> Iterator[Difference]:
    """Differences between keys and between values [entries, D] of one KV head."""
    for name, a, b in zip(("key", "value"), expected, actual, strict=True):
        differs = ~np.isclose(b, a, rtol=_RELATIVE, atol=_ABSOLUTE)
        if differs.any():
            row, column = np.argwhere(differs)[0].tolist()
            number = f"has {a[row, column]:g} in dimension {column}, and {b[row, column]:g}"
            yield Difference("merge", step, f"{where} the {name} at {positions[row]} {number}")
