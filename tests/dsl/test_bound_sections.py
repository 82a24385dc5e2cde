"""Binding of decode rules, states, propagation and sharing, as executions and servers use them."""

from __future__ import annotations

import numpy as np
import pytest
from kvpolicy.dsl.bind.bind import bind
from kvpolicy.dsl.bind.bounds import max_entries
from kvpolicy.dsl.bind.kept import keep_of
from kvpolicy.dsl.bind.lengths import lengths
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.interpret.interpreter import interpret
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.dsl.syntax.diagnostics import PolicyError
from kvpolicy.dsl.syntax.source import Source

SHAPE = ModelShape(layers=4, heads=4, kv_heads=2, head_dim=4)
HEAT = "state: {heat: 'heat + sum[group, query](attn(new))'}\n"


def bound(text: str, interval: int = 1, shape: ModelShape = SHAPE, **settings: str):
    header = "policy: a-test\nlanguage: 1\nabout: a test\n"
    program = load(Source("a-test.yaml", header + text)).require()
    return bind(program, shape, settings, fold_interval=interval)


def test_a_bound_prefill_keeps_everything_where_the_policy_says_nothing():
    text = "propagate: {first: layer == 1, tokens: recent(2)}\n"
    policy = bound(text)
    assert policy.program.prefill.keep is None
    assert keep_of(policy.folded.prefill).op == keep_of(policy.lowered.prefill).op == "all"
    with pytest.raises(ValueError, match="not bound"):
        keep_of(policy.program.prefill)


def test_steps_at_which_entries_leave():
    always = bound("keep: recent(4)\ndecode: same\n", interval=3)
    assert [always.leaves_at(t, 10) for t in range(1, 8)] == [False, False, True] * 2 + [False]
    when = bound("keep: recent(4)\ndecode: {when: generated * 2 > prompt}\n", interval=3)
    assert [when.leaves_at(t, 5) for t in (1, 2, 3)] == [False, False, True]
    assert not bound("keep: recent(4)\n").leaves_at(1, 10)


@pytest.mark.parametrize(
    "text", ["keep: recent(4)\n", "keep: all\ndecode: same\n", "decode: same\n"]
)
def test_nothing_leaves(text):
    if "keep" not in text:
        text += "propagate: {first: layer == 1, tokens: recent(2)}\n"
    assert bound(text).folded.decode is None
    assert bound(text).step_queries(10) == 0


def test_intervals_below_one_are_refused():
    with pytest.raises(PolicyError, match="a fold interval is at least 1, not 0"):
        bound("keep: recent(4)\ndecode: same\n", interval=0)


def test_the_digest_names_the_interval_only_where_it_decides():
    for text, differs in (
        ("keep: recent(4)\ndecode: same\n", True),
        ("keep: recent(4)\ndecode: {when: generated == 1}\n", False),
        ("keep: recent(4)\n", False),
    ):
        assert (bound(text).digest != bound(text, 2).digest) == differs
    merged = "keep: recent(4)\nmerge: {into: next(1), weight: 2}\n"
    assert bound(merged).digest != bound(merged.replace("2}", "3}")).digest
    state = HEAT + "keep: top(heat, 4)\n"
    assert bound(state).digest != bound(state.replace("sum[group", "max[group")).digest


@pytest.mark.parametrize(
    ("text", "queries", "step"),
    [
        (HEAT + "keep: top(heat, 4)\n", 50, 0),
        (HEAT + "keep: top(heat, 4)\ndecode: same\n", 50, 1),
        (HEAT + "keep: recent(4)\ndecode: {keep: 'top(heat, 4)'}\n", 50, 1),
        (HEAT + "keep: recent(4)\ndecode: same\n", 0, 0),
        ("decode:\n  " + HEAT + "  keep: top(heat, 4)\n", 0, 1),
        ("score: sum[head, query](attn(recent(3)))\nkeep: top(score, 4)\ndecode: same\n", 3, 3),
        ("keep: recent(4)\ndecode: {keep: 'top(sum[head, query](attn(recent(3))), 4)'}\n", 2, 3),
        (
            "propagate: {first: layer == 1, tokens: 'top(sum[head, query](attn(recent(5))), 4)'}\n",
            5,
            0,
        ),
        (
            "keep: recent(4)\nmerge: {into: next(1), weight: 'sum[group, query](attn(all))'}\n",
            50,
            0,
        ),
    ],
)
def test_queries_that_are_read(text, queries, step):
    assert bound(text).queries(50) == queries
    assert bound(text).step_queries(50) == step


def test_states_that_nothing_reads_are_dropped():
    unread = bound(HEAT + "keep: recent(4)\ndecode: same\n")
    assert not unread.folded.prefill.states
    assert not unread.folded.decode.states
    chain = bound(
        "state:\n  a: a + sum[group, query](attn(new))\n  b: b + a\n  c: c + b\n"
        "keep: top(b, 4)\ndecode: same\n"
    )
    assert set(chain.folded.prefill.states) == {"a", "b"} == set(chain.folded.decode.states)
    assert all(state.next and state.inherited for state in chain.folded.decode.states.values())


@pytest.mark.parametrize(
    ("first", "layer"),
    [("layer == 2", 2), ("layer * 10 > prompt", 3), ("layer > 7", 4), ("prompt < 5", 4)],
)
def test_layers_known_beforehand(first, layer):
    text = f"propagate: {{first: {first}, tokens: recent(2)}}\n"
    assert bound(text).propagation_layer(20) == layer


def test_layers_that_data_decide():
    text = "propagate: {first: 'max[kv, token, dim](key) > 1', tokens: recent(2)}\n"
    assert bound(text).propagation_layer(20) is None
    assert bound(text.replace("first", "every")).propagation_layer(20) is None
    assert not bound(text.replace("'max[kv, token, dim](key) > 1'", "1 > 2")).propagates


CHOICES = {
    "recent(6)": (6, 6),
    "recent(6) then sinks(2)": (8, 8),
    "recent(6) then top(sum[head, query](attn(recent(2))), 3)": (9, 9),
    "recent(2) then top(sum[head, query](attn(recent(2)) where not recent(2)), 4)": (6, 6),
    "recent(2) then top(sum[kv, dim](key) where not recent(2), 4)": (6, 6),
    "top(sum[kv, dim](key) where not recent(2), 4)": (1, 20),
    "recent(3) or position < 5": (3, 20),
    "sum[kv, dim](key) > 0": (1, 20),
}


@pytest.mark.parametrize("tokens", CHOICES)
@pytest.mark.parametrize(
    ("moment", "sure"),
    [("first: layer == 1", True), ("first: 'sum[kv, token, dim](key) > 0'", False)],
)
def test_lengths(tokens, moment, sure):
    policy = bound(f"propagate:\n  {moment}\n  tokens: {tokens}\n")
    low, high = CHOICES[tokens]
    assert lengths(policy, 20)[-1] == ((low, high) if sure else (low, 20))
    rng = np.random.default_rng(0)
    for _ in range(5):
        q = rng.standard_normal((4, 4, 20, 4))
        result = interpret(policy, q, q[:, :2], q[:, :2])
        for (least, most), kept in zip(lengths(policy, 20), result.kept, strict=True):
            assert least <= kept[0].sum() <= most
        assert sum(int(layer.sum()) for layer in result.kept) <= max_entries(policy, 20)


def test_what_parameters_decide_of_a_condition_is_used():
    text = (
        "propagate:\n  first: prompt > 10 and ('heavy' or layer == 3)\n  tokens: recent(5)\n"
        "  restart: true\n"
    ).replace("'heavy'", "max[kv, token, dim](key) > 1")
    assert lengths(bound(text), 10) == [(10, 10)] * 4
    assert lengths(bound(text), 20) == [(5, 5)] * 4


def test_budgets_that_follow_the_length():
    policy = bound(
        "propagate: {first: layer == 1, tokens: recent(10)}\n"
        "score: sum[dim](key)\nbudget: length / 2\nkeep: top(score)\n"
    )
    assert max_entries(policy, 40) == 2 * (20 + 20 + 5 + 5)
    assert max_entries(policy, 6) == 2 * 4 * 3
    restarts = bound(
        "propagate: {first: layer == 1, tokens: recent(10), restart: true}\n"
        "score: sum[dim](key)\nbudget: length / 2\nkeep: top(score)\n"
    )
    assert max_entries(restarts, 40) == 2 * 4 * 5


def test_clamped_shares_are_bounded_by_their_sum():
    policy = bound(
        HEAT + "score: heat\nbudget: |\n"
        "  prompt * min(max(layers * 0.2 * softmax[layer](sum[kv, token](heat)), 0.01), 1)\n"
        "keep: recent(0.25 * budget) then top(score)\n"
    )
    # A fifth and the least of each layer; the recent ones are not proven to be within the budget.
    assert max_entries(policy, 1000) <= 1.25 * 8 * 1000 * 0.21 + 8
    assert max_entries(policy, 1000) >= 8 * 200


@pytest.mark.parametrize("when", ["layer > 1", "layer == 0"])
def test_layers_share_with_one_other(when):
    with pytest.raises(PolicyError, match=r"`share\.when` holds at layer"):
        bound(f"share: {{when: {when}, direction: own}}\n")


def test_a_name_means_one_thing_in_all_sections():
    text = (
        "policy: p\nlanguage: 1\nkeep: recent(4)\nmerge: {into: next(1), state: {a: a + 1}, "
        "weight: a}\ndecode: {state: {a: a + 2}, keep: 'recent(a)'}\n"
    )
    problems = load(Source("p.yaml", text)).diagnostics
    assert "`a` is already a state (line 5)" in [problem.message for problem in problems]
