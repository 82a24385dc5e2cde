"""What tensors of the model (`data`) decide: the head tables of binding, and every execution."""

from __future__ import annotations

import json
import re
from random import Random

import numpy as np
import pytest
from agreement import HEADER, agree
from kvpolicy.dsl.bind.bind import Bound, bind
from kvpolicy.dsl.bind.bounds import Bounds, max_entries
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.data.given import with_data
from kvpolicy.dsl.interpret.interpreter import interpret
from kvpolicy.dsl.ir.nodes import Delivered, ModelShape, Node
from kvpolicy.dsl.syntax.diagnostics import PolicyError
from kvpolicy.dsl.syntax.source import Source
from kvpolicy.dsl.tools.trial_cases import sampled
from recordings import tensors

SHAPE = ModelShape(3, 6, 2, 4)
DATA = (
    "data:\n  gate: {axes: [layer, kv]}\n  part: {axes: [layer]}\n  weight: {axes: [kv, group]}\n"
)
RULE = "keep: recent(2) where gate > 0.5 else all\n"
LEAVES = ("gate", "gate", "part", "weight", "layer", "0.5", "2", "layers")
STEPS = (
    "({x} + {y})", "({x} - {y})", "({x} * {y})", "({x} / {y})", "max({x}, {y})", "({x} // {y})",
    "({x} where {x} > {y})", "({x} where {y} < 0.4 else {y})", "sqrt({x})", "floor(7 * {x})",
    "round(3 * {x})", "exp({x})", "-({x})", "({x} % {y})", "({x} where layer > 0 and {y} > 0.3)",
)  # fmt: skip
OVER = ("kv", "group", "layer", "layer, kv", "kv, layer", "head", "layer, head")
ALONG = (
    "sum[{a}]({x})", "mean[{a}]({x})", "max[{a}]({x})", "var[{a}]({x})", "count[{a}]({x} > 0.5)",
    "rank[{a}]({x})", "(1 where top[{a}]({x}, {n}) else 0)", "count[{a}](top[{a}]({x}, {n}))",
    "normalize[{a}](abs({x}))", "(1 where any[{a}]({x} > 0.7) else 3)",
)  # fmt: skip


def expression(random: Random, depth: int) -> str:
    if depth == 0:
        return random.choice(LEAVES)
    x, y = expression(random, depth - 1), expression(random, random.randrange(depth))
    if random.random() < 0.5:
        form, n = random.choice(ALONG), random.choice(("1", "2", "3.5", "layer", "0"))
        return form.format(x=f"({x})", a=random.choice(OVER), n=n)
    return random.choice(STEPS).format(x=x, y=y)


def bound_to(text: str, shape: ModelShape = SHAPE, **numbers: object) -> Bound:
    program = load(Source("a-test.yaml", HEADER + text)).require()
    delivered = {name: Delivered(x, "a test") for name, x in numbers.items()}
    program = program.given(delivered) if numbers else sampled(program, shape)
    return bind(program, shape)


def prompt(shape: ModelShape, tokens: int = 5, steps: int = 0):
    sizes = (shape.layers, shape.heads, shape.kv_heads, shape.head_dim)
    return tensors(np.random.default_rng(0), sizes, tokens, steps, ties=False)


def of_layer(node: Node, layer: int, shape: ModelShape) -> object:
    """The values of a table at a layer as the interpreter reports them."""
    sizes = [{"kv": shape.kv_heads, "group": shape.group}[axis] for axis in node.type.axes]
    numbers = [None if x is None else float(x) for x in node.head_table.layers[layer]]
    return np.array(numbers, object).reshape(sizes).tolist()


def nearly(one: object, other: object) -> bool:
    if isinstance(one, list):
        return len(one) == len(other) and all(map(nearly, one, other))
    numbers = (float("nan" if x is None else x) for x in (one, other))
    return np.isclose(*numbers, rtol=1e-9, atol=1e-12, equal_nan=True)


def test_tables_are_what_the_interpreter_computes():
    random, compared = Random(1), 0
    while compared < 250:
        text = expression(random, random.randint(1, 4))
        shape = random.choice((SHAPE, ModelShape(4, 4, 4, 2), ModelShape(1, 4, 1, 2)))
        lets = f"{DATA}let:\n  x: |\n    {text}\nreport: [x]\nkeep: recent(2)\n"
        try:
            bound = bound_to(lets, shape)
        except PolicyError:  # axes that are missing, or a count that may be absent
            continue
        node = bound.folded.prefill.lets["x"]
        if node.op != "head_table":  # no tensor decides it
            continue
        named = interpret(bound, *prompt(shape)[:3]).named["x"]
        found = [of_layer(node, layer, shape) for layer in range(shape.layers)]
        assert nearly(found, named), text
        compared += 1


@pytest.mark.parametrize(
    "text",
    [
        "keep: all where gate > 0.5 else sinks(1) then recent(2)\ndecode: same\n",
        "score: norm1[dim](key) * gate\nkeep: top(score, 4)\n",
        "score: norm1[dim](key)\nbudget: 2 + 5 * gate\nkeep: recent(1) then top(score)\n"
        "decode: same\n",
        "score: max[group, query](attn(recent(2)) * weight)\nbudget: prompt * part\n"
        "keep: top(score)\n",
        "score: norm1[dim](key)\nbudget: split[layer](9, part)\nkeep: top(score)\n",
        "state: {heat: 'heat * gate + sum[group, query](attn(new))'}\nscore: heat\nbudget: 4\n"
        "keep: recent(1) then top(score)\ndecode: same\n",
        "keep: all where rank[kv](gate) == 1 else recent(3)\n",
        "score: max[group](weight * sum[query](attn(recent(2))))\nkeep: top(score, 4)\n"
        "decode: same\n",
        "let: {kinds: 'max[kv](weight)'}\nscore: max[group, query](attn(recent(2)) * kinds)\n"
        "budget: 5\nkeep: recent(1) then top(score)\ndecode: same\n",
        "let: {some: '(gate where gate > 0.5)'}\nscore: norm1[dim](key) * some\n"
        "keep: recent(2) then top(score, 3)\ndecode: same\n",
        "let: {some: '(part where part > 0.5)'}\nscore: norm1[dim](key) * some\n"
        "keep: recent(2) then top(score, 3)\ndecode: same\n",
        "let: {best: 'top[layer, kv](gate, 2)'}\nkeep: sinks(1) where best else recent(4)\n"
        "decode: same\n",
        "let: {before: 'max[past](past(gate, 2))'}\nkeep: all where before > 0.6 else recent(3)\n",
        "keep: recent(3) where at(0, part) > part else sinks(2)\ndecode: same\n",
        "propagate: {first: layer == 1, tokens: 'recent(2 + 4 * part)'}\nkeep: recent(4 * gate)\n",
        "score: norm2[dim](value)\nbudget: 3\nkeep: top(score)\n"
        "merge: {into: nearest(key), own: 1 + gate, weight: part}\ndecode: same\n",
        "share:\n  when: layer == 1\n  direction: unit[dim](own * gate + below)\n"
        "  except: recent(1)\n",
    ],
)
def test_every_execution_with_tensors(text):
    for shape in (SHAPE, ModelShape(3, 4, 4, 4)):
        bound = bound_to(DATA + text, shape)
        if bound.folded.decode is None:
            assert interpret(bound, *prompt(shape, 9)[:3]).kept
        agree(bound, *prompt(shape, 9, 5))


def test_memory_is_reserved_for_what_each_head_keeps():
    text = f"{DATA}keep: all where gate > 0.5 else sinks(1) then recent(2)\n"
    gate = [[0.9, 0.1], [0.2, 0.5], [1, 1]]
    bound = bound_to(text, gate=gate, part=[0, 0, 0], weight=[[1, 2, 3], [4, 5, 6]])
    size = Bounds(bound, 100).kept
    assert (size.head, size.layer, size.total) == ([100, 3, 100], [103, 6, 200], 309)
    assert max_entries(bound, 2) == 12
    keep = bound.lowered.prefill.keep
    assert Bounds(bound, 100).is_exact(keep)
    rules = "score: norm1[dim](key)\nbudget: floor(gate * prompt)\nkeep: top(score)\n"
    budget = bound_to(DATA + rules, gate=gate, part=[0, 0, 0], weight=[[1, 2, 3], [4, 5, 6]])
    assert max_entries(budget, 100) == 90 + 10 + 20 + 50 + 200


@pytest.mark.parametrize(
    ("rules", "number"),
    [
        ("keep: top(score)", 26),
        ("keep: recent(1) then top(score)", 26),
        ("keep: recent(2) then top(score)", None),  # a head of budget 1 keeps both
        ("keep: recent(budget)", 26),
        ("keep: recent(1) then top(score, min(floor(gate), 7))", 30),
        ("keep: recent(1) then top(score, budget)", None),  # one head has too few tokens for both
        ("keep: not recent(budget)", 28),
        ("keep: top[kv, token](score)", 33),  # one head takes what the other lacks tokens for
    ],
)
def test_numbers_of_each_head_are_known_before_a_prompt(rules, number):
    """Budgets are 17, 2, 3, 1, 5 and 6; the prompt has 9 tokens."""
    text = f"{DATA}score: norm1[dim](key)\nbudget: floor(gate)\n{rules}\n"
    gate = [[17.5, 2.9], [3, 1], [5, 6.9]]
    bound = bound_to(text, gate=gate, part=[0, 0, 0], weight=[[1, 2, 3], [4, 5, 6]])
    kept = sum(int(x.sum()) for x in interpret(bound, *prompt(SHAPE, 9)[:3]).kept)
    bounds = Bounds(bound, 9)
    assert bounds.is_exact(bound.lowered.prefill.keep) == (number is not None)
    assert number in (None, kept)
    assert bounds.kept.total == sum(bounds.kept.layer) >= kept
    assert number in (None, bounds.kept.total)


def test_what_heads_leave_over_is_bounded():
    text = f"{DATA}keep: not (all where gate > 0.5 else recent(2))\n"
    for gate in ([[0.9, 0.1], [0.2, 0.5], [1, 1]], [[0, 0], [0, 0], [0, 0]]):
        bound = bound_to(text, gate=gate, part=[0, 0, 0], weight=[[1, 2, 3], [4, 5, 6]])
        kept = sum(int(x.sum()) for x in interpret(bound, *prompt(SHAPE, 9)[:3]).kept)
        assert kept <= max_entries(bound, 9)


def test_digests_tell_tensors_apart():
    text = f"{DATA}keep: recent(3) where gate > part else recent(1)\n"
    numbers = {"gate": [[1, 2]] * 3, "part": [1.5] * 3, "weight": [[1, 2, 3]] * 2}
    digest = bound_to(text, **numbers).digest
    assert digest == bound_to(text, **numbers).digest
    assert digest != bound_to(text, **{**numbers, "gate": [[2, 2]] * 3}).digest


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (None, "needs the tensor `gate`, [layer, kv] of the model"),
        ([[0.5, 0.5]], "has the shape [1, 2]; [layer, kv] of this model is [3, 2]"),
        ([[0.5, 0.5], [0.5], [0.5, 0.5]], "`gate` has lists of 1 and 2 values side by side"),
        ([0.5, 0.5, 0.5], "has the shape [3]"),
        ([], "has the shape [0]"),
        ([[], [], []], "has the shape [3, 0]"),
        ([[0.5, 0.5], [0.5, "x"], [0.5, 0.5]], "`gate[1][1]` is 'x'; finite numbers"),
        ([[0.5, 0.5], [0.5, True], [0.5, 0.5]], "`gate[1][1]` is True; finite numbers"),
        ([[0.5, 0.5], [0.5, float("nan")], [0.5, 0.5]], "`gate[1][1]` is nan; finite numbers"),
        ([[0.5, 0.5], [0.5, 10**400], [0.5, 0.5]], "finite numbers are accepted"),
        ([[0.5, 0.5], [0.5, -1], [0.5, 0.5]], "`gate[1][1]` is -1; at least 0 is accepted"),
        ([[0.5, 0.5], [0.5, 1.5], [0.5, 0.5]], "`gate[1][1]` is 1.5; at most 1 is accepted"),
        ("gate", "`gate` is 'gate'; [layer, kv] takes lists of numbers"),
    ],
)
def test_tensors_that_are_refused(numbers, message):
    text = f"data: {{gate: {{axes: [layer, kv], min: 0, max: 1}}}}\n{RULE}"
    program = load(Source("a-test.yaml", HEADER + text)).require()
    delivered = {"gate": Delivered(numbers, "g.json"), "other": Delivered(1, "o.json")}
    program = program.given({} if numbers is None else delivered)
    with pytest.raises(PolicyError, match=re.escape(message)) as error:
        bind(program, SHAPE)
    assert str(error.value).startswith("a-test" if numbers is None else "g.json")


def test_axes_may_be_declared_in_any_order():
    rule = "keep: all where gate > 0.5 else recent(1)\n"
    one = bound_to(f"data: {{gate: {{axes: [layer, kv]}}}}\n{rule}", gate=[[1, 0], [0, 0], [0, 1]])
    other = bound_to(f"data: {{gate: {{axes: [kv, layer]}}}}\n{rule}", gate=[[1, 0, 0], [0, 0, 1]])
    assert one.tensors["gate"].layers == other.tensors["gate"].layers


def test_files_of_tensors(tmp_path):
    text = f"data: {{gate: {{axes: [layer, kv]}}}}\n{RULE}"
    program = load(Source("a-test.yaml", HEADER + text)).require()
    numbers = [[0.25, 1.0], [0.5, -3e-2]]
    (tmp_path / "a.json").write_text(json.dumps(numbers))
    np.save(tmp_path / "a.npy", np.array(numbers))
    (tmp_path / "a.tsv").write_text("# heads of layer 0\n0.25\t1\n\n.5, -3e-2  # of layer 1\n")
    for file in ("a.json", "a.npy", "a.tsv"):
        [found] = with_data([program], [f"gate={tmp_path / file}"])
        assert found.delivered == {"gate": (numbers, str(tmp_path / file))}
    (tmp_path / "bad.json").write_text("[[0.25, 1.0]")
    (tmp_path / "bad.npy").write_bytes(b"no numbers")
    np.save(tmp_path / "objects.npy", np.array([None]), allow_pickle=True)
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe")
    for file in ("bad.json", "bad.npy", "objects.npy", "bad.txt", "nowhere.tsv", "."):
        with pytest.raises(PolicyError, match=re.escape(str(tmp_path / file).removesuffix("/."))):
            with_data([program], [f"gate={tmp_path / file}"])


def test_a_large_file_is_refused(tmp_path):
    text = f"data: {{gate: {{axes: [layer]}}}}\n{RULE}"
    program = load(Source("a-test.yaml", HEADER + text)).require()
    with (tmp_path / "a.json").open("wb") as file:
        file.truncate(1 << 25)
    with pytest.raises(PolicyError, match="larger than 16 MiB"):
        with_data([program], [f"gate={tmp_path / 'a.json'}"])


@pytest.mark.parametrize("place", ["params: {n: 'max[layer, kv](gate)'}", "require: [gate > 0]"])
def test_where_no_tensor_is_known(place):
    text = f"data: {{gate: {{axes: [layer, kv]}}}}\n{place}\n{RULE}"
    checked = load(Source("a-test.yaml", HEADER + text))
    assert "`gate` is a tensor; only parameters and model sizes are known here" in str(
        [d.message for d in checked.errors]
    )
