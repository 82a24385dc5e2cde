"""Lists cut to the same size at every fold are found before anything is computed."""

from __future__ import annotations

import numpy as np
import pytest
from kvpolicy.dsl.bind.bind import bind
from kvpolicy.dsl.bind.entries import entries_taken
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.execute.planned.steps import Steps
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.dsl.syntax.library import shipped
from kvpolicy.dsl.syntax.source import Source
from kvpolicy.kernels.table import REFERENCE
from recordings import tensors
from stores import Store

SHAPE = (3, 4, 2, 8)
SETTINGS = {
    "capacity": "9",
    "window": "4",
    "heavy": "5",
    "rate": "0.4",
    "start": "1",
    "newest": "2",
}
FIXED = {"h2o": 3, "tova": 0, "keydiff": 2, "cake": 4, "vatp": 7}
HEAT = "state:\n  heat: heat + sum[group, query](attn(new))\n"


def bound_to(source, **more):
    program = load(source).require()
    given = {key: x for key, x in {**SETTINGS, **more}.items() if key in program.params}
    return bind(program, ModelShape(*SHAPE), given)


def written(rules: str, before: str = ""):
    header = "policy: written\nlanguage: 1\nabout: made for a test\n"
    return Source("written.yaml", f"{header}{before}{rules}\n")


def indented(lines: str) -> str:
    return "".join(f"  {line}\n" for line in lines.splitlines())


def taken(bound, prompt=16):
    rules = bound.lowered.decode
    found = {entries_taken(bound, rules, prompt, i) for i in range(bound.shape.layers)}
    assert len(found) == 1
    return found.pop()


@pytest.mark.parametrize("name", [n for n in shipped() if bound_to(n).folded.decode is not None])
def test_shipped_policies(name):
    assert taken(bound_to(name)) == FIXED.get(name)


@pytest.mark.parametrize(
    ("rules", "number"),
    [
        ("score: heat\nbudget: 9\nkeep: recent(3) then top(score)", 3),
        ("score: heat\nbudget: 9\nkeep: sinks(2) then recent(3) then top(score)", 5),
        ("score: heat\nbudget: floor(prompt / 2)\nkeep: top(score)", 0),
        ("score: heat\nbudget: 9\nkeep: all where prompt < 9 else recent(3) then top(score)", 3),
        # Infinite is a score, too.
        ("score: 1 / heat\nbudget: 9\nkeep: recent(3) then top(score)", 3),
        # Numbers that differ from step to step, or that data decide.
        ("score: heat\nbudget: 4 + floor(cached / 2)\nkeep: recent(3) then top(score)", None),
        ("score: heat\nbudget: 4 + generated\nkeep: recent(3) then top(score)", None),
        ("score: heat\nbudget: 9\nkeep: heat > 0.1 then top(score)", None),
        # Entries without a score are never chosen.
        ("score: heat where heat > 0.1\nbudget: 9\nkeep: recent(3) then top(score)", None),
        # Heads that compete, and sets that are not filled up to a budget.
        ("score: heat\nkeep: top[kv, token](score, 12)", None),
        ("keep: sinks(2) then recent(6)", None),
    ],
)
def test_rules(rules, number):
    bound = bound_to(written(f"keep: all\ndecode:\n{indented(HEAT + rules)}"))
    assert taken(bound) == number


def test_a_list_without_more_than_is_always_taken_may_still_grow():
    steps = Steps(bound_to("h2o"), False, REFERENCE)  # takes 3 before it fills up
    assert steps.keeps_size(16, [[4, 4], [5, 4], [4, 9]])
    assert not steps.keeps_size(16, [[4, 4], [3, 4], [4, 9]])


def claims(bound, seed: int) -> int:
    """Takes a request through folds; number of folds whose list sizes were known, all rightly."""
    *prompt, later = tensors(np.random.default_rng(seed), SHAPE, 14, 40)
    store, right, expected = Store(bound, prompt, later), 0, None
    for number in (2, 3, 1, 5, 4):
        if not store.follow(number):
            continue
        numbers = store.memory.read_numbers()
        if expected is not None and numbers.finite:
            assert numbers.counts_after.tolist() == expected
            right += 1
        counts = numbers.counts_after.tolist()
        full = bool((numbers.counts_before > numbers.counts_after).all())
        expected = counts if full and store.memory.keeps_size(counts) else None
    return right


@pytest.mark.parametrize("name", FIXED)
def test_sizes_of_shipped_policies_are_fixed(name):
    bound = bound_to(name, rate="0.6") if name == "cake" else bound_to(name)
    assert sum(claims(bound, seed) for seed in range(3)) >= 6


def test_numbers_of_heads_that_hold_different_entries_last():
    prefill = "score: max[group](mean[query](attn(recent(3))))\n"
    prefill += "keep: recent(3) then top[kv, token](score, 12)\n"
    rules = HEAT + "score: heat\nbudget: 7\nkeep: recent(2) then top(score)"
    decode = "decode:\n" + indented(rules)
    bound = bound_to(written(prefill + decode))
    assert sum(claims(bound, seed) for seed in range(4)) >= 8


@pytest.mark.parametrize(
    "score",
    [
        "heat",
        "avgpool(heat, 3) - heat",
        "heat * norm1[dim](value)",
        "mean[group, query](attn(recent(2)))",
        "maxpool(heat where not recent(3), 5)",
    ],
)
def test_numbers_of_scores_last(score):
    rules = HEAT + f"score: {score}\nbudget: 8\nkeep: recent(3) then top(score)"
    bound = bound_to(written(f"keep: all\ndecode:\n{indented(rules)}"))
    assert taken(bound) == 3
    assert sum(claims(bound, seed) for seed in range(2)) == 8
