"""Compares every execution of a policy: interpreter, torch program, and decode steps as served.

Steps up to a fold are taken at once (`follow_together`), for all layers together or layer by layer.
All executions must keep the entries that the interpreter keeps, and these must be what binding
claims of them (`claims.py`).

Dimensions: L layers, H query heads, G KV heads, N tokens of the prompt, D head size, T steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from unittest.mock import patch

import numpy as np
from claims import assert_claims
from kvpolicy.dsl.bind.bind import Bound, bind
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.data.result import Result, Steps
from kvpolicy.dsl.execute.planned.steps import Steps as DecodeSteps
from kvpolicy.dsl.ir.nodes import ModelShape, Program
from kvpolicy.dsl.syntax.source import Source
from recordings import Shape, both, tensors
from stores import Store

HEADER = "policy: a-test\nlanguage: 1\nabout: a test\n"
SHAPE: Shape = (3, 4, 2, 8)


def written(text: str, shape: Shape = SHAPE, every: int = 1, **settings: str) -> Bound:
    """The policy of a file with `text` after `HEADER`, bound; `every`: steps between folds."""
    return bind(_checked(text), ModelShape(*shape), settings, fold_interval=every)


@cache
def _checked(text: str) -> Program:
    return load(Source("a-test.yaml", HEADER + text)).require()


def assert_agreement(text: str, shape: Shape = SHAPE, tokens=(1, 13), **settings: str) -> Result:
    """Checks that all executions agree: prompts of `tokens` lengths, 5 steps; the first has ties.

    After the longest prompt, entries leave at every second step, so that steps are taken together.

    Returns:
        The interpreter's result of the last prompt.
    """
    for seed, number in enumerate(tokens):
        every = 2 if number == max(tokens) else 1
        bound = written(text, shape, every, **settings)
        result = agree(
            bound, *tensors(np.random.default_rng(seed), shape, number, 5, ties=not seed)
        )
    return result


def frequencies(size: int) -> np.ndarray | None:
    """RoPE frequencies [D / 2] of a head of size D, as in `Store`; None without RoPE: D is odd."""
    return None if size % 2 else 100.0 ** (-np.arange(size // 2) / 2)


def agree(bound: Bound, q: np.ndarray, k: np.ndarray, v: np.ndarray, steps: Steps) -> Result:
    """The interpreter's result, after checking that the other executions agree.

    Args:
        bound: the policy.
        q, k, v: [L, H, N, D], [L, G, N, D] twice.
        steps: [T, L, H, D], [T, L, G, D] twice.

    Raises:
        AssertionError: an execution differs.
    """
    expected, _ = both(bound, q, k, v, steps, frequencies(k.shape[-1]))
    assert_claims(bound, k.shape[2], expected)
    if bound.folded.decode is not None:
        _assert_served(Store(bound, (q, k, v), steps), expected)
        # Again with all layers at once where possible, as if kernels read keys and values.
        with patch.object(DecodeSteps, "by_kernels", True):
            _assert_served(Store(bound, (q, k, v), steps), expected)
    return expected


def _assert_served(store: Store, expected: Result) -> None:
    for number in stretches(store.memory.bound, store.memory.prompt, len(expected.steps)):
        store.follow(number)
        assert_stored(store, expected)


def assert_stored(store: Store, expected: Result) -> None:
    """Checks that a store holds what the interpreter's result has after as many steps."""
    result = expected.steps[store.done - 1]
    assert store.held() == result.kept, f"served, after step {store.done}"
    for own, other in zip(store.vectors(), result.merged or [], strict=False):
        for one, two in zip(own, other, strict=True):
            for x, y in zip(one, two, strict=True):
                np.testing.assert_allclose(x, y, rtol=3e-7, atol=1e-7)


def stretches(bound: Bound, prompt: int, steps: int) -> Iterator[int]:
    """Numbers of steps to take at once, so that entries leave only at the last of each."""
    number = 0
    for step in range(1, steps + 1):
        number += 1
        # The first step is taken alone, so that later ones start from its result.
        if bound.leaves_at(step, prompt) or step in (1, steps):
            yield number
            number = 0
