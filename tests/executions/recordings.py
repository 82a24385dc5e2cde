"""Recorded tensors of a prompt and its decode steps, and the comparison of two executions."""

from __future__ import annotations

import numpy as np
from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.data.result import Result
from kvpolicy.dsl.execute.apply import apply
from kvpolicy.dsl.interpret.interpreter import interpret

Shape = tuple[int, int, int, int]  # L, H, G, D


def tensors(rng, shape: Shape, tokens: int, steps: int, ties: bool = False):
    """q, k, v and (q, k, v of steps); with `ties` small integers, so that many scores are equal."""
    layers, heads, kv, size = shape

    def made(*dims: int) -> np.ndarray:
        x = rng.integers(-1, 2, dims) if ties else rng.normal(size=dims)
        return x.astype(np.float32)

    prompt = [made(layers, count, tokens, size) for count in (heads, kv, kv)]
    later = tuple(made(steps, layers, count, size) for count in (heads, kv, kv))
    return *prompt, later


def both(bound: Bound, q, k, v, steps=None, inv_freq=None) -> tuple[Result, Result]:
    """The interpreter's result, after checking that the torch program's is the same."""
    expected = interpret(bound, q, k, v, steps, inv_freq)
    actual = apply(bound, q, k, v, steps, inv_freq)
    assert_same(expected, actual)
    return expected, actual


def assert_same(expected: Result, actual: Result) -> None:
    """The same entries at every step, the same numbers up to float64 rounding."""
    for layer, (a, b) in enumerate(zip(expected.kept, actual.kept, strict=True)):
        assert np.array_equal(a, b), f"layer {layer}: {np.argwhere(a != b).tolist()}"
    assert (expected.budgets is None) == (actual.budgets is None)
    if expected.budgets is not None:
        assert all(map(np.array_equal, expected.budgets, actual.budgets))
    for a, b in zip(expected.scores or [], actual.scores or [], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
    for name in ("selected_layer", "propagated", "positions"):
        assert getattr(expected, name) == getattr(actual, name), name
    _assert_same_vectors(expected, actual)
    _assert_same_numbers(expected, actual)
    for number, (a, b) in enumerate(zip(expected.steps, actual.steps, strict=True)):
        assert a.kept == b.kept, f"step {number + 1}"
        _assert_same_numbers(a, b)
        assert (a.merged is None) == (b.merged is None)
        for one, other in zip(a.merged or [], b.merged or [], strict=True):
            for x, y in zip(one, other, strict=True):
                # Stored in float32: values next to a boundary may be rounded apart.
                np.testing.assert_allclose(x[0], y[0], rtol=3e-7, atol=1e-7)
                np.testing.assert_allclose(x[1], y[1], rtol=3e-7, atol=1e-7)


def _assert_same_vectors(expected: Result, actual: Result) -> None:
    assert (expected.merged is None) == (actual.merged is None)
    for layer, pair in enumerate(zip(expected.merged or [], actual.merged or [], strict=True)):
        kept = expected.kept[layer]
        for x, y in zip(*pair, strict=True):
            np.testing.assert_allclose(x[kept], y[kept], rtol=1e-9, atol=1e-12)


def _assert_same_numbers(a, b) -> None:
    for name in ("thresholds", "named"):
        one, other = getattr(a, name), getattr(b, name)
        assert one.keys() == other.keys(), name
        for key in one:
            for x, y in zip(one[key], other[key], strict=True):
                assert (x is None) == (y is None), (name, key)
                if x is not None:
                    np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)
