"""The trial refuses a policy only if an execution carries it out wrongly."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import numpy as np
import pytest
import torch
from kvpolicy.dsl.bind.bind import Bound, bind
from kvpolicy.dsl.bind.bounds import max_entries
from kvpolicy.dsl.bind.model_config import USUAL
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.execute.operations.table import TORCH_FORMS
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.dsl.syntax.diagnostics import PolicyError
from kvpolicy.dsl.syntax.library import TEST_SUFFIX, shipped
from kvpolicy.dsl.syntax.source import Source
from kvpolicy.dsl.tools.trial import trial
from kvpolicy.dsl.tools.trial_cases import cases, sampled

EXAMPLES = Path(__file__).parents[2] / "examples" / "policies"
FILES = [*shipped().values(), *sorted(EXAMPLES.glob("*.yaml"))]
FILES = [path for path in FILES if not path.name.endswith(TEST_SUFFIX)]
LARGE = ModelShape(80, 64, 8, 128)
HEADER = "policy: p\nlanguage: 1\nabout: a policy\n"


def policy(text: str, shape: ModelShape = USUAL, **settings: str) -> Bound:
    """A policy written in the test, or a shipped one."""
    source = Source("p.yaml", HEADER + text) if "\n" in text else text
    return bind(load(source).require(), shape, settings)


def refusal(bound: Bound) -> str:
    with pytest.raises(PolicyError) as caught:
        trial(bound)
    assert len(caught.value.diagnostics) == 1
    assert "error[trial]" in str(caught.value)
    assert "please report it" in str(caught.value)
    return str(caught.value)


@pytest.mark.thorough(besides=["h2o", "asl", "lava-h2o", "loud", "fastkv"])
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_policies_pass_on_every_model(path):
    program = load(path).require()
    for shape in (LARGE, (ModelShape(1, 1, 1, 5), ModelShape(3, 7, 7, 64))[FILES.index(path) % 2]):
        bound = bind(sampled(program, shape), shape, fold_interval=16)
        began = perf_counter()
        trial(bound)
        print(f"{path.stem}, {shape.layers} layers: {perf_counter() - began:.2f} s")


def test_rounding_decides_nothing_though_many_tokens_are_alike():
    """Of three alike tokens a variance is nothing but rounding, which clusters would compare."""
    trial(
        policy(
            "let:\n"
            "  spread: var[token](mean[head, query](attn(recent(2))))\n"
            "  label: cluster[layer](spread, 2)\n"
            "score: sum[group](max[query](attn(recent(2))))\n"
            "budget: (0.2 * prompt where label == 0 else 0.6 * prompt) + 2\n"
            "keep: recent(2) then top(score)\n"
        )
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_prompts_are_short_and_lose_entries(path):
    """One token, a window, one more, a few windows; as many entries leave as the file allows."""
    tried = list(cases(bind(sampled(load(path).require(), LARGE), LARGE)))
    assert all(case.bound.shape.layers <= 6 for case in tried)
    assert all(case.bound.shape.group == 2 for case in tried)
    assert {1, 2} <= {case.tokens for case in tried}
    assert max(case.tokens for case in tried) <= 64
    assert sum(case.ties for case in tried) == 3
    assert all((case.steps > 0) == (case.bound.folded.decode is not None) for case in tried[1:])
    last = tried[-1]
    entries = last.bound.shape.layers * last.bound.shape.kv_heads * last.tokens
    # Of these only data, or the first new token, decide whether anything leaves.
    undecided = {"minicache", "roco", "simlayerkv", "simlayerkv-prefill", "d2o-code",
                 "streaming-heads"}  # fmt: skip
    assert (max_entries(last.bound, last.tokens) < entries) == (path.stem not in undecided)


def test_parameters_that_were_set_are_tried():
    settings = {"kv_rate": "0.5", "tsp_layer": "40", "window": "64", "average": "true"}
    tried = [case.bound.params for case in cases(policy("fastkv", LARGE, **settings))]
    assert all(params["kv_rate"] == 0.5 and params["average"] for params in tried)
    assert {int(params["tsp_layer"]) for params in tried} == {3}
    assert [int(params["window"]) for params in tried] == [64, *[8] * 5]


def test_what_does_not_take_small_numbers_is_tried_as_it_is():
    text = "params: {window: {default: 40, min: 40}}\nrequire: [layers == 10]\n"
    text += "score: sum[head, query](attn(recent(window)))\nbudget: window + 1\n"
    text += "keep: recent(window) then top(score)\n"
    tried = list(cases(policy(text, ModelShape(10, 8, 4, 16))))
    assert {(case.bound.shape.layers, case.bound.params["window"]) for case in tried} == {(10, 40)}
    assert max(case.tokens for case in tried) == 125
    trial(policy(text, ModelShape(10, 8, 4, 16)))


# Faults.


def test_an_operation_that_raises(monkeypatch):
    def softmax(*args, **kwargs):
        raise RuntimeError("no such kernel\nmore of it")

    monkeypatch.setattr(torch, "softmax", softmax)
    message = refusal(policy("snapkv"))
    head, _, line, caret, _ = message.splitlines()
    assert head.startswith("policies/snapkv.yaml:")
    assert head.endswith(
        "error[trial]: `snapkv` makes the torch program fail on a trial prompt of 2 tokens "
        "(6 layers, 4 heads, 2 KV heads): RuntimeError: no such kernel"
    )
    at = line.index("attn(recent(window))")
    assert caret.index("^") == at
    assert caret.count("^") == len("attn(recent(window))")


def test_the_interpreter_raises(monkeypatch):
    def exp(x):
        raise FloatingPointError

    monkeypatch.setattr(np, "exp", exp)
    message = refusal(policy("snapkv"))
    assert "`snapkv` makes the interpreter fail on a trial prompt of 2 tokens" in message
    assert message.splitlines()[0].endswith("KV heads): FloatingPointError")


def test_the_bound_on_entries_raises(monkeypatch):
    def size(self, node):
        raise KeyError("a node")

    monkeypatch.setattr("kvpolicy.dsl.bind.bounds.Bounds.size", size)
    message = refusal(policy("snapkv"))
    assert "`snapkv` makes the bound on its entries fail: KeyError: 'a node'" in message


def test_another_score(monkeypatch):
    right = torch.nn.functional.max_pool1d
    monkeypatch.setattr(
        torch.nn.functional, "max_pool1d", lambda x, *args: right(x, *args).roll(1, -1)
    )
    message = refusal(policy("snapkv"))
    assert "`snapkv` is not the same in the interpreter and in the torch program" in message
    assert "KV heads): `score`, layer 0, KV head 0, position " in message
    assert "score: sum[group](" in message.splitlines()[2]


def test_another_budget(monkeypatch):
    right = TORCH_FORMS["count"]

    def wrong(node, frame, *args):
        x = right(node, frame, *args)
        return replace(x, data=x.data + 1)

    monkeypatch.setitem(TORCH_FORMS, "count", wrong)
    message = refusal(policy("adakv"))
    assert "KV heads): `budget`, layer 0, KV head 1: 10 and 11" in message
    assert message.splitlines()[2].strip().endswith("floor(alpha * inner))")


def test_other_ties(monkeypatch):
    """Planted: of equal scores the last instead of the first; the prompts repeat tokens."""
    right = torch.Tensor.cumsum

    def cumsum(x, dim):
        return right(x.flip(dim), dim).flip(dim) if x.dtype == torch.bool else right(x, dim)

    monkeypatch.setattr(torch.Tensor, "cumsum", cumsum)
    # Nothing is pooled, and all votes of the window are as different as its queries.
    message = refusal(policy("lava", kernel="1"))
    assert "KV heads): `keep`, layer " in message


def test_other_tokens_go_deeper(monkeypatch):
    right = TORCH_FORMS["fill"]

    def wrong(node, frame, *args):
        x = right(node, frame, *args)
        return replace(x, data=x.data.roll(-1, -1)) if x.axes == ("token",) else x

    monkeypatch.setitem(TORCH_FORMS, "fill", wrong)
    message = refusal(policy("fastkv"))
    assert "KV heads): `propagate`, " in message
    assert "go deeper, and" in message
    assert "  tokens: recent(window)" in message.splitlines()[2]


@pytest.mark.parametrize("name", ["h2o", "vatp"])
def test_several_decode_steps_at_once(name, monkeypatch):
    """Attention of four queries at once, which occurs in no prompt."""
    right = torch.softmax

    def softmax(x, dim):
        return right(x, dim).flip(-1) if x.shape[-2] == 4 else right(x, dim)

    monkeypatch.setattr(torch, "softmax", softmax)
    assert re.search(r"`keep` after decode step (4|8|12), layer ", refusal(policy(name)))


def test_another_merge(monkeypatch):
    text = "score: norm1[dim](value)\nbudget: 4\nkeep: recent(1) then top(score)\n"
    text += "merge: {into: nearest(key), weight: exp(-position)}\n"
    right = TORCH_FORMS["exp"]

    def wrong(node, frame, *args):
        x = right(node, frame, *args)
        return replace(x, data=x.data + 0.01)

    monkeypatch.setitem(TORCH_FORMS, "exp", wrong)
    message = refusal(policy(text))
    assert "KV heads): `merge`, layer 0, KV head 0, the key at " in message
    assert "nearest(key)" in message.splitlines()[2]


def test_another_shared_direction(monkeypatch):
    right = TORCH_FORMS["acos"]

    def wrong(node, frame, *args):
        x = right(node, frame, *args)
        return replace(x, data=x.data * 1.01)

    monkeypatch.setitem(TORCH_FORMS, "acos", wrong)
    message = refusal(policy("minicache"))
    assert "KV heads): `merge`, layer 4, KV head 0, the key at 1 has " in message
    assert "direction: slerp" in message.splitlines()[2]


def test_more_is_kept_than_is_reserved(monkeypatch):
    monkeypatch.setattr(
        "kvpolicy.dsl.tools.trial.max_entries", lambda bound, prompt: 3 * bound.shape.layers
    )
    message = refusal(policy("sinks-recent"))
    assert "`sinks-recent` keeps 24 entries on a trial prompt of 2 tokens" in message
    assert "KV heads), but 18 are reserved for it" in message


def test_a_message_of_an_execution_stays_as_it_is():
    bound = policy("score: sum[channel](hidden_in)\nbudget: 3\nkeep: top(score)\n")
    with pytest.raises(PolicyError, match="`hidden_in`") as caught:
        trial(bound)
    assert "error[trial]" not in str(caught.value)


def test_a_refusal_is_always_the_same(monkeypatch):
    monkeypatch.setattr(torch, "softmax", lambda x, dim: x)
    assert refusal(policy("h2o")) == refusal(policy("h2o"))


def test_a_policy_made_without_a_file_is_named(monkeypatch):
    monkeypatch.setattr(torch, "softmax", lambda x, dim: x)
    bound = policy("snapkv")
    bound = replace(bound, program=replace(bound.program, file=None))
    assert refusal(bound).startswith("snapkv: error[trial]: `snapkv` is not the same")
