"""The bound `max_entries`, known before any tensor, holds and is tight."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from agreement import SHAPE, agree, written
from grammar import policy
from kvpolicy.dsl.bind.bind import bind
from kvpolicy.dsl.bind.bounds import Bounds, max_entries
from kvpolicy.dsl.bind.kept import keep_of
from kvpolicy.dsl.bind.lengths import lengths
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.interpret.interpreter import interpret
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.dsl.syntax.diagnostics import PolicyError
from kvpolicy.dsl.syntax.source import Source
from kvpolicy.dsl.tools.trial_cases import sampled
from recordings import tensors

SHAPES = [(3, 4, 2, 2), (2, 6, 3, 2), (4, 4, 4, 2), (1, 4, 1, 2)]
SCORE = "score: norm2[dim](value)\n"
FIRST = "recent(2) then top(score)"
UNSEEN = (
    "min(1, count[token](max[kv](score) > 99))"  # 0, or 1 as far as is known before the prefill
)
# Who competes, by what is counted, and the axes of the score.
SCORES = {
    "[token]": "max[kv](score)",
    "[kv, token]": "score",
    "[kv, group, token]": "sum[query](attn(recent(2)))",
}
TOPS = ("token", "kv", "kv, token", "token, kv", "layer, kv", "layer, token", "layer, kv, token")
COUNTED = ("token", "kv, token", "group, token", "kv", "head, token")
KEEPS = ("top(score)", FIRST, "top[kv, token](score)", "recent(9) then top[kv, token](score)")


def kept(bound, tokens: int, seed: int, ties: bool = False) -> int:
    shape = bound.shape
    sizes = (shape.layers, shape.heads, shape.kv_heads, shape.head_dim)
    prompt = tensors(np.random.default_rng(seed), sizes, tokens, 0, ties)[:3]
    return sum(int(layer.sum()) for layer in interpret(bound, *prompt).kept)


@pytest.mark.parametrize("whole", ["floor(%s)", "%s // 1", "ceil(%s - 1)", "round(%s - 0.5)"])
def test_numbers_that_miss_a_whole_one_by_rounding(whole):
    """exp(log(8)) is 7.999999999999998: a budget of 8, decided by the host or by data."""
    number = "(exp(log(8)) + 0 * max[kv, token, dim](key))"
    for text in (number, "exp(log(8))"):
        bound = written(f"{SCORE}budget: {whole % text}\nkeep: top(score)\n", SHAPES[0])
        assert kept(bound, 12, 0) == max_entries(bound, 12)


@pytest.mark.thorough(besides=["3"])
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_random_policies(seed):
    """With states, propagation, merges, and tops over any axes in budgets and selections."""
    random, compared = Random(seed), 0
    while compared < 60:
        shape = random.choice(SHAPES)
        text = _with_winners(random) if random.random() < 0.7 else policy(random)
        try:
            size = ModelShape(*shape)
            bound = bind(sampled(load(Source("random.yaml", text)).require(), size), size)
        except PolicyError:
            continue
        tokens = random.choice((1, 2, 5, 12, 13))
        number = kept(bound, tokens, compared, ties=compared % 3 == 0)
        assert number <= max_entries(bound, tokens), text
        compared += 1


def _with_winners(random: Random) -> str:
    """A policy whose budget counts winners of `top` among heads, tokens or layers."""
    axes = random.choice(list(SCORES))
    number = random.choice(("1", "2", "3", "1 + layer * 2", "count[token](score > 1)"))
    number = number.replace("layer * 2", "2 * count[token](recent(1))")
    wins = f"count[{random.choice(COUNTED)}](top[{random.choice(TOPS)}]({SCORES[axes]}, {number}))"
    budget = random.choice(("4 + {}", "2 * {}", "max(3, {})", "9 - {}", "min(6, {})", "{} / 2"))
    keep = random.choice((*KEEPS, f"top[{random.choice(TOPS)}](score, 2) or recent(1)", FIRST))
    if random.random() < 0.3:
        keep = f"{keep} where layer < 1 else {random.choice(KEEPS)}"
    header = "policy: random\nlanguage: 1\nabout: random\n"
    return f"{header}{SCORE}budget: {budget.format(wins)}\nkeep: {keep}\n"


@pytest.mark.parametrize(
    ("rules", "most"),
    [
        # Every token is won by one of 4 heads: 4 * 4 + 12 of 12 tokens, in each of 4 layers.
        ("budget: 4 + count[token](top[kv](score, 1))\nkeep: top(score)\n", 4 * (16 + 12)),
        ("budget: count[token](top[kv](score, 2))\nkeep: top(score)\n", 4 * 24),
        ("budget: 4 + max[token](count[kv](top[kv](score, 3)))\nkeep: top(score)\n", 4 * 4 * 7),
        ("budget: 1 + count[kv, token](top(score, 2))\nkeep: top(score)\n", 4 * 4 * 9),
        ("budget: 1 + count[token](top[layer, kv](score, 1))\nkeep: top(score)\n", 16 + 12),
        ("budget: 1 + count[token](top[layer](score, 1))\nkeep: top(score)\n", 16 + 4 * 12),
        ("keep: top[kv](score, 1)\n", 4 * 12),
        ("keep: top[kv](score, 9)\n", 4 * 4 * 12),
        ("keep: top[layer, kv](score, 2)\n", 2 * 12),
        ("keep: top[layer](score, 3)\n", 3 * 4 * 12),
        # One layer may take what both have room for.
        (
            "budget: 6\nkeep: recent(2) then top[layer, kv, token](score) where layer > 0 "
            "else recent(5)\n",
            4 * 5 + 4 * 4 * 6,
        ),
        ("budget: 6\nkeep: top[layer, token](score)\n", 4 * 4 * 6),
        ("budget: 2 where prompt > 99 else 6\nkeep: top(score)\n", 4 * 4 * 6),
        ("budget: sum[token](1 where score >= 0 else 0)\nkeep: top(score)\n", 4 * 4 * 12),
        ("budget: 1 + max[token](min(score, 3) where score > 1)\nkeep: top(score)\n", 4 * 4 * 4),
        # The most of nothing is -inf, and what it is subtracted from then has no bound.
        ("budget: 5 - max[token](score where score > 99)\nkeep: top(score)\n", 4 * 4 * 12),
        # A budget below 0 takes nothing away from what others have.
        (f"budget: 8 - 5 * layer - {UNSEEN}\nkeep: {FIRST}\n", 4 * (8 + 3 + 2 + 2)),
        # The winners of the smaller numbers are among those of the largest one.
        ("keep: top[layer, token](score, 1 + 4 * layer)\n", 4 * 13),
        # Tokens, or heads, that choose by themselves.
        ("keep: sinks(1) where sinks(1) else recent(2)\n", 4 * 4 * 3),
        ("keep: sinks(1) where max[kv](score) > 0 else top[kv](score, 1)\n", 4 * (4 + 12)),
        ("keep: sinks(3) where sum[token](score) > 9 else recent(2)\n", 4 * 4 * 3),
    ],
)
def test_contests_without_tokens(rules, most):
    """The bound is the most that the rules can keep."""
    bound = written(SCORE + rules, (4, 4, 4, 8))
    assert max_entries(bound, 12) == most
    for seed in range(6):
        assert kept(bound, 12, seed, ties=seed % 2 == 1) <= max_entries(bound, 12)


@pytest.mark.parametrize(
    ("other", "number"),
    [
        ("sum[layer](second)", 48),
        ("max[layer](second)", 48),
        ("4 * mean[layer](second)", 48),
        ("max[past](past(second, 3))", 38),
        ("max[past](past(at(1, second), 1))", 36),
    ],
)
def test_what_looks_at_other_layers_is_bounded_by_them(other, number):
    """No score exceeds 99, though this is unknown before the prefill."""
    second = f"(5 + {UNSEEN}) where layer == 1 else 0"
    text = f"{SCORE}let: {{second: '{second}'}}\nbudget: '1 + {other}'\nkeep: top(score)\n"
    bound = written(text, (4, 4, 2, 8))
    assert kept(bound, 12, 0) == number <= max_entries(bound, 12)


@pytest.mark.parametrize(
    "budget",
    [
        # Each mask leaves some of 9 tokens, both together leave none.
        "min[kv, token]((clamp(norm2[dim](key), 1, 3) where not sinks(6)) where not recent(6))",
        # A window without a query.
        "4 * min[kv, group, query, token](attn(recent(prompt - 9)))",
        "3 - 2 * max[kv, group, query, token](attn(recent(prompt - 9)))",
        # Every token is the best of two heads' for some head.
        "-max[kv, token](clamp(norm2[dim](key), 0, 3) where not top[kv](norm2[dim](key), 2))",
        # The layer below the first one.
        "-max[kv, token](at(layer - 1, clamp(norm2[dim](key), 0, 3) where not recent(2)))",
        "1 - min[past](max[kv, token](past(clamp(norm2[dim](key), 0, 3) where not recent(2), 2)))",
        # The condition holds for one head, or at one layer; for the others nothing is left.
        "mean[kv](max[kv](min[group](max[token, query](attn(recent(1))) where {heads}))"
        " where {heads})",
        "mean[layer](max[layer](min[kv](clamp(mean[token](score), 0, 3) where {layers}))"
        " where {layers})",
        "mean[kv, token](maxpool(min[group](max[query](attn(recent(1))) where {tokens}), 3)"
        " where {tokens})",
    ],
)
def test_budgets_of_what_may_have_no_value(budget):
    """Minimum and maximum of nothing are infinite, and so are budgets that use them."""
    budget = budget.format(
        heads="rank[kv](max[token](score)) < 2",
        layers="rank[layer](max[kv, token](score)) < 2",
        tokens="position == 4",
    )
    bound = written(f"score: norm2[dim](value)\nbudget: {budget}\nkeep: top(score)\n")
    assert kept(bound, 9, 0) <= max_entries(bound, 9)


@pytest.mark.parametrize(
    "counted",
    [
        "top(score, {})",
        "top[kv, token](score, {})",
        "top[layer, token](score, {})",
        "top[kv](score, {})",
    ],
)
@pytest.mark.parametrize("count", ["layer * 3", "4 - layer * 2"])
def test_winners_are_counted_by_the_numbers_of_all_layers(counted, count):
    budget = f"1 * max[token](count[layer]({counted.format(count)}))"
    bound = written(f"{SCORE}budget: {budget}\nkeep: top(score)\n")
    agree(bound, *tensors(np.random.default_rng(0), SHAPE, 9, 0))


@pytest.mark.parametrize(
    "score",
    [
        "at(layer - 1, norm2[dim](value))",
        "at(layer + 1, position)",
        "at(0, norm2[dim](key)) where layer > 0 else at(layers, norm2[dim](value))",
    ],
)
def test_scores_of_layers_that_there_are_not(score):
    """The bound cannot foresee that a budget is filled with entries without scores."""
    bound = written(f"score: {score}\nbudget: 4\nkeep: recent(1) then top(score)\n")
    agree(bound, *tensors(np.random.default_rng(0), SHAPE, 9, 2))
    assert not Bounds(bound, 9).is_exact(keep_of(bound.lowered.prefill))


@pytest.mark.parametrize(
    ("keep", "number"),
    [
        ("not sinks(4)", 30),
        ("not (sinks(2) then recent(3))", 24),
        ("not top(norm2[dim](key), 4 where layer < 1 else 3)", 34),
        ("not not recent(3)", 18),
        ("not recent(20)", 0),
        ("not (sinks(2) or not recent(3))", None),  # some entries may be in both
        ("not (sinks(2) or top(norm2[dim](key), 3))", None),
        ("not top[kv, token](norm2[dim](key), 5)", None),  # of 2 heads of 3 layers
        ("not top(norm2[dim](key) where position < 2, 3)", None),
    ],
)
def test_all_but_a_known_number(keep, number):
    bound = written(f"keep: {keep}\n")
    most = max_entries(bound, 9)
    assert Bounds(bound, 9).is_exact(keep_of(bound.lowered.prefill)) == (number is not None)
    assert kept(bound, 9, 1) <= most == (54 if number is None else number)
    assert number in (None, kept(bound, 9, 1))


def test_tokens_of_layers_that_there_are_not():
    """Where none is chosen all go deeper; what is never left out is not counted."""
    propagate = "propagate:\n  first: layer == 1\n  budget: 3\n  tokens: "
    values = "max[kv](norm2[dim](value))"
    below = written(f"{propagate}recent(n) then top(at(layer - 2, {values}))\nparams: {{n: 0}}\n")
    assert lengths(below, 9) == [(9, 9), (9, 9), (1, 9)]
    assert kept(below, 9, 1) == max_entries(below, 9) == 54
    best = written(f"{propagate}top({values})\n")
    assert lengths(best, 9) == [(9, 9), (9, 9), (3, 3)]
    assert kept(best, 9, 1) == max_entries(best, 9) == 42


def test_tokens_that_choose_by_themselves_between_two_sets():
    text = "propagate:\n  first: layer == 1\n  tokens: recent(3) where position > 3 else sinks(2)\n"
    for tokens, deeper in ((4, 2), (6, 4), (9, 5)):
        bound = written(f"{text}keep: all\n")
        least, most = lengths(bound, tokens)[2]
        result = agree(bound, *tensors(np.random.default_rng(0), SHAPE, tokens, 2))
        assert least <= len(result.propagated) == deeper <= most


@pytest.mark.parametrize(
    ("tokens", "reach"),
    [
        ("all", (9, 9)),
        ("recent(3) where layer == 1 else all", (3, 3)),
        ("recent(3) where layer == 0 else all", (9, 9)),
        ("recent(3) where prompt > 9 else sinks(5)", (5, 5)),
        ("recent(3) where max[kv, token, dim](key) > 0 else sinks(5)", (3, 5)),
        ("recent(3) or top(max[kv](norm2[dim](value)), 4)", (4, 7)),  # which may be the same
        ("not recent(3)", (1, 9)),
        ("recent(3) where max[kv, token, dim](key) > 0 else false", (1, 9)),  # of none all go on
    ],
)
def test_tokens_that_depend_on_the_layer_or_on_data(tokens, reach):
    bound = written(f"propagate: {{first: layer == 1, tokens: '{tokens}'}}\nkeep: all\n")
    assert lengths(bound, 9) == [(9, 9), (9, 9), reach]
    assert kept(bound, 9, 1) <= max_entries(bound, 9) == (9 + 9 + reach[1]) * 2


def test_tokens_leave_once_by_a_rule_of_the_first_layer():
    tokens = "top(max[kv](norm2[dim](value)), floor(length / 2))"
    text = f"propagate: {{first: layer >= 1, tokens: '{tokens}'}}\nkeep: all\n"
    bound = written(text, (4, 4, 2, 4))
    assert lengths(bound, 9) == [(9, 9), (9, 9), (4, 4), (4, 4)]
    assert kept(bound, 9, 1) == max_entries(bound, 9) == 52


def test_what_one_of_several_layers_wins_is_not_known():
    bound = written("keep: top[layer, token](norm2[dim](key), 5) where layer < 1 else recent(2)\n")
    assert not Bounds(bound, 9).is_exact(keep_of(bound.lowered.prefill))
    assert kept(bound, 9, 1) < max_entries(bound, 9)


def test_a_count_is_exact_where_every_score_is_there():
    for score, exact in (
        ("norm2[dim](value)", True),
        ("mean[query, group](attn(recent(4)))", True),
        ("norm2[dim](value) where position < 2", False),
    ):
        for keep in ("recent(1) then top(score)", "top(score, 3)", "recent(1) then top(score, 3)"):
            budget = "" if ", 3" in keep else "budget: 4\n"
            bound = written(f"score: {score}\n{budget}keep: {keep}\n")
            assert Bounds(bound, 9).is_exact(keep_of(bound.lowered.prefill)) == exact, keep


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("budget", "most"),
    [
        ("floor(6 * normalize[kv](max[token, dim](abs(key))))", lambda kv: 6),
        ("2 + floor(6 * normalize[kv](mean[token](score)))", lambda kv: 2 * kv + 6),
        ("1 + index[kv](score)", lambda kv: kv * kv),  # of 1 to kv each
    ],
)
def test_what_adds_up_over_heads_or_counts_them(shape, budget, most):
    bound = written(f"{SCORE}budget: {budget}\nkeep: top(score)\n", shape)
    assert max_entries(bound, 40) == shape[0] * most(shape[2])
    for seed in range(6):
        assert kept(bound, 40, seed, ties=seed % 2 == 0) <= max_entries(bound, 40)
