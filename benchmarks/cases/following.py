"""States of a policy with `decode:`, updated for several decode steps at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from kvpolicy.dsl.bind.bind import bind
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.execute.layer.across import known_before
from kvpolicy.dsl.execute.layer.evaluate import Evaluation
from kvpolicy.dsl.execute.planned.steps import Steps
from kvpolicy.dsl.execute.tensors.checks import FiniteChecks
from kvpolicy.dsl.execute.tensors.kernels import Entries, Kernels
from kvpolicy.dsl.execute.tensors.values import Frame, Step, Value
from kvpolicy.kernels.table import REFERENCE
from kvpolicy.kernels.table_triton import TRITON

from cases.case import Bench, Case, Planned
from cases.scoring import OURS, PROGRAM, Watched

# Steps between two folds, and the share of the positions that a KV head holds.
STEPS, HELD = 16, 0.75
# Most entries for which the torch program is timed.
LONGEST = 32768


def _frame(bench: Bench, entries: int) -> Frame:
    """STEPS decode steps at a layer of h2o; KV heads hold different entries, in random order."""
    model, shape = bench.model, bench.model.shape
    one = type(shape)(1, shape.heads, shape.kv_heads, shape.head_dim)
    bound = bind(load("h2o").require(), one, {"heavy": "8", "window": "8"})
    pool = model.random(shape.kv_heads * entries, shape.head_dim, seed=1)
    ids = model.permutation(len(pool), seed=2).view(shape.kv_heads, entries)
    there = model.random(shape.kv_heads, entries, seed=3).double().argsort().argsort()
    there = there < HELD * entries
    there[:, entries - STEPS :] = True
    positions = 2 * torch.arange(entries, device=model.device)
    q = model.random(shape.heads, STEPS, shape.head_dim, seed=4)
    return Frame(
        bound, entries, model.device, shape.kv_heads, entries,
        vectors={"query": q, "key": Entries(pool, ids)}, positions=positions, held_mask=there,
        step=Step(STEPS, positions[-STEPS:], STEPS),
    )  # fmt: skip


def _advanced(frame: Frame, kernels: Kernels) -> Callable[[], torch.Tensor]:
    """A call that returns float64 [G, N]: 1 + the attention that each entry has received."""
    steps = Steps(frame.bound, False, kernels)
    shape = (frame.kv, frame.tokens)
    before = torch.ones(shape, dtype=torch.float64, device=frame.device)
    known = {"heat": Value(before, ("kv", "token"), finite=True)}

    def call() -> torch.Tensor:
        frame.finite_checks = FiniteChecks()
        made = Evaluation(
            frame,
            steps.updates,
            before=known,
            across_layers=known_before,
            generated=steps.advancing,
        )
        return made.state("heat").data

    return call


def _plain(frame: Frame) -> torch.Tensor:
    """What the steps add, float32 [G, N], by matmul and softmax in the dtype of the keys."""
    queries, entries = frame.vectors["query"], frame.vectors["key"]
    keys = entries.pool[entries.ids]
    heads, _, size = queries.shape
    q = queries.reshape(frame.kv, heads // frame.kv * STEPS, size)
    logits = (q @ keys.transpose(1, 2) * size**-0.5).view(frame.kv, -1, STEPS, frame.tokens)
    seen = frame.positions <= frame.step.places[:, None]
    seen = (seen & frame.held_mask[:, None])[:, None]
    return logits.float().masked_fill(~seen, float("-inf")).softmax(-1).sum((1, 2))


def _states(bench: Bench, entries: int) -> Case:
    frame = _frame(bench, entries)
    shape = bench.model.shape
    calls = {OURS: _advanced(frame, TRITON), "torch, softmax": lambda: _plain(frame)}
    if entries <= LONGEST:
        calls[PROGRAM] = _advanced(frame, REFERENCE)

    def check() -> str:
        mine = _advanced(frame, watched := Watched())()[frame.held_mask] - 1
        assert watched.asked, "no kernel was generated for these states"
        assert bool(frame.finite_checks.here(frame.kv).all()), "tensors are said not to be finite"
        exact = _advanced(frame, REFERENCE)()[frame.held_mask] - 1
        vectors = (frame.vectors["query"], frame.vectors["key"].pool)
        longest = math.prod(float(x.double().norm(dim=-1).max()) for x in vectors)
        single, size = torch.finfo(torch.float32).eps, shape.head_dim
        share = single * (2 * size * longest * size**-0.5 + 2 * (entries / 32 + 32) + STEPS)
        # The sum is rounded once more when it is added to the state, which is float64.
        bound = share * exact + 4 * torch.finfo(torch.float64).eps
        error = (mine - exact).abs()
        assert bool((error <= bound).all()), "states are off"
        return f"states at most {100 * float((error / bound).max()):.0f} % of the bound off float64"

    return Case(
        "decode steps", f"states of {STEPS} steps, one layer of h2o", entries, 1, calls, check,
        counted=int(frame.held_mask.sum()) * bench.model.entry_bytes,
        note="KV heads hold three of four entries, in no order",
    )  # fmt: skip


def planned(lengths: Sequence[int]) -> list[Planned]:
    """A case per prompt length, with an eighth of its entries, at least 2 * STEPS."""
    sizes = [max(2 * STEPS, length // 8) for length in lengths]
    return [
        Planned(f"states of decode steps {size}", lambda bench, size=size: _states(bench, size))
        for size in sizes
    ]
