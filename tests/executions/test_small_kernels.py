"""Kernels for small tensors of a program: called where they apply, with the same entries kept.

Means, variances, entropies, sort keys, ranks and their variance over layers, beside the interpreter
and beside their torch references.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from kvpolicy.dsl.bind.bind import Bound, bind
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.execute import apply as torch_apply
from kvpolicy.dsl.execute.operations.operands import distribution
from kvpolicy.dsl.execute.program import TorchProgram
from kvpolicy.dsl.interpret.interpreter import interpret
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.dsl.ir.traverse import nodes_of
from kvpolicy.dsl.syntax.source import Source
from kvpolicy.kernels.table import REFERENCE
from kvpolicy.kernels.table_triton import TRITON
from recordings import assert_same, tensors
from shipped_policies import shipped_program

# What is computed beside the numbers that count.
pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),
]
SHAPE = (5, 4, 2, 8)
NAMES = ("keys", "rank", "mean", "var", "entropy", "var_of_layers", "any_of_layers")
ASL = {"capacity": "9", "window": "3", "kernel": "3", "start": "2", "tau": "0.9"}
POLICIES = {
    "asl": (ASL, {"keys", "rank", "mean", "var_of_layers", "any_of_layers"}),
    "asl-lava-d2o": (ASL, {"keys", "rank", "mean", "entropy", "var_of_layers", "any_of_layers"}),
    "lava": ({"capacity": "13", "window": "4"}, {"keys", "entropy"}),
    "d2o": ({}, {"keys", "mean", "var"}),
    "d2o-code": ({"rate": "0.4"}, {"var"}),
    "roco": ({}, set()),
    "tova": ({"capacity": "9"}, {"keys", "mean"}),
}
HEADER = "policy: a-test\nlanguage: 1\nabout: a test\n"


class Watched(dict):
    """A table with the kernels for small tensors; counts their calls."""

    def __init__(self) -> None:
        super().__init__(REFERENCE, **{name: partial(self._call, name) for name in NAMES})
        self.calls: Counter[str] = Counter()

    def _call(self, name: str, *args):
        self.calls[name] += 1
        return TRITON[name](*args)


def executed(bound: Bound, request, monkeypatch) -> tuple:
    """Results of interpreter, torch, and torch with kernels; and the calls of kernels."""
    watched = Watched()
    monkeypatch.setattr(torch_apply, "TorchProgram", TorchProgram)
    plain = torch_apply.apply(bound, *request)
    with_kernels = partial(TorchProgram, kernels=watched)
    monkeypatch.setattr(torch_apply, "TorchProgram", with_kernels)
    return interpret(bound, *request), plain, torch_apply.apply(bound, *request), watched.calls


@pytest.mark.thorough(besides=["33-True", "1-False"])
@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "ties"), [(33, False), (33, True), (4, True), (1, False)])
@pytest.mark.parametrize("name", POLICIES)
def test_shipped_policies(name, tokens, ties, monkeypatch):
    settings, wanted = POLICIES[name]
    bound = bind(shipped_program(name), ModelShape(*SHAPE), settings)
    request = tensors(np.random.default_rng(tokens), SHAPE, tokens, 3, ties)
    expected, plain, made, calls = executed(bound, request, monkeypatch)
    assert_same(expected, plain)
    assert_same(plain, made)
    assert_same(expected, made)
    if tokens == 33:
        assert wanted <= set(calls), calls


def test_asl_selects_where_ranks_have_settled(monkeypatch):
    """The drift decides on a layer that is not the first one tested."""
    chosen = set()
    for seed in range(8):
        bound = bind(shipped_program("asl"), ModelShape(*SHAPE), ASL)
        request = tensors(np.random.default_rng(seed), SHAPE, 40, 0)
        expected, _, made, _ = executed(bound, request, monkeypatch)
        assert_same(expected, made)
        chosen.add(made.selected_layer)
    assert chosen - {None, 2}


@pytest.mark.parametrize(
    ("rules", "names"),
    [
        ("score: entropy[head](sum[query](attn(recent(3))))", {"entropy"}),
        ("score: value_at * entropy[kv, token](value_at)", {"entropy"}),
        ("score: value_at * entropy[token](value_at - 0.4)", {"entropy"}),  # negative shares
        ("score: value_at * entropy[token](value_at where value_at < 0)", {"entropy"}),  # of none
        ("score: var[kv](value_at where value_at > 0.3) + value_at", {"var"}),
        ("score: mean[token](value_at where recent(2)) - value_at", {"mean"}),
        ("score: rank[kv, token](value_at where value_at > 0.3)", {"rank", "keys"}),
        ("score: var[past](past(rank(value_at), 3)) + value_at", {"rank", "var_of_layers"}),
        ("score: value_at where any[past](past(value_at > 0.4, 3)) else 0", {"any_of_layers"}),
        ("score: var[layer](value_at) + value_at", {"var"}),
    ],
)
def test_small_policies(rules, names, monkeypatch):
    text = (
        f"{HEADER}let:\n  value_at: sum[query, group](attn(recent(3)))\n{rules}\n"
        "budget: 7\nkeep: recent(2) then top(score)\n"
    )
    bound = bind(load(Source("a-test.yaml", text)).require(), ModelShape(*SHAPE))
    for ties in (False, True):
        request = tensors(np.random.default_rng(3), SHAPE, 29, 0, ties)
        expected, plain, made, calls = executed(bound, request, monkeypatch)
        assert_same(expected, plain)
        assert_same(expected, made)
        assert names | {"keys"} <= set(calls), calls


@pytest.mark.parametrize("number", [1, 3, 9])
@pytest.mark.parametrize(
    ("what", "wished"),
    [
        ("var[past](past(votes, {}))", "told"),
        ("var[past](past(few, {}))", "told"),
        ("any[past](past(chosen, {}))", "votes where told else votes / 2"),
    ],
)
def test_layers_that_follow_one_another(what, wished, number, monkeypatch):
    """Reductions of `past` while tokens leave; over more layers than exist."""
    text = (
        f"{HEADER}let:\n  votes: sum[query, head](attn(recent(3)))\n"
        "  few: votes where layer == 1 else (votes where votes > 0.25)\n"
        f"  chosen: top(votes, 4)\n  told: {what.format(number)}\n"
        "propagate:\n  every: layer >= 1\n"
        f"  tokens: recent(3) then top({wished}, length - 8)\n"
        "score: votes\nbudget: 7\nkeep: recent(2) then top(score)\n"
    )
    bound = bind(load(Source("a-test.yaml", text)).require(), ModelShape(*SHAPE))
    for seed in range(3):
        request = tensors(np.random.default_rng(seed), SHAPE, 47, 0)
        expected, plain, made, calls = executed(bound, request, monkeypatch)
        assert_same(expected, plain)
        assert_same(expected, made)
        assert calls["any_of_layers" if what.startswith("any") else "var_of_layers"]
        assert len(made.propagated) > 2


def test_numbers_that_are_not_finite_keep_everything():
    for name in ("lava", "d2o", "asl-lava-d2o"):
        bound = bind(shipped_program(name), ModelShape(*SHAPE), POLICIES[name][0])
        run = TorchProgram(bound, kernels=Watched()).start(33)
        q, k, v = (torch.tensor(x) for x in tensors(np.random.default_rng(1), SHAPE, 33, 0)[:3])
        k[1][0, 20, 3] = v[1][1, 20, 3] = torch.nan
        for i in range(SHAPE[0]):
            run.observe(i, q[i][:, -max(1, run.queries) :], k[i], v[i])
        assert torch.stack(run.finish().kept).all()
        assert run.not_finite


def test_what_is_an_entropy():
    def found(text: str) -> list[str]:
        source = Source("a-test.yaml", f"{HEADER}score: {text}\nbudget: 7\nkeep: top(score)\n")
        bound = bind(load(source).require(), ModelShape(*SHAPE))
        nodes = nodes_of([bound.lowered.prefill.keep])
        return [distribution(node).op for node in nodes if distribution(node) is not None]

    votes = "sum[query](attn(recent(3)))"
    assert found(f"entropy[head]({votes})") == ["sum"]
    assert found(f"-sum[head](normalize[head]({votes}) * log(normalize[head]({votes})))") == ["sum"]
    # Attention is not reduced by this kernel, nor a sum along other axes than it was divided by.
    assert found("sum[head](entropy[query](attn(recent(3))))") == []
    assert found(f"-sum[head](normalize[token]({votes}) * log(normalize[token]({votes})))") == []
    assert found(f"-sum[head]({votes} * log({votes}))") == []
    assert found(f"sum[head](normalize[head]({votes}) * log(normalize[head]({votes})))") == []
