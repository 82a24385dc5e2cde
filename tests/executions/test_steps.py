"""Interpreter and torch program agree from the prompt to the last decode step."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from grammar import accepted
from kvpolicy.dsl.bind.bind import bind
from kvpolicy.dsl.bind.bounds import max_entries
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.execute.operations import in_blocks as torch_blocks
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.dsl.syntax.library import shipped
from kvpolicy.dsl.syntax.source import Source
from recordings import both, tensors
from shipped_policies import shipped_program

SHAPES = [(4, 4, 2, 8), (3, 2, 2, 4), (5, 4, 1, 6), (3, 8, 2, 4)]
LENGTHS = (0, 1, 2, 3, 4, 5, 9, 10, 13, 20, 31)
SMALL = {
    "capacity": "9", "window": "3", "start": "2", "queries": "3", "reach": "4", "heavy": "4",
    "rate": "0.4", "filter": "1", "tsp_layer": "1", "batch": "2", "recent_share": "0.3",
    "newest": "2", "lookback": "2", "kernel": "3", "tau": "2",
}  # fmt: skip
# What a method's own meaning of a name needs, and variants that take other branches.
OWN = {
    "asl": {"start": "1"},
    "asl-lava-d2o": {"start": "1"},
    "cam-original": {"recent_rate": "0.3"},
    "minicache": {"start": "0"},
    "pyramidinfer": {"least": "3"},
}
VARIANTS = [
    {}, {"two_pass": "true", "strongest": "true"}, {"tau": "0.5", "constant": "true"},
    {"rate": "0.2", "certain": "true", "alpha": "0.3"}, {"threshold": "0.45", "deeper": "6"},
]  # fmt: skip


def settings(name: str, params, seed: int) -> dict[str, str]:
    given = {**SMALL, **OWN.get(name, {}), **VARIANTS[seed % len(VARIANTS)]}
    return {key: value for key, value in given.items() if key in params}


def frequencies(shape, seed: int):
    size = shape[3] // 2
    return None if seed % 2 else 10000.0 ** (-np.arange(size) / size)


@pytest.mark.thorough(besides=["h2o"])
@pytest.mark.slow
@pytest.mark.parametrize("name", shipped())
def test_shipped_policies(name):
    program = shipped_program(name)
    for seed in range(15):
        rng, shape = np.random.default_rng(seed), SHAPES[seed % len(SHAPES)]
        bound = bind(
            program, ModelShape(*shape), settings(name, program.params, seed),
            fold_interval=3 if seed % 3 == 2 else 1,
        )  # fmt: skip
        tokens = LENGTHS[seed % len(LENGTHS)]
        prompt = tensors(rng, shape, tokens, seed % 8, ties=seed % 4 == 3)
        expected, _ = both(bound, *prompt, frequencies(shape, seed))
        kept = sum(int(layer.sum()) for layer in expected.kept)
        assert kept <= max_entries(bound, tokens)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_random_policies(part, monkeypatch):
    if part == 3:  # one KV head and one query at a time
        monkeypatch.setattr(torch_blocks, "BLOCK_BYTES", 1)
    random, places = (
        Random(part),
        [(SHAPES[0], 19), (SHAPES[2], 2), (SHAPES[1], 11), (SHAPES[3], 13)],
    )
    for number in range(24):
        shape, tokens = places[number % 4]
        bound = accepted(random, shape)
        prompt = tensors(np.random.default_rng(number), shape, tokens, 4, ties=number % 4 == 2)
        both(bound, *prompt, frequencies(shape, number))


def test_sums_of_random_numbers_are_of_one_layer():
    """Per token, known before any tensor, and not the same in all layers."""
    text = (
        "policy: drawn\nlanguage: 1\nlet:\n  luck: sum[kv](uniform(3))\n"
        "score: uniform(3) / luck\nbudget: 5\nkeep: top(score)\n"
    )
    bound = bind(load(Source("drawn.yaml", text)).require(), ModelShape(3, 4, 2, 8))
    expected, _ = both(bound, *tensors(np.random.default_rng(0), (3, 4, 2, 8), 20, 0))
    assert (expected.kept[0] != expected.kept[1]).any()


@pytest.mark.parametrize("score", ["-softmax[token](heat)", "position * sum[token](heat)"])
def test_what_heads_remember_together_is_read_at_the_entries_that_each_holds(score):
    """As all that is per token: where a head does not hold one, its values are absent."""
    text = (
        "policy: shared\nlanguage: 1\nstate:\n"
        "  heat: heat + mean[kv](sum[group, query](attn(new)))\n"
        f"score: {score} + 0 * norm1[dim](key)\nbudget: 1\n"
        "keep: new then top[kv, token](score, 7) then top[kv, token](score)\n"
        "decode: {when: prompt > 5}\n"
    )
    bound = bind(load(Source("shared.yaml", text)).require(), ModelShape(*SHAPES[3]))
    prompt = tensors(np.random.default_rng(11), SHAPES[3], 13, 4)
    expected, _ = both(bound, *prompt, frequencies(SHAPES[3], 11))
    assert any(set(layer[0]) != set(layer[1]) for layer in expected.steps[-1].kept)


def test_heads_hold_different_tokens():
    """The comparison above is not empty: heads differ, states follow, tokens leave."""
    bound = bind(shipped_program("h2o"), ModelShape(3, 4, 2, 8), {"heavy": "4", "window": "3"})
    prompt = tensors(np.random.default_rng(0), (3, 4, 2, 8), 20, 6)
    expected, _ = both(bound, *prompt)
    last = expected.steps[-1].kept
    assert all(len(head) == 7 for layer in last for head in layer)
    assert any(layer[0] != layer[1] for layer in last)
    assert any(head[0] < 20 for layer in last for head in layer)


@pytest.mark.parametrize("name", ["h2o", "d2o", "vatp"])
def test_prompts_of_several_blocks(name):
    """300 queries are summed in five blocks."""
    program = shipped_program(name)
    given = {"heavy": "40", "window": "30", "rate": "0.2", "start": "3"}
    given = {key: value for key, value in given.items() if key in program.params}
    prompt = tensors(np.random.default_rng(8), (1, 4, 2, 8), 300, 2)
    both(bind(program, ModelShape(1, 4, 2, 8), given), *prompt)


def test_short_folds_end_like_long_ones_where_the_past_does_not_count():
    """Sinks and recent entries after 6 steps do not depend on when others left."""
    program = shipped_program("streamingllm")
    prompt = tensors(np.random.default_rng(1), (2, 2, 1, 4), 9, 6)
    given = {"start": "2", "window": "4"}
    ends = [
        both(bind(program, ModelShape(2, 2, 1, 4), given, fold_interval=n), *prompt)[0].steps
        for n in (1, 2, 3, 6)
    ]
    assert all(each[-1].kept == [[[0, 1, 11, 12, 13, 14]]] * 2 for each in ends)
    assert [len(step.kept[0][0]) for step in ends[2]] == [7, 8, 6, 7, 8, 6]
