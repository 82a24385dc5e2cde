"""What lists hold after the prefill and after each fold, whichever execution has filled them.

Dimensions: L layers, G KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain

import numpy as np
import torch
from agreement import frequencies, stretches
from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.data.result import Result, Steps
from kvpolicy.dsl.execute.apply import prefilled
from kvpolicy.dsl.execute.program import TorchProgram
from stores import Rows, Store

Held = list[list[list[int]]]
# Positions [L][G] in the recording; keys and values [L][G], none if nothing has changed vectors.
Moment = tuple[Held, list[list[Rows]]]


def kept(
    bound: Bound, recording, steps: Steps, program: TorchProgram, done: Callable = lambda: None
) -> list[Moment]:
    """What a program's lists hold at each moment; `done` is called after each."""
    if bound.folded.decode is None:
        found = [_alone(bound, recording, program)]
        done()
        return found
    store = Store(bound, recording, steps, program=program)
    done()
    found = [(store.held(), store.vectors() if bound.changes_vectors else [])]
    for number in stretches(bound, store.memory.prompt, len(steps[0])):
        store.follow(number)
        found.append((store.held(), store.vectors() if bound.changes_vectors else []))
        done()
    return found


def _alone(bound: Bound, recording, program: TorchProgram) -> Moment:
    made = prefilled(program, *recording, frequencies(bound.shape.head_dim))
    masks = made.finished.kept
    held = [[made.chosen[own].tolist() for own in layer] for layer in masks]
    if not bound.prefill_changes_vectors:
        return held, []
    stored = zip(masks, *zip(*made.vectors, strict=True), strict=True)
    return held, [[(k[i, own], v[i, own]) for i, own in enumerate(layer)] for layer, k, v in stored]


def expected(bound: Bound, prompt: int, result: Result) -> list[Moment]:
    """What a result of a prompt of so many tokens says that is held at each moment."""
    held = [[np.flatnonzero(own).tolist() for own in layer] for layer in result.kept]
    vectors = [
        [tuple(torch.tensor(x[i, own]) for x in pair) for i, own in enumerate(layer)]
        for layer, pair in zip(result.kept, result.merged or [], strict=False)
    ]
    found = [(held, vectors)]
    if bound.folded.decode is None:
        return found
    for step in np.cumsum(list(stretches(bound, prompt, len(result.steps)))):
        each = result.steps[step - 1]
        found.append((each.kept, [
            [tuple(map(torch.tensor, pair)) for pair in layer] for layer in each.merged or []
        ]))  # fmt: skip
    return found


def joined(parts: Iterable[list[Moment]]) -> list[Moment]:
    """Moments of ranks, in their order, as moments of all KV heads."""
    together = zip(*parts, strict=True)
    return [tuple(map(_beside, zip(*moments, strict=True))) for moments in together]


def _beside(parts) -> list:
    return [list(chain.from_iterable(each)) for each in zip(*parts, strict=True)]


def assert_same_moments(found: list[Moment], wanted: list[Moment], tolerance: float = 1e-6) -> None:
    """Checks for the same entries at every moment, and the same vectors up to rounding."""
    for moment, (own, other) in enumerate(zip(found, wanted, strict=True)):
        assert own[0] == other[0], f"at moment {moment}: {own[0]} instead of {other[0]}"
        if not (own[1] and other[1]):
            continue
        assert [len(each) for each in own[1]] == [len(each) for each in other[1]]
        for x, y in zip(_rows(own[1]), _rows(other[1]), strict=True):
            torch.testing.assert_close(
                x.double(), y.double(), rtol=tolerance, atol=tolerance, equal_nan=True
            )


def _rows(vectors: list[list[Rows]]) -> Iterator[torch.Tensor]:
    return (x for layer in vectors for rows in layer for x in rows)
