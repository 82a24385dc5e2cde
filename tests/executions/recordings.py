"""Random tensors of a prompt and its decode steps, run by interpreter and torch program."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.data.result import Result
from kvpolicy.dsl.execute.apply import apply
from kvpolicy.dsl.execute.prefill.run import Run
from kvpolicy.dsl.execute.program import TorchProgram
from kvpolicy.dsl.interpret.interpreter import interpret
from kvpolicy.dsl.tools.agreement import difference

Shape = tuple[int, int, int, int]  # L, H, G, D


def tensors(rng, shape: Shape, tokens: int, steps: int, ties: bool = False):
    """q, k, v, and (q, k, v) of steps; with `ties`, small integers that make scores equal."""
    layers, heads, kv, size = shape

    def made(*dims: int) -> np.ndarray:
        x = rng.integers(-1, 2, dims) if ties else rng.normal(size=dims)
        return x.astype(np.float32)

    prompt = [made(layers, count, tokens, size) for count in (heads, kv, kv)]
    later = tuple(made(steps, layers, count, size) for count in (heads, kv, kv))
    return *prompt, later


def in_chunks(program: TorchProgram, prompt, ends: Iterable[int], singly: int = 0) -> Run:
    """A run that has seen q, k and v of a prompt in chunks, all but the last of which end there.

    Args:
        singly: number of last queries that are read not only in sums over all.
    """
    run = program.start(prompt[1].shape[2])
    for layer in range(len(prompt[1])):
        q, k, v = (torch.tensor(x[layer]) for x in prompt)
        start = 0
        for end in ends:
            run.accumulate(layer, q[:, start:end], k[:, :end], v[:, :end])
            start = end
        run.observe(layer, q[:, max(0, min(start, q.shape[1] - singly)) :], k, v)
    return run


def both(bound: Bound, q, k, v, steps=None, inv_freq=None) -> tuple[Result, Result]:
    """Results of the interpreter and the torch program, checked to be the same."""
    expected = interpret(bound, q, k, v, steps, inv_freq)
    actual = apply(bound, q, k, v, steps, inv_freq)
    assert_same(expected, actual)
    return expected, actual


def assert_same(expected: Result, actual: Result) -> None:
    """Checks for the same entries at every step, and the same numbers up to rounding."""
    found = difference(expected, actual)
    assert found is None, f"{found.section} at step {found.step}: {found.text}"
    assert (expected.budgets is None) == (actual.budgets is None)
    assert (expected.scores is None) == (actual.scores is None)
    assert expected.named.keys() == actual.named.keys()
