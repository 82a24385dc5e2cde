"""States that are one sum over the queries of several steps."""

from __future__ import annotations

import pytest
from kvpolicy.dsl.bind.bind import bind
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.execute.planned.steps import Steps
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.dsl.syntax.library import shipped
from kvpolicy.dsl.syntax.source import Source
from kvpolicy.kernels.table import REFERENCE
from stores import assert_alike
from test_follow import SHAPES, bound_to, stores

HEADER = "policy: a-test\nlanguage: 1\nabout: a test\n"
ONLY_ADDED = {
    "what h2o adds": "heat + sum[group, query](attn(new))",
    "the other way round": "sum[group, query](attn(new)) + heat",
    "squares": "heat + sum[query](mean[group](attn(new)) ^ 2)",
    "how many saw it": "heat + count[query](mean[group](attn(new)))",
    "how many saw enough": "heat + count[query, group](attn(new) > 0.1)",
    "logits": "heat + sum[query, group](logits(new))",
    "a fixed share": "heat + 0.5 * sum[group, query](attn(new)) - sum[group, query](attn(new)) / 4",
    "a number per layer": "heat + (1 + layer) * sum[group, query](attn(new))",
    "taken away": "heat - sum[query](max[group](attn(new)))",
    "a mean of sums": "heat + mean[kv](sum[group, query](attn(new)))",
    "conditions": "heat + sum[group, query](attn(new) where attn(new) > 0.1 and position > 1)",
    "other branches": "heat + sum[group, query](attn(new) where position % 2 == 1 else 0.25)",
    "what is not seen": "heat + count[group, query](not attn(new) > 0.1)",
    "distances": "heat + sum[group, query](attn(new) * distance(new))",
    "distances alone": "heat + sum[query](distance(new))",
    "vectors": "heat + sum[group, query](attn(new) * norm1[dim](value))",
    "beside its neighbours": "heat + sum[group, query](maxpool(attn(new), 3))",
    "by the whole row": "heat + sum[group, query](attn(new) * max[token](attn(new)))",
    "no tokens": "heat + sum[group, query, token](attn(new) where position > 3)",
    "of all rows": "heat + sum[group, query](mean[token](logits(new)) + 0 * attn(new))",
}  # fmt: skip
STEP_BY_STEP = {
    "decay": "0.9 * heat + sum[group, query](attn(new))",
    "extremes": "max(heat, sum[group, query](attn(new)))",
    "an extreme of queries": "heat + max[query](mean[group](attn(new)))",
    "the number of the step": "heat + generated * sum[group, query](attn(new))",
    "itself": "heat + sum[group, query](attn(new) * heat)",
    "one for all tokens": "heat + sum[query](distance(new)) + sum[head, query, token](attn(new))",
    "the newest token": "heat + sum[group, query](attn(new) where not new)",
    "how many there are": "heat + sum[group, query](attn(new)) * count[token](all)",
    "what may be infinite": "heat + sum[group, query](log(attn(new)))",
    "a quotient": "heat + sum[group, query](attn(new) / distance(new))",
    "a quotient by nothing": "heat + sum[group, query](attn(new)) / 0",
    "a rank": "heat + sum[group, query](rank(attn(new)))",
    "an older window": "heat + sum[group, query](attn(recent(2)))",
    "random numbers": "heat + sum[group, query](attn(new)) * uniform(3)",
    "whole parts": "heat + floor(2 * sum[group, query](attn(new)))",
    "a square of sums": "heat + sum[group, query](attn(new)) ^ 2",
    "the least of two": "heat + min(0.3, sum[group, query](attn(new)))",
    "a choice": "heat + (sum[group, query](attn(new)) where position > 3 else 1)",
    "a weight of its own": "heat + sum[group, query](attn(new)) * norm1[dim](value)",
}  # fmt: skip


def bound_of(state: str, shape, start: str = "0"):
    """A policy with a state in `decode:`, which may use whole rows of attention."""
    text = (
        f"{HEADER}score: norm1[dim](key)\nbudget: 8\nkeep: recent(2) then top(score)\n"
        f"decode:\n  state:\n    heat:\n      start: |\n        {start}\n"
        f"      next: |\n        {state}\n  score: heat + 0.01 * norm1[dim](key)\n"
    )
    return bind(load(Source("a-test.yaml", text)).require(), ModelShape(*shape))


def assert_followed(bound, shape, tokens: int = 13) -> None:
    one, other = stores(bound, shape, tokens, seed=tokens)
    for number, leaves in ((1, True), (5, True), (3, False), (16, True), (2, True)):
        one.step_by_step(number, leaves=leaves)
        other.follow(number, leaves=leaves)
        assert_alike(one, other)


@pytest.mark.thorough(every=4)
@pytest.mark.slow
@pytest.mark.parametrize("name", ONLY_ADDED)
def test_sums_over_the_queries(name):
    for shape in SHAPES[:3]:
        bound = bound_of(ONLY_ADDED[name], shape)
        assert Steps(bound, False, REFERENCE).at_once
        assert_followed(bound, shape)


@pytest.mark.thorough(every=6)
@pytest.mark.parametrize("name", STEP_BY_STEP)
def test_all_else_goes_step_by_step(name):
    bound = bound_of(STEP_BY_STEP[name], SHAPES[0])
    assert Steps(bound, False, REFERENCE).advances
    assert not Steps(bound, False, REFERENCE).at_once
    assert_followed(bound, SHAPES[0])


@pytest.mark.parametrize(
    ("start", "at_once"),
    [("3", True), ("norm1[dim](value)", True), ("position % 5", True), ("generated", False),
     ("sum[group, query](attn(new))", False), ("count[token](all) + 0 * position", False)],
)  # fmt: skip
def test_where_states_begin(start, at_once):
    """A start value that differs by step is that of the step at which the token came."""
    bound = bound_of(ONLY_ADDED["what h2o adds"], SHAPES[0], start)
    assert Steps(bound, False, REFERENCE).at_once == at_once
    assert_followed(bound, SHAPES[0])


def test_all_shipped_states_are_sums():
    for name in shipped():
        bound = bound_to(name, SHAPES[0])
        if bound is not None:
            steps = Steps(bound, False, REFERENCE)
            assert steps.at_once or not steps.advances, name
