"""Ways in which a policy is executed for one case, each held against the interpreter's result.

Dimensions: L layers, H query heads, G KV heads, N tokens of the prompt.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from tempfile import TemporaryDirectory
from unittest.mock import patch

import moments
import numpy as np
from agreement import assert_stored, frequencies
from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.bind.stages import why_not_apart
from kvpolicy.dsl.data.result import Result
from kvpolicy.dsl.execute.apply import apply
from kvpolicy.dsl.execute.operations import in_blocks as blocks
from kvpolicy.dsl.execute.planned.steps import Steps
from kvpolicy.dsl.execute.prefill.finished import FinishedPrefill
from kvpolicy.dsl.execute.program import TorchProgram
from kvpolicy.dsl.execute.tensors.values import aligned
from kvpolicy.dsl.interpret.interpreter import interpret
from kvpolicy.kernels.scoring.generated import generated
from ranks import Ranks, kept_by_ranks
from recordings import assert_same, in_chunks, tensors
from stages import Stage
from stores import TABLE, Store, groups, together

OTHERS = (1, 11)  # tokens of the requests beside one
FLOAT32_TOLERANCE = 1e-3  # of vectors that are merged by weights in float32


@dataclass(frozen=True)
class Executed:
    """A policy and tensors, with what the interpreter makes of them.

    Attributes:
        prompt: q [L, H, N, D], k and v [L, G, N, D].
        steps: q, k, v of the steps.
        others: the same policy with the tensors of other requests.
        random: draws numbers of ranks, where stages and chunks end, and the order of requests.
    """

    bound: Bound
    prompt: list[np.ndarray]
    steps: tuple[np.ndarray, ...]
    result: Result
    others: tuple[Executed, ...]
    random: Random

    @classmethod
    def of(
        cls, bound: Bound, prompt, steps, result: Result, random: Random, ties: bool = False
    ) -> Executed:
        """With the results of other requests, whose tensors are drawn."""
        shape = (bound.shape.layers, bound.shape.heads, bound.shape.kv_heads, bound.shape.head_dim)
        others = []
        for tokens in OTHERS if bound.folded.decode is not None else ():
            seed = np.random.default_rng(random.randrange(1 << 30))
            *own, later = tensors(seed, shape, tokens, len(steps[0]), ties)
            made = interpret(bound, *own, later, frequencies(shape[3]))
            others.append(cls(bound, own, later, made, (), random))
        return cls(bound, prompt, steps, result, tuple(others), random)

    @property
    def tokens(self) -> int:
        """N."""
        return self.prompt[1].shape[2]

    @property
    def expected(self) -> list[moments.Moment]:
        """What the interpreter's result says that is held at each moment."""
        return moments.expected(self.bound, self.tokens, self.result)


def in_blocks(it: Executed) -> None:
    """Where memory is short, so that every reduction is taken a row at a time."""
    sizes = {"BLOCK_BYTES": 1, "_LEAST_ROWS": 1}
    with patch.multiple(blocks, **sizes):
        found = apply(it.bound, *it.prompt, it.steps, frequencies(it.bound.shape.head_dim))
    assert_same(it.result, found)


def layer_by_layer(it: Executed) -> None:
    """Where a prompt is too long for its layers to wait for the last one."""
    program = TorchProgram(it.bound, deferred_bytes=0)
    found = moments.kept(it.bound, it.prompt, it.steps, program)
    moments.assert_same_moments(found, it.expected)


def on_ranks(it: Executed) -> None:
    """Where ranks divide the KV heads, or several of them hold the same one."""
    heads, kv = it.bound.shape.heads, it.bound.shape.kv_heads
    numbers = [number for number in (2, kv, 2 * kv) if _divides(number, heads, kv)]
    if numbers:
        ranks = Ranks(it.random.choice(numbers))
        found = kept_by_ranks(ranks, it.bound, it.prompt, it.steps)
        moments.assert_same_moments(found, it.expected)


def _divides(ranks: int, heads: int, kv: int) -> bool:
    return ranks > 1 and heads % ranks == 0 and (kv % ranks == 0 or ranks % kv == 0)


def in_stages(it: Executed) -> None:
    """Where stages divide the layers."""
    layers = it.bound.shape.layers
    if layers == 1 or why_not_apart(it.bound) is not None:
        return
    parts = [range(*ends) for ends in pairwise([0, *_ends(it.random, layers), layers])]
    for stage in Stage.all(it.bound, it.prompt, parts):
        part = slice(stage.layers.start, stage.layers.stop)
        own, later = [x[part] for x in it.prompt], tuple(x[:, part] for x in it.steps)
        found = moments.kept(it.bound, own, later, stage)
        wanted = [(held[part], vectors[part]) for held, vectors in it.expected]
        moments.assert_same_moments(found, wanted)


def _ends(random: Random, number: int) -> list[int]:
    """Where one part or more of 0 .. `number` end before the last does."""
    return sorted(random.sample(range(1, number), random.randint(1, min(3, number - 1))))


def chunked(it: Executed) -> None:
    """Where the queries of a prompt arrive in chunks."""
    program = TorchProgram(it.bound, report=True)
    if not program.accumulates or it.tokens < 2:
        return
    run = in_chunks(program, it.prompt, _ends(it.random, it.tokens), _read_singly(it))
    finished = run.finish()
    for layer, (own, wanted) in enumerate(zip(finished.kept, it.result.kept, strict=True)):
        assert (own.numpy() == wanted).all(), f"layer {layer}: {own.int()} instead of {wanted}"
    for own, wanted in zip(_scores(finished), it.result.scores or [], strict=False):
        np.testing.assert_allclose(np.where(np.isnan(wanted), np.nan, own), wanted, 1e-6, 1e-9)


def _read_singly(it: Executed) -> int:
    """Number of the prompt's last queries that are read not only in sums over all."""
    bound, layers = it.bound, range(it.bound.shape.layers)
    windows = [node for node in bound.nodes() if node.operation.is_window and node.args]
    sizes = [bound.window(node, it.tokens, layer) for node in windows for layer in layers]
    return max([*sizes, bound.step_queries(it.tokens) - 1])


def _scores(finished: FinishedPrefill) -> list[np.ndarray]:
    score = finished.program.bound.lowered.prefill.score
    values = [] if score is None else finished.result(score)
    return [aligned(x.data, x.axes, ("kv", "token")).numpy() for x in values]


def beside_others(it: Executed) -> None:
    """Where requests fold together, in any order, each with as many steps as it has taken."""
    with patch.object(Steps, "by_kernels", True):  # all layers at once where that is possible
        for store, request in _folded_together(it, TorchProgram(it.bound)):
            assert_stored(store, request.result)


def _folded_together(it: Executed, program: TorchProgram) -> Iterator[tuple[Store, Executed]]:
    """Each request's store after each fold of a program that all requests share."""
    if it.bound.folded.decode is None:
        return
    requests = [it, *it.others]
    stores = [Store(it.bound, x.prompt, x.steps, program=program) for x in requests]
    taken, last = 0, len(it.steps[0])
    for step in range(1, last + 1):
        leaves = any(it.bound.leaves_at(step, x.tokens) for x in requests)
        if leaves or step in (1, last):
            for group in groups(it.random.sample(stores, len(stores)), step - taken):
                together(group, step - taken)
            taken = step
            yield from zip(stores, requests, strict=True)


Way = Callable[[Executed], None]
WAYS: tuple[Way, ...] = (
    in_blocks, layer_by_layer, on_ranks, in_stages, chunked, beside_others,
)  # fmt: skip


# By Triton's kernels, those generated for the policy among them, which compute in float32.


def by_kernels(it: Executed) -> None:
    """Where kernels score several layers of a prompt together, from pools, and decode."""
    with _generated_apart():
        program = TorchProgram(it.bound, kernels=TABLE, keys_stay=True)
        found = moments.kept(it.bound, it.prompt, it.steps, program)
    moments.assert_same_moments(found, it.expected, FLOAT32_TOLERANCE)


def beside_others_by_kernels(it: Executed) -> None:
    """As `beside_others`, with each layer of a prompt by itself."""
    with _generated_apart():
        for store, request in _folded_together(it, TorchProgram(it.bound, kernels=TABLE)):
            kept = request.result.steps[store.done - 1].kept
            assert store.held() == kept, f"step {store.done}: {store.held()} instead of {kept}"


@contextmanager
def _generated_apart() -> Iterator[None]:
    """A block whose generated files are not in the user's cache, and are forgotten after it."""
    with TemporaryDirectory() as folder, patch.dict(os.environ, XDG_CACHE_HOME=folder):
        before = set(sys.modules)
        try:
            yield
        finally:
            generated.cache_clear()
            linecache.clearcache()
            for name in {*sys.modules} - before:
                if name.startswith("kvpolicy_generated_"):
                    del sys.modules[name]


WAYS_BY_KERNELS: tuple[Way, ...] = (by_kernels, beside_others_by_kernels)
