"""Policies on which the executions differed, or one of them failed, when they were found."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from agreement import SHAPE, assert_agreement, written
from kvpolicy.dsl.interpret import interpret
from recordings import tensors

HEAT = "state: {heat: 'heat + sum[group, query](attn(new))'}\n"
SCORE = "score: norm1[dim](key)\n"
FILL = "budget: 6\nkeep: recent(2) then top(score)\n"
AWAY = (
    "propagate:\n  first: layer == 1\n"
    "  tokens: recent(2) then top(sum[head, query](attn(recent(2))), 9)\n"
)
DECODE = "decode:\n  score: norm1[dim](value)\n  keep: recent(2) then top(score)\n"
# What makes a prefill go layer by layer, without a plan.
BESIDE = {
    "merge": SCORE + "merge: {into: nearest(key)}\n",
    "state": HEAT + "score: heat\n",
    "propagate": SCORE + AWAY,
    "restart": SCORE + AWAY + "  restart: true\n",
    "maps": "score: sum[group, query](attn(all))\n",
    "all": HEAT + "score: heat\nmerge: {into: nearest(key)}\n" + AWAY,
}


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors are tiny: more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("decode", ["", DECODE], ids=["prefill", "decode"])
@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize(
    "keep",
    [
        "recent(2) then top[layer, kv, token](score)",
        "recent(2) then top[layer, token](score)",
        "top[token, layer, kv](score)",
        "recent(2) then top[layer, kv, token](score, 17)",
        "recent(2) then top[layer, token](score, 9) then top(score)",
        "top[layer, kv, token](score, 4 where layer < 2 else 20) then top[layer, kv, token](score)",
        "top[layer, token](score, count[token](score > 3))",
        "recent(2) then top[layer, kv, token](score) where layer > 0 else recent(5)",
    ],
)
def test_layers_compete(keep, beside, decode):
    """LAVa's selection beside H2O's states, merges and propagated tokens."""
    assert_agreement(f"{BESIDE[beside]}budget: 6\nkeep: {keep}\n{decode}")


@pytest.mark.parametrize(
    "keep",
    [
        "top(mean[head, query](attn(recent(2))), 3) then top(score)",
        "top(mean[kv](score), 3) then top(score)",
        "top(mean[kv](score), 3) then recent(2) then top[kv, token](score)",
        "mean[kv](score) > 8 then top(score)",
    ],
)
def test_sets_of_the_layer_while_heads_hold_different_entries(keep):
    """Of a set without the axis `kv` each head takes what it holds, and fills up to its budget."""
    score = "score: norm2[dim](value)\n"
    assert_agreement(f"{score}budget: 6\nkeep: {keep}\ndecode: same\n")
    assert_agreement(f"{HEAT}score: heat\nbudget: 6\nkeep: {keep}\ndecode: same\n")


@pytest.mark.parametrize(
    "score",
    [
        "heat + sum[group, query](attn(recent(3)) - max[layer](sum[head, query](attn(recent(3)))))",
        "heat + sum[dim](key - max[layer](norm1[dim](key)))",
        "heat + sum[dim](key * value / max[layer](norm1[dim](value)))",
        "heat + mean[group](sum[query](attn(all)) - max[layer](sum[query](attn(all))))",
    ],
)
def test_tensors_meet_values_of_all_layers(score):
    assert_agreement(f"{HEAT}score: |\n  {score}\n{FILL}")


@pytest.mark.parametrize(
    "first", ["layer > mean[layer](layer)", "rank[layer](layer) < 3", "layer == at(1, layer)"]
)
def test_propagation_that_compares_numbers_of_layers(first):
    assert_agreement(f"{AWAY.replace('layer == 1', first)}keep: recent(4)\n")
    assert_agreement(f"{AWAY.replace('first: layer == 1', 'every: ' + first)}keep: recent(4)\n")


@pytest.mark.parametrize(
    ("budget", "more"),
    [
        ("prompt / gap", "params: {gap: 0}\n"),
        ("-prompt / gap", "params: {gap: 0}\n"),
        ("0 * (prompt / gap)", "params: {gap: 0}\n"),
        ("max[token](position) / 0", ""),
        ("9 ^ 300 * prompt", ""),
        ("exp(prompt * 1000)", ""),
    ],
)
@pytest.mark.parametrize("top", ["top(score)", "top[kv, token](score)", "top[layer, token](score)"])
def test_infinite_budgets(budget, more, top):
    assert_agreement(f"{more}{SCORE}budget: {budget}\nkeep: {top}\n")
    if "layer" not in top:
        assert_agreement(f"{more}{SCORE}budget: {budget}\nkeep: {top}\ndecode: same\n")


@pytest.mark.parametrize(
    "seed", ["9007199254740993", "-7", "1e300", "2.5", "1 / 0", "sqrt(2) * 1e9", "prompt / 3"]
)
def test_seeds(seed):
    assert_agreement(f"score: uniform({seed})\n{FILL}decode: same\n")


def test_seeds_differ_beyond_float64():
    texts = [f"score: uniform({2**53 + i})\nkeep: top(score, 9)\n" for i in (0, 1)]
    prompt = tensors(np.random.default_rng(0), SHAPE, 30, 1)[:3]
    one, other = (interpret(written(text), *prompt) for text in texts)
    assert not all(map(np.array_equal, one.kept, other.kept))


@pytest.mark.parametrize("reduced", ["sum", "mean", "max", "min", "var"])
@pytest.mark.parametrize("read", ["attn", "logits"])
def test_windows_may_be_empty(reduced, read):
    """For short prompts, where the number of queries follows from the prompt."""
    window = f"{reduced}[group, query]({read}(recent(0.1 * prompt)))"
    assert_agreement(f"score: norm1[dim](key) + {window}\n{FILL}decode: same\n", tokens=(1, 9, 19))


@pytest.mark.parametrize(
    "score",
    [
        "mean[group, query](votes * logits(recent(window)))",
        "sum[group, query](attn(all) where distance(new) < 4 and distance(all) > 1)",
        "sum[group, query](attn(recent(8)) / index[query](attn(recent(2 + 6))))",
        "mean[group, query](attn(recent(min(window, prompt))) - logits(recent(min(prompt, w))))",
    ],
)
def test_one_window_written_twice(score):
    lets = "let: {w: window, votes: attn(recent(w))}\n"
    assert_agreement(f"params: {{window: 5}}\n{lets}score: {score}\n{FILL}")
