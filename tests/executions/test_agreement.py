"""Policies on which executions differed, or one failed, when they were found."""

from __future__ import annotations

import numpy as np
import pytest
from agreement import SHAPE, agree, assert_agreement, written
from kvpolicy.dsl.bind.bind import bind
from kvpolicy.dsl.interpret.interpreter import interpret
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.dsl.tools.trial import trial
from recordings import tensors
from shipped_policies import shipped_program
from stores import TABLE, Store

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


@pytest.mark.thorough(every=32)
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


@pytest.mark.parametrize("beside", ["merge", "propagate"])
@pytest.mark.parametrize(
    "which", ["layer - 1 where strength > 2.2", "layer / 0", "at(0, strength) where layer > 1"]
)
@pytest.mark.parametrize("known", ["strength", "max[layer](strength)"], ids=["layer", "end"])
def test_values_at_layers_that_do_not_exist(beside, which, known):
    """An absent or infinite layer is no layer; it was read as 0, or as the value left out."""
    lets = "let:\n  strength: max[kv, token, dim](value)\n"
    rest = BESIDE[beside].replace(SCORE, "")
    other = f"1 where at({which}, layer + {known}) > 1 else norm1[dim](key)"
    score = f"score: sum[dim](key) + ({other})\n"
    assert_agreement(f"{lets}{score}{rest}budget: 6\nkeep: top(score)\n")


@pytest.mark.parametrize("beside", ["merge", "propagate"])
@pytest.mark.parametrize("number", ["exp(log(8))", "exp(log(8)) + 0 * norm1[kv, token, dim](key)"])
def test_numbers_that_miss_a_whole_one_by_rounding(beside, number):
    """7.999999999999998 counts as 8 everywhere."""
    data = "key" in number
    past = "sum[past](past(score_, exp(log(8)) - 6))"
    lets = f"let:\n  score_: norm1[dim](key)\n  looked: {past}\n"
    rest = BESIDE[beside].replace(SCORE, "")
    budget = f"floor({number})" if data else number
    assert_agreement(f"{lets}score: looked\n{rest}budget: {budget}\nkeep: top(score)\n")


@pytest.mark.thorough(every=3)
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
    """Each head takes the entries it holds of a set without `kv`, and fills up to its budget."""
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


@pytest.mark.thorough(every=3)
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


@pytest.mark.thorough(every=3)
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


@pytest.mark.thorough(besides=["attn-mean", "logits-max"])
@pytest.mark.parametrize("reduced", ["sum", "mean", "max", "min", "var"])
@pytest.mark.parametrize("read", ["attn", "logits"])
def test_windows_may_be_empty(reduced, read):
    """For short prompts, if the number of queries depends on the prompt."""
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


@pytest.mark.parametrize("width", [3, 41])
def test_beyond_the_ends_there_is_nothing(width):
    """Not even for the maximum of negative numbers."""
    assert_agreement(f"score: maxpool(-norm1[dim](key), {width})\n{FILL}decode: same\n")


# A choice has the axes of both branches, whichever is taken.
CHOICES = {
    "maps or vectors": ("sum[query](attn(recent(3)))", "norm1[dim](key)", "max[group](2 * {})"),
    "vectors or numbers": ("norm1[dim](value)", "kv_heads", "sqrt({}) + norm1[dim](key)"),
    "powers": ("norm1[dim](value)", "2 * kv_heads", "{} ^ 0.5 + norm1[dim](key)"),
    "numbers alone": ("norm1[dim](value)", "kv_heads", "{}"),
    "sums of numbers": ("norm1[dim](value)", "prompt", "norm1[dim](key) / sum[kv, token]({})"),
    "sums beside tokens": (
        "norm1[dim](value)", "1", "norm1[dim](key) + sum[token]({} + mean[kv](norm1[dim](key)))",
    ),
    "queries": (
        "attn(recent(3))", "norm1[dim](key)", "sum[group, query](abs({}) ^ 0.5)",
    ),
    "queries or numbers": ("logits(recent(3))", "1", "mean[group](var[query]({} * {}) + 1)"),
    "counted": ("attn(recent(3)) > 0.1", "true", "norm1[dim](key) + count[head, query]({})"),
    "any": ("attn(recent(3)) > 0.3", "false", "norm1[dim](key) * count[kv](any[group, query]({}))"),
    "dimensions": ("key * value", "norm1[dim](value)", "norm2[dim]({})"),
    "pools": ("norm1[dim](key)", "layer / 3", "maxpool({} + 1, 3) + avgpool({}, 5)"),
    "ranks": ("norm1[dim](key)", "2", "rank({}) + rank[kv, token]({}) + index[kv]({})"),
    "winners": ("norm1[dim](key)", "2", "1 where top[kv, token]({}, 5) else norm1[dim](value)"),
    "numbered": ("norm1[dim](key)", "position", "index[kv]({}) * norm1[dim](value)"),
    "layers": ("norm1[dim](key)", "2", "norm1[dim](value) / sum[kv, token](max[layer]({}))"),
    "layers of tokens": ("norm1[dim](key)", "2", "norm1[dim](value) + rank[layer]({})"),
    "absent": ("(norm1[dim](key) where position > 2)", "3", "norm1[dim](value) + mean[token]({})"),
    "layers before": ("max[past](past(norm1[dim](key), 2))", "4", "{} + sum[token]({})"),
    "layers that were": ("past(norm1[dim](key), 2)", "4", "norm1[dim](key) * sum[past]({})"),
}  # fmt: skip


@pytest.mark.thorough(every=24)
@pytest.mark.slow
@pytest.mark.parametrize("condition", ["flag", "not flag", "layer < 2"])
@pytest.mark.parametrize("name", CHOICES)
def test_choices_between_axes(name, condition):
    x, y, whole = CHOICES[name]
    score = whole.replace("{}", f"({x} where {condition} else {y})")
    head = f"params: {{flag: false}}\nscore: |\n  {score}\n"
    layers = "layer]" in whole or "past" in x
    assert_agreement(f"{head}{FILL}{'' if layers else 'decode: same'}\n")
    assert_agreement(f"{HEAT}{head}  + 0 * heat\n{FILL}{'' if layers else 'decode: same'}\n")
    assert_agreement(f"{AWAY}{head}{FILL}")


@pytest.mark.thorough(every=9)
@pytest.mark.slow
@pytest.mark.parametrize("condition", ["flag", "not flag", "layer < 1"])
@pytest.mark.parametrize(
    "part",
    [
        "accept: match >= mean[dropped](0.5 where {} else match)",
        "weight: 1 / (1 + count[dropped](match > 0 where {} else true))",
        "weight: sum[dropped](1 where {} else match)",
        "own: sum[dropped](2 where {} else match)",
        "divide: mass + max[token](1 where {} else members)",
        "weight: abs(target(1 where {} else norm1[dim](key)))",
    ],
)
def test_choices_of_merges(part, condition):
    let = "let: {match: 'cosine[dim](key, target(key))'}"
    merge = f"merge:\n  into: nearest(key)\n  {let}\n  {part.format(condition)}\n"
    assert_agreement(f"params: {{flag: false}}\n{SCORE}{FILL}{merge}decode: same\n")


@pytest.mark.thorough(besides=["flag"])
@pytest.mark.parametrize("condition", ["flag", "not flag", "layer < 1"])
def test_choices_of_selections(condition):
    for keep in (
        f"all where {condition} else score > 8",
        f"recent(2) then (layer > 0 where {condition} else score > 8)",
        f"recent(2) then top(position where {condition} else score)",
        f"sinks(3) then (recent(1) where {condition} else top(-position, 2)) then top(score)",
    ):
        text = f"params: {{flag: false}}\n{SCORE}budget: 6\nkeep: {keep}\ndecode: same\n"
        assert_agreement(text)


@pytest.mark.parametrize(
    "rules",
    [
        "budget: 5\nkeep: recent(2) then top[kv, token](score, 2 * budget)\ndecode: same\n",
        "budget: 2\nkeep: top(score)\ndecode:\n  keep: top[kv](score, budget - 1)\n",
        "let: {near: 'max[layer](mean[kv, token](score)) * 0 + 4'}\n"
        "keep: top[token, kv](score, near)\ndecode: same\n",
        "state: {age: age + 2}\nkeep: top[kv, token](score, age + 3)\ndecode: same\n",
    ],
    ids=["budget", "heads compete", "decided", "state"],
)
def test_one_number_of_a_layer_for_which_its_heads_compete(rules):
    assert_agreement(f"{SCORE}{rules}")


@pytest.mark.thorough(every=3)
@pytest.mark.parametrize("start", ["0 * norm1[dim](key)", "0 * position", "norm1[dim](key)"])
@pytest.mark.parametrize("over", ["token", "kv, token", "kv"])
def test_states_are_whole_from_their_start(start, over):
    """A state that starts at 0 for a new entry starts at 0 for every entry."""
    over = "token" if start == "0 * position" else over
    next_ = f"heat / (1 + sum[{over}](heat)) + sum[group, query](attn(new))"
    state = f"state:\n  heat:\n    start: {start}\n    next: {next_}\n"
    assert_agreement(f"{state}score: heat\n{FILL}decode: same\n")


# Lets that look at other layers are decided in the prefill; rules of decode read what they were.
DECIDED = {
    "numbers": (
        "near: floor(8 * total / max[layer](total))",
        "recent(near) then top(score)",
    ),
    "numbers of KV heads": (
        "near: floor(8 * sum[token](heat) / max[layer](sum[kv, token](heat)))",
        "recent(near) then top(score)",
    ),
    "conditions": (
        "lazy: total > mean[layer](total)",
        "recent(3) where lazy else top(score)",
    ),
    "conditions of KV heads": (
        "lazy: sum[token](heat) > mean[layer](sum[token](heat))",
        "all where lazy else recent(3)",
    ),
    "query heads": (
        "lean: sum[token, query](attn(recent(3))) / max[layer](sum[query, token](attn(recent(3))))",
        "recent(2) then top(max[group](sum[query](attn(new)) * lean))",
    ),
    "layers before": (
        "jump: max[past](past(total, 2)) - total",
        "recent(2 + jump) then top(score)",
    ),
    "one layer": (
        "first: at(0, total)",
        "recent(4 where any[kv, token](heat > first) else 2) then top(score)",
    ),
    "absent": (
        "low: mean[layer](total) where layer > 0",
        "recent(3) where any[kv, token](heat > low) or layer == 0 else top(score, 5)",
    ),
    "through others": (
        "share: total / sum[layer](total)\n  near: 9 * share",
        "recent(near) then top(score)",
    ),
    "where parameters decide": (
        "near: 4 where flag else max[layer](total)",
        "recent(near) then top(score)",
    ),
}
BESIDE_DECODE = {
    "nothing": "",
    "merge": "merge: {into: nearest(key)}\n",
    "propagate": AWAY,
    "restart": f"{AWAY}  restart: true\n",
}


@pytest.mark.thorough(every=12)
@pytest.mark.slow
@pytest.mark.parametrize("beside", BESIDE_DECODE)
@pytest.mark.parametrize("name", DECIDED)
def test_decode_reads_what_the_prefill_decided(name, beside):
    let, keep = DECIDED[name]
    head = (
        f"params: {{flag: true}}\n{HEAT}let:\n  total: sum[kv, token](heat)\n  {let}\n"
        f"{BESIDE_DECODE[beside]}score: heat\nbudget: 6\n"
    )
    assert_agreement(f"{head}keep: recent(6)\ndecode:\n  keep: {keep}\n")
    assert_agreement(f"{head}keep: {keep}\ndecode: same\n")


def test_decided_numbers_stay():
    """At every step they are those of the prefill, however `heat` has changed."""
    text = (
        f"{HEAT}let: {{near: '3 + rank[layer](sum[kv, token](heat))'}}\nscore: heat\n"
        "decode: {keep: recent(near)}\n"
    )
    result = agree(written(text), *tensors(np.random.default_rng(1), SHAPE, 21, 6))
    sizes = [[len(heads[0]) for heads in step.kept] for step in result.steps]
    assert sorted(sizes[0]) == [4, 5, 6]
    assert all(step == sizes[0] for step in sizes)


@pytest.mark.thorough(besides=["0.3-31"])
@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 2, 13, 31])
@pytest.mark.parametrize("share", ["0.3", "0.4", "0.5833333333333334"])
def test_d2o_as_in_the_code(share, tokens):
    shape, settings = (5, 4, 2, 6), {"recent_share": share, "rate": "0.5"}
    for every in (1, 3):
        bound = bind(shipped_program("d2o-code"), ModelShape(*shape), settings, fold_interval=every)
        agree(bound, *tensors(np.random.default_rng(tokens), shape, tokens, 7))


@pytest.mark.parametrize(
    "direction", ["share", "1", "layer", "sum[token](own)", "sum[dim](own)", "norm1[kv, dim](own)"]
)
def test_a_shared_direction_of_any_axes(direction):
    assert_agreement(
        f"params: {{share: 0.6}}\nshare:\n  when: layer == 1\n  direction: {direction}\n"
    )


@pytest.mark.parametrize(
    "text",
    [
        "budget: 3 + count[past](past(layer, 2))\nkeep: recent(1) then top(norm1[dim](key))\n",
        "propagate:\n  first: layer == max[past](past(layer, 2))\n  tokens: recent(3)\n",
        "keep: recent(2) where max[past](past(layer, 2)) > 1 else recent(3)\n",
        "score: sum[head, query](attn(recent(split[layer](9, 1))))\nkeep: top(score, 3)\n",
    ],
)
def test_past_layers_of_what_no_tensor_decides(text):
    assert_agreement(text)


def test_a_total_that_every_layer_computes_alike():
    assert_agreement(
        "score: norm1[dim](key)\nbudget: 1 + split[layer](mean[layer](count[kv, token](score > 1))"
        " * sum[layer](layer / layers), sum[kv, token](score))\nkeep: top(score)\n"
    )


@pytest.mark.parametrize("count", ["layer * kv_heads", "1 + max[past](past(2 * layer, 2))"])
@pytest.mark.parametrize("axes", ["layer, kv, token", "layer, token"])
def test_each_layer_counts_its_own_winners(axes, count):
    won = "count[kv, token]" if "kv" in axes else "count[token]"
    assert_agreement(
        f"score: norm1[dim](key)\nbudget: 2 + {won}(top[{axes}](score, {count}))\n"
        "keep: top(score)\n"
    )


@pytest.mark.thorough(every=3)
@pytest.mark.parametrize("power", ["0.5", "2", "-1", "half", "half * norm1[dim](value)"])
def test_powers_of_negative_and_infinite_bases(power):
    """The result is 0 instead of NaN, in every branch of a platform's `pow`."""
    base = "(sum[dim](key) where position % 2 == 0 else log(0 * norm1[dim](key)))"
    score = f"score: {base} ^ ({power}) + norm1[dim](value)\n"
    assert_agreement(f"params: {{half: 0.5}}\n{score}{FILL}decode: same\n")


def test_what_is_reported_may_have_any_axes():
    """Found by the fuzzer: reports took lists of one axis."""
    assert_agreement(
        "let:\n  laziness: uniform(3)  # [token]\nscore: norm1[dim](key)\nbudget: 6\n"
        "keep: top(score)\ndecode:\n  keep: laziness > 0.5\nreport: [laziness]\n"
    )


@pytest.mark.parametrize("where", ["not recent(1)", "norm1[dim](key) > 1"])
def test_a_set_with_a_condition_of_entries_that_differ_by_head(where):
    """Found by the fuzzer: the condition was ignored where entries were missing."""
    assert_agreement(
        f"keep: sinks(2) then (recent(9) where {where})\ndecode: same\n", tokens=(1, 9, 13)
    )


HEADS_DIFFER = """state:
  heat: heat + sum[group, query](attn(new))
score: heat
budget: 6
keep: recent(2) then top(score)
decode:
"""


@pytest.mark.thorough(every=3)
@pytest.mark.parametrize(
    "decode",
    [
        "keep: top(max[kv](heat), 6)",
        "keep: heat > 0.2 * sum[token](mean[kv](heat))",
        "keep: rank[token](mean[kv](heat)) <= 6",
        "keep: top(heat, count[token](max[kv](heat) > 0.8))",
        "keep: heat > 0.9 * mean[token](mean[kv](heat))",
        "score: maxpool(mean[kv](heat), 3)",
        "score: mean[kv](heat)",
    ],
)
def test_numbers_of_a_layer_are_compared_of_all_its_entries(decode):
    """Also entries that only another KV head holds."""
    bound = written(f"{HEADS_DIFFER}  {decode}\n", (2, 4, 2, 8), 2)
    for seed in range(3):
        agree(bound, *tensors(np.random.default_rng(seed), (2, 4, 2, 8), 13, 4))


@pytest.mark.parametrize("into", ["next(1)", "nearest(key)"])
def test_what_leaves_is_merged_where_earlier_scores_were_there_and_later_ones_are_not(into):
    """A list may then lose more entries than have come since its last fold."""
    later = "(heat where heat < 0.3) where generated > 2 else heat"
    text = HEADS_DIFFER.replace("decode:", f"merge:\n  into: {into}\ndecode:\n  score: {later}")
    bound = written(text, (2, 4, 2, 8), 2)
    for seed in range(3):
        agree(bound, *tensors(np.random.default_rng(seed), (2, 4, 2, 8), 13, 6))


def test_a_state_begins_at_its_number_to_the_last_bit():
    """In float32, 0.3 is larger."""
    far = "sum[group, query](attn(new) where distance(new) > 100)"
    text = (
        f'state:\n  trust: {{start: 0.3, next: "trust + {far}"}}\n'
        "score: ceil(trust * 10)\nbudget: 4\nkeep: top(score)\ndecode: same\n"
    )
    bound = written(text, (1, 2, 1, 4), 2)
    recording = tensors(np.random.default_rng(0), (1, 2, 1, 4), 6, 4)
    expected = agree(bound, *recording)
    served = Store(bound, recording[:3], recording[3], kernels=TABLE)
    for _ in range(2):
        served.follow(2)
        assert served.held() == expected.steps[served.done - 1].kept


@pytest.mark.thorough(every=3)
@pytest.mark.parametrize(
    ("start", "next_"),
    [
        ("1 where sinks(4) else 0", None),
        ("position", None),
        ("exp(position / 100)", "0.9 * first"),
        ("1 where recent(5) else 0", "0.9 * first + sum[head, query](attn(new))"),
        ("1 where all else 0", "max(first * 0.9, mean[head](max[query](attn(new))))"),
    ],
)
def test_what_a_layers_state_starts_from_may_differ_by_head(start, next_):
    """Positions and sets have the axis `kv` once heads hold different tokens; the state has not."""
    update = "" if next_ is None else f"    next: {next_}\n"
    state = f"state:\n  first:\n    start: {start}\n{update}"
    assert_agreement(
        f"{state}score: norm2[dim](key) + first\nbudget: 6\nkeep: top(score)\ndecode: same\n"
    )


@pytest.mark.parametrize(
    "weight", ["exp(70 * cosine[dim](key, target(key)))", "exp(norm1[dim](key) * 100)"]
)
def test_what_would_be_infinite_in_the_cache_is_not_merged(weight):
    assert_agreement(
        f"{SCORE}{FILL}merge: {{into: next(2), weight: '{weight}', divide: 1}}\n"
        + ("decode: same\n")
    )


@pytest.mark.parametrize(
    "direction",
    [
        "exp(1000 * own) + below",
        "(own - below) / (layer - 1)",
        "own / (layer - 1) - below / (layer - 1)",
        "sqrt(own) + log(below * 0)",
        "max(own, below) * 1e36",
        "(own + below) * 1e39",
        "own * 0",
        "unit[dim](own - own)",
    ],
)
def test_vectors_without_a_direction_that_can_be_stored_stay(direction):
    text = f"keep: all\nshare:\n  when: layer == 1\n  direction: {direction}\n"
    expected = assert_agreement(f"{text}  apply: [key, value]\n", tokens=(1, 9))
    assert all(np.isfinite(x.astype(np.float32)).all() for layer in expected.merged for x in layer)


@pytest.mark.parametrize(
    "weight", ["cosine[dim](key, target(value))", "exp(sum[dim](value * target(key)) / 9)"]
)
def test_keys_may_be_compared_with_values(weight):
    assert_agreement(f"{SCORE}{FILL}merge: {{into: next(1), weight: '{weight}', divide: 2}}\n")


def test_states_of_a_merge_may_read_vectors_that_were_rounded_apart():
    """Their sums of three parts are often half-way between two numbers of float32."""
    size = '{start: 0, next: "0.5 * size + 0.5 * mean[kv, dropped](norm1[dim](key))"}'
    merge = f"merge:\n  into: next(1)\n  state:\n    size: {size}\n  weight: 1 / 3\n"
    shape = (4, 4, 2, 32)  # in which the executions had states that are 3e-9 apart
    trial(written(f"keep: recent(5)\n{merge}decode: same\n", shape))


@pytest.mark.parametrize("reduced", ["sum", "mean", "max", "min", "var"])
def test_merges_read_scores_that_look_at_all_layers(reduced):
    score = f"score: {reduced}[layer](norm1[dim](key))\n"
    assert_agreement(f"{score}{FILL}merge: {{into: next(3), weight: score}}\n")


def test_a_budget_that_holds_all_tokens_that_are_left():
    """Tokens have left, so that what remains is less than the prompt; nothing is taken before."""
    assert_agreement(
        f"{AWAY}score: norm1[dim](key) where var[kv](norm1[dim](key)) < 0\n"
        "budget: 3 where layer < 1 else 11\nkeep: top[token, kv](score)\n",
        tokens=(1, 24),
    )
