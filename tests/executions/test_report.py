"""Values listed under `report`: interpreter and torch program return the same."""

import numpy as np
import pytest
from agreement import SHAPE, agree, assert_agreement, written
from recordings import tensors

LAYERS, HEADS, KV_HEADS, _ = SHAPE
TOKENS, STEPS = 9, 4


def values(text: str, every: int = 1, **settings: str):
    """Reported values of the prefill and of each step, by name."""
    bound = written(text, every=every, **settings)
    result = agree(bound, *tensors(np.random.default_rng(3), SHAPE, TOKENS, STEPS))
    return result.named, [step.named for step in result.steps]


@pytest.mark.parametrize("decode", ["", "decode: same\n"])
@pytest.mark.parametrize(
    ("let", "used"),
    [
        ("mean[kv, token](norm1[dim](key)) + layer", "x"),
        ("max[layer](mean[kv, token](norm1[dim](key)))", "x"),
        ("mean[kv, token](norm1[dim](key)) > 1", "1 where x else 2"),
        ("norm1[dim](key) where position % 2 == 0", "max[kv, token](x)"),
        ("mean[token](norm1[dim](key))", "max[kv](x)"),
        ("sum[query, token](attn(recent(3)) where not recent(3))", "max[kv, group](x)"),
        ("sum[query](attn(recent(3)))", "max[kv, group, token](x)"),
    ],
)
def test_values_of_any_axes_agree(let, used, decode):
    score = f"score: norm1[dim](value) + ({used})\nbudget: 6\nkeep: recent(2) then top(score)\n"
    assert_agreement(f"let:\n  x: {let}\n{score}{decode}report: [x]\n")


def test_a_value_for_each_layer_with_its_axes():
    prefill, steps = values(
        "let:\n  size: mean[token](norm1[dim](key))\n  broad: size > 1\n"
        "keep: recent(4) where broad else sinks(4)\nreport: [broad, size]\n"
    )
    assert list(prefill) == ["broad", "size"]
    assert np.shape(prefill["size"]) == (LAYERS, KV_HEADS)
    assert prefill["broad"] == [[float(x > 1) for x in layer] for layer in prefill["size"]]
    assert steps == [{}] * STEPS  # nothing is decided


def test_a_step_shows_what_it_decides_by():
    text = (
        "let:\n  size: mean[kv, token](norm1[dim](key))\n"
        "decode:\n  keep: recent(4) where size > 0 else all\nreport: [size]\n"
    )
    prefill, steps = values(text, every=2)
    assert prefill == {}
    assert [[x is None for x in step["size"]] for step in steps] == [
        [leaves] * LAYERS for leaves in (True, False, True, False)
    ]


def test_a_let_of_decode():
    text = (
        "keep: all\ndecode:\n  let: {size: 'mean[kv, token](norm1[dim](key))'}\n"
        "  keep: recent(4) where size > 0 else all\nreport: [size]\n"
    )
    prefill, steps = values(text)
    assert prefill == {}
    assert all(x > 0 for step in steps for x in step["size"])


def test_numbers_known_before_the_prefill_are_shown_wherever_they_are_used():
    text = (
        "params: {near: 4}\nlet:\n  most: near + 2 * layer\n  share: prompt / 3\n"
        "budget: most\nscore: norm1[dim](key) * share\nkeep: top(score)\nreport: [most, share]\n"
    )
    prefill, _ = values(text, near="2")
    assert prefill == {"most": [2, 4, 6], "share": [3, 3, 3]}


def test_what_settings_switch_off_is_not_computed():
    text = (
        "params: {by_size: true}\nlet:\n  size: sum[query](attn(all))\n"
        "score: mean[group](size) where by_size else position\nbudget: 4\nkeep: top(score)\n"
        "report: [size]\n"
    )
    assert np.shape(values(text)[0]["size"]) == (LAYERS, KV_HEADS, HEADS // KV_HEADS, TOKENS)
    assert values(text, by_size="false")[0] == {}
    assert written(text, by_size="false").queries(TOKENS) == 0


def test_a_report_changes_neither_meaning_nor_what_is_read():
    text = (
        "let:\n  size: norm1[dim](key)\n  other: sum[query](attn(all))\n"
        "score: size + 0 * position\nbudget: 4\nkeep: top(score)\n"
    )
    plain, reporting = written(text), written(f"{text}report: [size, other]\n")
    assert plain.digest == reporting.digest
    assert plain.queries(TOKENS) == reporting.queries(TOKENS) == 0
