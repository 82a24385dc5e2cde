"""Decisions on layers: entropies of scores (LAVa), ranks and their variance over layers (ASL).

They are small beside a layer's prefill; their cost is the number of launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from kvpolicy.kernels.scoring import order, over_layers, spread
from kvpolicy.kernels.table_triton import TRITON

from cases.case import Bench, Case, Checked, Planned

OURS, TORCH = "ours", "torch, the reference"
# Layers whose ranks ASL compares, of 32.
LAYERS = 9
# Last tokens, which have no score.
WINDOW = 32
TOPIC = "layer budgets"


def _scores(bench: Bench, *size: int, seed: int) -> torch.Tensor:
    """Positive float64, a few of them large."""
    generator = torch.Generator(bench.model.device).manual_seed(seed)
    made = torch.rand(size, generator=generator, device=bench.model.device, dtype=torch.float64)
    return made**8


def _entropy(bench: Bench, tokens: int) -> Case:
    heads = bench.model.shape.kv_heads
    scores = _scores(bench, heads, tokens, seed=1)
    there = torch.arange(tokens, device=bench.model.device) < tokens - WINDOW

    def check() -> str:
        made, exact = (f(scores, there, [0, 1]) for f in (TRITON["entropy"], spread.entropy))
        # Numbers of one sign, added in two orders; each term is a few roundings off.
        bound = 8 * heads * tokens * 2.0**-53 * exact
        return str(Checked().within(made, exact, bound, "entropy"))

    return Case(
        TOPIC,
        f"entropy of the scores of {heads} heads",
        tokens,
        1,
        {
            OURS: lambda: TRITON["entropy"](scores, there, [0, 1]),
            TORCH: lambda: spread.entropy(scores, there, [0, 1]),
        },
        check,
        counted=heads * tokens * 8 + tokens,
        prefill=True,
    )


def _ranks(bench: Bench, tokens: int) -> Case:
    scores = _scores(bench, 1, tokens, seed=2)
    scores = (scores * tokens).floor()  # equal ones among them
    keys = order.keys(scores, None)

    def made(module_keys: Callable, module_rank: Callable) -> torch.Tensor:
        return module_rank(module_keys(scores, None))

    def check() -> str:
        assert torch.equal(
            made(TRITON["keys"], TRITON["rank"]), made(order.keys, order.rank)
        ), "other ranks"  # fmt: skip
        return "same ranks as torch, ties included"

    return Case(
        TOPIC,
        "ranks of the tokens",
        tokens,
        1,
        {
            OURS: lambda: made(TRITON["keys"], TRITON["rank"]),
            TORCH: lambda: made(order.keys, order.rank),
            "torch.sort alone": lambda: keys.sort(dim=-1, descending=True, stable=True),
        },
        check,
        prefill=True,
        note="both sort by torch",
    )


def _variance(bench: Bench, tokens: int) -> Case:
    ranks = [1.0 + bench.model.permutation(tokens, seed=i).double() for i in range(LAYERS)]

    def check() -> str:
        made, exact = (
            f(ranks, None, 0) for f in (TRITON["var_of_layers"], over_layers.var_of_layers)
        )
        bound = torch.full_like(exact, 8 * LAYERS * 2.0**-53 * tokens**2)
        return str(Checked().within(made, exact, bound, "variance"))

    return Case(
        TOPIC,
        f"variance of {LAYERS} layers' ranks",
        tokens,
        1,
        {
            OURS: lambda: TRITON["var_of_layers"](ranks, None, 0),
            TORCH: lambda: over_layers.var_of_layers(ranks, None, 0),
        },
        check,
        counted=(LAYERS + 1) * tokens * 8,
        prefill=True,
    )


def planned(lengths: Sequence[int]) -> list[Planned]:
    """An entropy, ranks and a variance over layers, at every length."""
    made = []
    for tokens in lengths:
        for build, label in ((_entropy, "entropy"), (_ranks, "ranks"), (_variance, "variance")):

            def case(bench: Bench, build=build, tokens=tokens) -> Case:
                return build(bench, tokens)

            made.append(Planned(f"{label} {tokens}", case))
    return made
