"""Propagation, states, decode steps, merges, slots and sharing on small tensors, worked by hand."""

from __future__ import annotations

import numpy as np
import pytest
from kvpolicy.dsl.bind.bind import bind
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.dsl.syntax.diagnostics import PolicyError
from kvpolicy.dsl.syntax.source import Source
from kvpolicy.dsl.tools.cli import EXECUTIONS
from kvpolicy.dsl.tools.commands import execute

pytestmark = pytest.mark.parametrize("execution", EXECUTIONS)


def bound_to(text: str, layers: int, heads: int, kv: int, size: int, interval: int = 1):
    header = "policy: a-case\nlanguage: 1\nabout: a case\n"
    program = load(Source("a-case.yaml", header + text)).require()
    return bind(program, ModelShape(layers, heads, kv, size), fold_interval=interval)


def applied(text, execution, v, v_step=(), *, k=None, k_step=None, interval=1, inv_freq=None):
    """The result for values [L, G, N, D], steps [T, L, G, D], and queries of zeros."""
    v = np.asarray(v, np.float32)
    k = np.zeros_like(v) if k is None else np.asarray(k, np.float32)
    layers, kv, _, size = v.shape
    bound = bound_to(text, layers, kv, kv, size, interval)
    steps = None
    if len(v_step):
        new = np.asarray(v_step, np.float32)
        keys = np.zeros_like(new) if k_step is None else np.asarray(k_step, np.float32)
        steps = np.zeros_like(new), keys, new
    return execute(bound, execution, np.zeros_like(k), k, v, steps, inv_freq)


def kept(result) -> list:
    return [[np.flatnonzero(head).tolist() for head in layer] for layer in result.kept]


def heads(*numbers) -> np.ndarray:
    """Values [1, G, N, 1] of one layer."""
    return np.array(numbers, np.float32)[None, ..., None]


def new(*numbers) -> np.ndarray:
    """Values [T, 1, 1 or G, 1] of steps, the same in all KV heads if numbers are given."""
    return np.array(numbers, np.float32).reshape(len(numbers), 1, -1, 1)


X = "let: {x: 'sum[dim](value)'}\n"

# Decode with KV heads that hold different tokens


def test_recent_is_each_heads_own(execution):
    text = X + "keep: top(x, 2)\ndecode: {keep: recent(2)}\n"
    result = applied(text, execution, heads([9, 0, 0, 8], [0, 9, 8, 0]), new([0, 0]))
    assert kept(result) == [[[0, 3], [1, 2]]]
    assert result.steps[0].kept == [[[3, 4], [2, 4]]]


def test_reductions_over_heads_are_over_those_that_hold_the_token(execution):
    text = X + "keep: top(x, 2)\ndecode: {keep: 'top(count[kv](x), 2)'}\n"
    result = applied(text, execution, heads([9, 8, 0], [0, 9, 8]), new([0, 0]))
    assert kept(result) == [[[0, 1], [1, 2]]]
    # Tokens 0 and 2 are in one head each, 1 and the new one in both.
    assert result.steps[0].kept == [[[1, 3], [1, 3]]]


def test_pooling_sees_a_heads_own_neighbours(execution):
    text = X + "keep: top(x, 2)\ndecode: {keep: 'top(maxpool(x, 3), 2)'}\n"
    result = applied(text, execution, heads([9, 0, 0, 2], [9, 2, 0, 0]), new([1, 1]))
    assert kept(result) == [[[0, 3], [0, 1]]]
    # In head 0, token 3 is next to token 0; in head 1, token 1 is.
    assert result.steps[0].kept == [[[0, 3], [0, 1]]]


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        ("new", [[4], [4]]),
        ("position < 2", [[0], [1]]),
        ("not recent(1)", [[0, 3], [1]]),
        ("top(position, cached - 1)", [[3, 4], [4]]),
        ("all where count[token](all) > 2 else new", [[0, 3, 4], [4]]),
        ("top(x, 1)", [[0], [1]]),
        ("sinks(1) then top(x)", [[0, 3], [1, 4]]),
        ("top[kv, token](x, 3)", [[0, 3], [1]]),
        ("recent(generated)", [[4], [4]]),
        ("position == max[token](position)", [[4], [4]]),
        ("position == min[token](position) or new", [[0, 4], [1, 4]]),
    ],
)
def test_selections_in_decode(execution, keep, expected):
    text = X + f"budget: 2\nkeep: x > 1\ndecode: {{keep: '{keep}'}}\n"
    result = applied(text, execution, heads([9, 0, 0, 8], [0, 7, 0, 0]), new([1, 1]))
    assert kept(result) == [[[0, 3], [1]]]
    assert result.steps[0].kept == [expected]


def test_a_head_may_lose_everything(execution):
    text = X + "keep: x > 5\ndecode: {keep: 'x > 5'}\n"
    result = applied(text, execution, heads([9, 0], [0, 0]), new([0, 0], [0, 8]))
    assert kept(result) == [[[0], []]]
    assert [step.kept for step in result.steps] == [[[[0], []]], [[[0], [3]]]]


# When entries leave


def test_when_and_interval(execution):
    text = "keep: recent(2)\ndecode: {when: generated == 2 or generated > prompt}\n"
    steps = [
        step.kept[0][0] for step in applied(text, execution, heads([0] * 3), new(*[0] * 5)).steps
    ]
    assert steps == [[1, 2, 3], [3, 4], [3, 4, 5], [5, 6], [6, 7]]
    result = applied(
        "keep: recent(2)\ndecode: same\n", execution, heads([0] * 3), new(*[0] * 5), interval=2
    )
    assert [step.kept[0][0] for step in result.steps] == [
        [1, 2, 3], [3, 4], [3, 4, 5], [5, 6], [5, 6, 7],
    ]  # fmt: skip


@pytest.mark.parametrize("tokens", [0, 1])
def test_almost_no_prompt(execution, tokens):
    text = "keep: sinks(1) then recent(2)\ndecode: same\n"
    v = np.zeros((2, 1, tokens, 1))
    result = applied(text, execution, v, np.zeros((4, 2, 1, 1)))
    grown = [[0], [0, 1], [0, 1, 2], [0, 2, 3], [0, 3, 4], [0, 4, 5]][tokens : tokens + 4]
    assert [step.kept for step in result.steps] == [[[places], [places]] for places in grown]


def test_budget_in_decode_is_the_prefills_number(execution):
    text = "score: -position\nbudget: prompt / 2\nkeep: top(score)\ndecode: same\n"
    result = applied(text, execution, heads([0] * 7), new(0, 0))
    assert kept(result) == [[[0, 1, 2]]]
    assert [step.kept for step in result.steps] == [[[[0, 1, 2]]]] * 2
    text = text.replace("decode: same", "decode: {budget: prompt / 2 + generated}")
    result = applied(text, execution, heads([0] * 7), new(0, 0))
    assert [step.kept for step in result.steps] == [[[[0, 1, 2, 7]]], [[[0, 1, 2, 7, 8]]]]


def test_without_decode_nothing_leaves(execution):
    result = applied("keep: recent(1)\n", execution, heads([0] * 3), new(0, 0))
    assert [step.kept for step in result.steps] == [[[[2, 3]]], [[[2, 3, 4]]]]


# States


def test_states_follow_their_entries(execution):
    # Each entry counts the steps that it has seen; the prompt is one of them.
    text = "state: {age: age + 1 + 0 * position}\nkeep: recent(3)\ndecode: {keep: 'top(age, 3)'}\n"
    result = applied(text, execution, heads([0] * 4), new(0, 0, 0))
    assert [step.kept for step in result.steps] == [[[[1, 2, 3]]]] * 3
    # The youngest first, so that the newest replaces the oldest but one.
    text = text.replace("top(age, 3)", "top(-age, 3)")
    result = applied(text, execution, heads([0] * 4), new(0, 0, 0))
    assert [step.kept[0][0] for step in result.steps] == [[1, 2, 4], [1, 4, 5], [4, 5, 6]]


def test_states_under_decode_start_empty_and_starts_count(execution):
    text = (
        "keep: all\ndecode:\n  state:\n    seen:\n      start: 2 * sum[dim](value)\n"
        "      next: seen + 1\n  keep: top(seen, 2)\n"
    )
    result = applied(text, execution, heads([1, 5, 1]), new(2, 3))
    # 3, 11, 3 and 5; then 12, 6 and 7.
    assert [step.kept[0][0] for step in result.steps] == [[1, 3], [1, 4]]


def test_a_state_of_the_layer(execution):
    text = (
        "state:\n  top_value:\n    start: max[kv, token, dim](value)\n    next: top_value - 1\n"
        "keep: all\ndecode: {keep: 'all where top_value > 1 else recent(1)'}\n"
    )
    result = applied(text, execution, heads([4, 1]), new(9, 9, 9))
    # 3 after the prompt, then 2 and 1.
    assert [step.kept[0][0] for step in result.steps] == [[0, 1, 2], [3], [4]]


def test_one_expression_before_and_after_the_update(execution):
    # `heat + 1` stands inside `next`, where heat is the old value, and outside, where it is new.
    text = "state: {heat: 2 * (heat + 1)}\nscore: (heat + 1) + 0 * position\nkeep: all\n"
    result = applied(text, execution, heads([0, 0]))
    assert result.scores[0].tolist() == [[3, 3]]


# Propagation

FIVE = np.arange(5, dtype=np.float32).reshape(1, 1, 5, 1) + np.array([0, 10, 20]).reshape(
    3, 1, 1, 1
)


def test_a_layer_acts_once_and_is_computed_in_full(execution):
    text = "propagate: {first: layer >= 1, tokens: sinks(2) or recent(1)}\n"
    result = applied(text, execution, FIVE)
    assert (result.selected_layer, result.propagated) == (1, [0, 1, 4])
    assert result.positions == [0, 1, 4]
    assert kept(result) == [[[0, 1, 2, 3, 4]]] * 2 + [[[0, 1, 4]]]


@pytest.mark.parametrize(("first", "layer"), [("layer == 7", None), ("layer == 2", 2)])
def test_never_and_at_the_last_layer(execution, first, layer):
    text = f"propagate: {{first: {first}, tokens: recent(2)}}\n"
    result = applied(text, execution, FIVE)
    assert result.selected_layer == layer
    assert result.propagated == (None if layer is None else [3, 4])
    assert kept(result) == [[[0, 1, 2, 3, 4]]] * 3


def test_an_empty_choice_lets_all_go_on(execution):
    result = applied("propagate: {first: layer == 0, tokens: recent(0)}\n", execution, FIVE)
    assert result.selected_layer == 0
    assert result.propagated == [0, 1, 2, 3, 4]
    assert kept(result) == [[[0, 1, 2, 3, 4]]] * 3


def test_every_layer_chooses_among_those_there(execution):
    text = "propagate: {every: layer < 2, tokens: 'top(position, length - 2)'}\nkeep: recent(2)\n"
    result = applied(text, execution, FIVE)
    assert result.propagated == {0: [2, 3, 4], 1: [4]}
    assert result.positions == [4]
    assert kept(result) == [[[3, 4]], [[3, 4]], [[4]]]


def test_an_unsized_top_fills_the_sections_own_budget(execution):
    text = (
        "let: {x: 'sum[dim](value)'}\nscore: -x\nbudget: 2\nkeep: top(score)\n"
        "propagate:\n  first: layer == 0\n  budget: length - 2\n"
        "  tokens: recent(1) then top(sum[kv](x))\n"
    )
    v = FIVE.copy()
    v[:, :, 1] += 50
    result = applied(text, execution, v)
    assert result.propagated == [1, 3, 4]
    assert kept(result) == [[[0, 2]], [[3, 4]], [[3, 4]]]


def test_values_of_other_layers_are_read_at_the_tokens_there(execution):
    text = (
        X + "propagate: {first: layer == 0, tokens: position % 2 == 0}\n"
        "score: at(0, x) + 100 * sum[past](past(x, 2)) where layer < 2 else sum[layer](x)\n"
        "keep: all\n"
    )
    scores = applied(text, execution, FIVE).scores
    absent = np.nan
    np.testing.assert_array_equal(scores[0], [[0, 101, 202, 303, 404]])
    np.testing.assert_array_equal(scores[1], [[1000, absent, 1402, absent, 1804]])
    np.testing.assert_array_equal(scores[2], [[30, absent, 36, absent, 42]])


def test_layers_compete_with_the_tokens_that_they_have(execution):
    text = (
        X + "propagate: {first: layer == 0, tokens: position > 2}\n"
        "keep: top[layer, kv, token](-x, 6)\n"
    )
    # All five of the first layer, then the lowest of those that reached the second.
    assert kept(applied(text, execution, FIVE)) == [[[0, 1, 2, 3, 4]], [[3]], [[]]]


def test_restart(execution):
    text = (
        "let:\n  x: sum[dim](value)\n  place: position + 10 * length + 100 * prompt\n"
        "propagate:\n  first: layer == 1\n  restart: true\n"
        "  tokens: top(sum[kv](x), 4) and position < 4\n"
        "score: place\nkeep: recent(2)\ndecode: {score: x, keep: 'position > 1'}\n"
    )
    v = FIVE.copy()
    v[1, 0, 0], v[1, 0, 1] = 99, -99
    result = applied(text, execution, v, np.zeros((2, 3, 1, 1)))
    assert (result.selected_layer, result.propagated) == (1, [0, 2, 3])
    assert result.positions == [0, 1, 2]
    assert kept(result) == [[[2, 3]]] * 3
    np.testing.assert_array_equal(result.scores[0], [[530, np.nan, 531, 532, np.nan]])
    # Tokens 3 and 5, 6 are at positions 2 and 3, 4.
    assert [step.kept for step in result.steps] == [[[[3, 5]]] * 3, [[[3, 5, 6]]] * 3]


def test_too_few_queries_for_what_propagates(execution):
    text = (
        "propagate: {first: layer == 0, tokens: sinks(3)}\n"
        "score: sum[head, query](attn(recent(2)))\nkeep: top(score, 2)\n"
    )
    bound = bound_to(text, 2, 1, 1, 2)
    q = np.zeros((2, 1, 6, 2), np.float32)
    execute(bound, execution, q, q, q)
    with pytest.raises(PolicyError, match="layer 1 needs its last 2 queries, `q` has 0 of them"):
        execute(bound, execution, q[:, :, -2:], q, q)


# Merging


def test_next_entries_share_what_leaves(execution):
    text = (
        "keep: position % 3 > 0\nmerge: {into: next(2), weight: 1 / 2, divide: 1, apply: [value]}\n"
    )
    result = applied(text, execution, heads([8, 1, 1, 6, 1]), k=heads([1, 2, 3, 4, 5]))
    k, v = result.merged[0]
    # Token 3 has one successor; the divisor stays what is written.
    np.testing.assert_array_equal(v[0, [1, 2, 4], 0], [5, 5, 4])
    np.testing.assert_array_equal(k[0, [1, 2, 4], 0], [2, 3, 5])


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ("", 4),  # (2 + 4 + 6) / 3
        ("weight: 2", 22 / 5),
        ("own: 4", 18 / 6),
        ("weight: 0 - 1 / 2", 2),  # the divisor is 0
        ("accept: position > 0", 4),
        ("accept: position > 1", 2),
        ("accept: 'sum[dim](value) > mean[dropped](sum[dim](value))'", 4),
        ("divide: members", 4),
        ("divide: members * mass", 12 / 9),
        ("weight: 'sum[dim](value)', divide: 1", 54),
        ("weight: 1e300 * 1e300", 2),  # the result would be infinite
    ],
)
def test_weights(execution, rules, expected):
    text = "keep: recent(1)\nmerge: {into: nearest(key)" + (f", {rules}" if rules else "") + "}\n"
    if "accept: position > 0" in rules:
        expected = 4  # token 1 alone: (2 + 6) / 2
    result = applied(text, execution, heads([4, 6, 2]), k=heads([1, 1, 1]))
    np.testing.assert_allclose(result.merged[0][1][0, 2, 0], expected)


def test_nearest_takes_the_lower_of_equals_and_its_own_head(execution):
    k = np.array([[[[1, 0], [2, 0], [0, 3], [3, 0]], [[0, 1], [1, 0], [0, 2], [0, 1]]]])
    text = "keep: position > 0\nmerge: {into: nearest(key), divide: 1}\n"
    v = heads([5, 1, 1, 1], [7, 1, 1, 1])
    result = applied(text, execution, np.repeat(v, 2, 3), k=k)
    merged = result.merged[0][1][..., 0]
    np.testing.assert_array_equal(merged[:, 1:], [[6, 1, 1], [1, 8, 1]])


def test_states_of_a_merge_wait_for_something_to_leave(execution):
    text = (
        "keep: recent(2)\nmerge:\n  into: next(1)\n  accept: bar < 0\n  state:\n    bar:\n"
        "      start: mean[kv, dropped](sum[dim](value))\n"
        "      next: bar / 2 + mean[kv, dropped](sum[dim](value)) / 2\ndecode: same\n"
    )
    result = applied(text, execution, heads([8]), new(4, 6, 1, 1))
    assert result.thresholds == {"bar": [None]}
    found = [step.thresholds["bar"] for step in result.steps]
    assert found == [[None], [8], [6], [6]]
    # With a section of its own, decode starts anew.
    own = "decode:\n  merge:\n    into: next(1)\n    state: {seen: seen + 1}"
    text = text.replace("decode: same", own)
    result = applied(text, execution, heads([8, 4, 6]), new(1, 1))
    assert result.thresholds == {"bar": [8]}
    assert [step.thresholds for step in result.steps] == [{"seen": [1]}, {"seen": [2]}]


def test_heads_that_drop_different_numbers(execution):
    text = X + "keep: x > 0\nmerge: {into: next(1), divide: 1, accept: 'x > mean[dropped](x)'}\n"
    v = heads([-3, -1, 1, 1], [1, 1, -1, 5])
    merged = applied(text, execution, v).merged[0][1][..., 0]
    # Head 0 drops two and the larger is merged; head 1 drops one, which equals its mean.
    np.testing.assert_array_equal(merged[0, 2:], [0, 1])
    np.testing.assert_array_equal(merged[1, [0, 1, 3]], [1, 1, 5])


def test_what_a_head_does_not_drop_counts_nowhere(execution):
    text = (
        X + "keep: x > 0\nmerge:\n  into: next(1)\n  divide: 1\n"
        "  let: {match: 'sum[dim](value + target(value))'}\n"
        "  accept: match > mean[kv, dropped](match)\n"
    )
    # Matches 4 and 2 of head 0, 0 of head 1: their mean is 2, not the mean of four numbers.
    v = heads([-1, -3, 5, 1], [-4, 4, 1, 1])
    merged = applied(text, execution, v).merged[0][1][..., 0]
    np.testing.assert_array_equal(merged[:, 1:], [[-3, 4, 1], [4, 1, 1]])


def test_tokens_that_never_came_are_not_merged(execution):
    text = (
        "propagate: {first: layer == 0, tokens: position > 0}\n"
        "keep: recent(1)\nmerge: {into: next(1), divide: 1}\n"
    )
    v = np.array([1, 2, 4], np.float32).reshape(1, 1, 3, 1).repeat(2, 0)
    merged = applied(text, execution, v).merged
    assert [layer[1][0, 2, 0] for layer in merged] == [7, 6]


# Slots


def turned(x: np.ndarray, position: int, inv_freq: np.ndarray) -> np.ndarray:
    angle = position * inv_freq
    a, b = np.split(x, 2, -1)
    return np.concatenate(
        [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1
    )


def test_slots(execution):
    inv_freq = np.array([1.0, 0.25])
    raw = np.random.default_rng(0).standard_normal((8, 4))
    keys = np.stack([turned(x, i, inv_freq) for i, x in enumerate(raw)]).astype(np.float32)
    text = "keep: sinks(1) then recent(2)\ndecode: same\npositions: slots\n"
    k, k_step = keys[None, None, :6], keys[6:, None, None]
    result = applied(text, execution, k, k_step, k=k, k_step=k_step, inv_freq=inv_freq)

    def expected(*pairs: tuple[int, int]) -> np.ndarray:
        return np.stack([turned(raw[token], place, inv_freq) for token, place in pairs])

    places = np.flatnonzero(result.kept[0][0])
    np.testing.assert_allclose(
        result.merged[0][0][0, places], expected((0, 3), (4, 4), (5, 5)), atol=1e-6
    )
    for step, newest in zip(result.steps, (6, 7), strict=True):
        assert step.kept == [[[0, newest - 1, newest]]]
        pairs = (0, newest - 2), (newest - 1, newest - 1), (newest, newest)
        np.testing.assert_allclose(step.merged[0][0][0], expected(*pairs), atol=1e-5)
        np.testing.assert_array_equal(step.merged[0][0][1], keys[[0, newest - 1, newest]])


# Sharing


def test_sharing(execution):
    text = (
        "share:\n  when: layer == 1\n  direction: unit[dim](below + own)\n"
        "  except: sum[dim](own * below) < 0\n  apply: [value]\n"
    )
    v = np.array([[[[3, 0], [1, 0]]], [[[0, 1], [-1, 0]]], [[[5, 5], [5, 5]]]], np.float32)
    result = applied(text, execution, v, k=v)
    direction = np.array([3, 1]) / np.sqrt(10)
    np.testing.assert_allclose(result.merged[0][1][0], [3 * direction, [1, 0]], atol=1e-12)
    np.testing.assert_allclose(result.merged[1][1][0], [direction, [-1, 0]], atol=1e-12)
    np.testing.assert_array_equal(result.merged[2][1], v[2])
    for layer in range(3):
        np.testing.assert_array_equal(result.merged[layer][0], v[layer])
    assert all(layer.all() for layer in result.kept)


@pytest.mark.parametrize(("when", "place"), [("layer > 0", 2), ("layer % 2 == 0", 0)])
def test_layers_share_with_one_other(execution, when, place):
    text = f"share: {{when: {when}, direction: 'unit[dim](own)'}}\n"
    with pytest.raises(PolicyError, match=f"`share.when` holds at layer {place}, but"):
        bound_to(text, 4, 1, 1, 2)
