"""Numbers of entries that lists keep if the prompt's length decides (also in `agreement.agree`)."""

from __future__ import annotations

import numpy as np
import pytest
from agreement import written
from kvpolicy.dsl.bind.bind import bind
from kvpolicy.dsl.bind.entries import known_counts
from kvpolicy.dsl.interpret.interpreter import interpret
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.dsl.syntax.library import shipped
from recordings import tensors
from shipped_policies import shipped_program

SHAPE = (3, 4, 2, 8)
SETTINGS = {
    "capacity": "9",
    "window": "4",
    "heavy": "5",
    "rate": "0.3",
    "start": "2",
    "newest": "1",
}
UNFORESEEN = {
    "ada-pyramidkv", "adakv", "asl", "asl-lava-d2o", "cake", "d2o", "dynamickv", "fastkv",
    "fastkv-adakv", "gemfilter", "lava", "minicache", "pyramidinfer", "simlayerkv-prefill",
}  # fmt: skip
SCORE = "score: norm2[dim](value)\n"


def kept(bound, tokens, ties=False):
    """The set of list lengths of each layer."""
    prompt = tensors(np.random.default_rng(tokens), SHAPE, tokens, 0, ties)[:3]
    return [set(layer.sum(1)) for layer in interpret(bound, *prompt).kept]


@pytest.mark.parametrize("name", shipped())
def test_shipped_policies(name):
    program = shipped_program(name)
    given = {key: x for key, x in SETTINGS.items() if key in program.params}
    bound = bind(program, ModelShape(*SHAPE), given)
    for tokens in (1, 2, 5, 13, 40):
        numbers = known_counts(bound, tokens)
        assert (numbers is None) == (name in UNFORESEEN)
        if numbers is not None:
            assert kept(bound, tokens) == [{number} for number in numbers]


@pytest.mark.parametrize(
    "rules",
    [
        "keep: sinks(3) then recent(4)",
        "keep: sinks(3) or recent(4)",
        "keep: recent(3) then top(score)\nbudget: 2 + prompt * layer / 9\n" + SCORE,
        "keep: recent(3) then top(score)\nbudget: 6.9 + prompt / 10\n" + SCORE,
        "keep: recent(3) then sinks(1) then top(score)\nbudget: 6\n"
        "score: norm2[dim](value) where not recent(3)\n",
        "keep: recent(3) then top(score) where layer > 1 else all\nbudget: 5\n" + SCORE,
        "keep: top(score)\nbudget: 7 where prompt > 9 else 2 - layer * prompt\n" + SCORE,
    ],
)
def test_numbers_of_the_host(rules):
    bound = written(rules + "\n", SHAPE)
    for tokens in (1, 2, 6, 9, 31):
        for ties in (False, True):
            numbers = known_counts(bound, tokens)
            assert numbers is not None
            assert kept(bound, tokens, ties) == [{number} for number in numbers]


@pytest.mark.parametrize(
    "rules",
    [
        # Data decide a number; a score may be absent; lists compete; other sets.
        "keep: recent(3) then top(score)\nbudget: max[kv, token](score)\n" + SCORE,
        "keep: top(score)\nbudget: 5\nscore: norm2[dim](value) where norm2[dim](value) > 2\n",
        "keep: top[kv, token](score)\nbudget: 5\n" + SCORE,
        "keep: recent(2) or top(score, 3)\n" + SCORE,
        "keep: recent(5) or recent(3)\n",
        "keep: score > 1\n" + SCORE,
        "keep: recent(3) where max[kv, token](score) > 2 else all\n" + SCORE,
        "keep: recent(3) then top(score)\nbudget: 3 + split[layer](9, 1 + layer)\n" + SCORE,
    ],
)
def test_what_only_the_device_knows(rules):
    assert known_counts(written(rules + "\n", SHAPE), 20) is None
