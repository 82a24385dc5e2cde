"""Binding: parameter values, digests, and facts that a server needs before it serves."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction

import pytest
from kvpolicy.dsl.bind.bind import bind
from kvpolicy.dsl.bind.bounds import max_entries
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.ir.nodes import ModelShape, When
from kvpolicy.dsl.ir.text import print_program
from kvpolicy.dsl.syntax.diagnostics import PolicyError
from kvpolicy.dsl.syntax.library import shipped
from kvpolicy.dsl.syntax.source import Source
from shipped_policies import shipped_program

SHAPE = ModelShape(layers=4, heads=8, kv_heads=2, head_dim=16)
HEADER = "policy: a-test\nlanguage: 1\nabout: a test\n"


def program(text: str):
    return load(Source("a-test.yaml", HEADER + text)).require()


def test_values_are_exact():
    bound = bind(shipped_program("snapkv"), SHAPE, {"rate": "1e-1", "window": " 8 "})
    assert bound.params["rate"] == Fraction(1, 10)
    assert bound.params["window"] == 8
    assert bound.params["capacity"] == 2048


def test_defaults_may_use_sizes_and_other_parameters():
    text = "params: {a: layers // 2, b: a + heads}\nkeep: recent(a) or sinks(b)\n"
    assert bind(program(text), SHAPE).params == {"a": 2, "b": 10}
    assert bind(program(text), SHAPE, {"a": "1"}).params == {"a": 1, "b": 9}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("windw", "3", "did you mean `window`?"),
        ("xyz", "3", "its parameters are `average`, `capacity`, `kernel`, `rate` and `window`"),
        ("window", "3.5", "`window` is 3.5; it must be a whole number, at least 1"),
        ("window", "0", "`window` is 0"),
        ("window", "1/2", "`window` is `1/2`; it is a number"),
        ("window", "9" * 40, "; a number has at most 18 digits"),
        ("window", "1e9999", "; a number has at most 18 digits"),
        ("window", "true", "`window` is `true`; it is a number"),
        ("window", "", "`window` is ``; it is a number"),
        ("average", "1", "it is `true` or `false`"),
        ("capacity", "31", "`capacity` is 31, `rate` is 0, `window` is 32"),
    ],
)
def test_refused_values(name, value, message):
    with pytest.raises(PolicyError) as error:
        bind(shipped_program("snapkv"), SHAPE, {name: value})
    assert message in str(error.value)
    place = "policies/snapkv.yaml:11:11" if "requires" in str(error.value) else "snapkv"
    assert str(error.value).startswith(f"{place}: error[")


def test_policy_without_parameters():
    with pytest.raises(PolicyError, match="it has no parameters"):
        bind(program("keep: recent(4)\n"), SHAPE, {"window": "3"})


def test_what_does_not_fit_is_refused():
    text = "params: {n: 4, budgeted: 8}\nbudget: budgeted\nscore: norm1[dim](key)\n"
    fits = program(text + "keep: recent(n) then sinks(2) then top(score)\n")
    bind(fits, SHAPE, {"n": "6"})
    with pytest.raises(PolicyError) as error:
        bind(fits, SHAPE, {"n": "7"})
    terms = "recent(n) then sinks(2)"
    head, _, line, caret, _ = str(error.value).splitlines()
    message = f"`{terms}` take 9 entries, but the budget is 8"
    assert head == f"a-test.yaml:7:7: error[does-not-fit]: {message}"
    assert line.index(terms) == caret.index("^")


@pytest.mark.parametrize(
    ("keep", "takes"),
    [
        ("(recent(7) where layer < 2 else recent(9)) then top(score)", 9),
        ("recent(3) then (sinks(2) then recent(9)) then top(score)", 11),
        ("(recent(3) then sinks(6)) then top(score)", 9),
        ("recent(9) then top(score, prompt / 4) then top(score)", 9),
        ("recent(9) where max[token](score) > 1 else recent(prompt)", 9),
        # Nothing of what another set may have taken is counted twice.
        ("recent(3) then (sinks(8) where layer < 2 else sinks(2)) then top(score)", None),
        ("recent(9) where budget > 8 else recent(8)", None),
    ],
)
def test_choices_and_sets_within_sets_have_to_fit(keep, takes):
    text = f"score: norm1[dim](key)\nbudget: 8 + 0 * layers\nkeep: {keep}\n"
    if takes is None:
        bind(program(text), SHAPE)
        return
    with pytest.raises(PolicyError, match=rf"takes? {takes} entries, but the budget is 8"):
        bind(program(text), SHAPE)


def test_a_branch_has_to_fit_where_it_is_chosen():
    text = "score: norm1[dim](key)\nbudget: 32 where layer < 2 else 4\nkeep: "
    bind(program(text + "recent(32) where layer < 2 else recent(4)\n"), SHAPE)
    with pytest.raises(PolicyError, match=r"takes 32 entries, but the budget is 4 at layer 2"):
        bind(program(text + "recent(32) where layer < 3 else recent(4)\n"), SHAPE)


def test_a_default_that_a_model_puts_out_of_range_is_shown():
    fits = program("params: {n: {default: layers, max: 3}}\nkeep: recent(n)\n")
    with pytest.raises(PolicyError, match=r"^a-test.yaml:4:23: error\[range\]: `n` is 4"):
        bind(fits, SHAPE)


@pytest.mark.parametrize("shape", [(0, 2, 1, 4), (2, 3, 2, 4), (2, 2, 1, 0)])
def test_impossible_models(shape):
    with pytest.raises(PolicyError, match="KV heads divide the heads"):
        bind(shipped_program("snapkv"), ModelShape(*shape))


def test_digest_names_the_meaning():
    plain = "score: norm1[dim](key)\nbudget: 0.5 * prompt\nkeep: top(score)\n"
    spaced = "# comment\nkeep:  top( score )\nbudget: (0.50*prompt)\nscore: |\n  norm1[dim](key)\n"
    named = "let: {size: 'norm1[dim](key)'}\nscore: size\nbudget: 0.5 * prompt\nkeep: top(score)\n"
    other = plain.replace("0.5", "0.6")
    digests = [bind(program(text), SHAPE).digest for text in (plain, spaced, named, other)]
    assert digests[0] == digests[1] == digests[2] != digests[3]
    assert all(len(digest) == 64 for digest in digests)


def test_digest_depends_on_parameter_values():
    snapkv = shipped_program("snapkv")
    digests = {bind(snapkv, SHAPE, {"window": str(n)}).digest for n in (8, 16, 32)}
    assert len(digests) == 3
    assert bind(snapkv, SHAPE).digest == bind(snapkv, SHAPE, {"window": "32.0"}).digest


def test_name_on_the_right_of_then_is_another_meaning():
    inline = "keep: recent(4) then top(position, 2)\n"
    named = "let: {best: 'top(position, 2)'}\nkeep: recent(4) then best\n"
    assert print_program(program(inline)) != print_program(program(named))


def test_queries():
    lava = bind(shipped_program("lava"), SHAPE, {"window": "16"})
    assert [lava.queries(n) for n in (0, 1, 15, 16, 1000)] == [0, 1, 15, 16, 16]
    assert bind(shipped_program("sinks-recent"), SHAPE).queries(1000) == 0
    deeper = (
        "score: sum[head, query](attn(recent(5 where layer > 1 else 2)))\n"
        "budget: 4\nkeep: top(score)\n"
    )
    assert bind(program(deeper), SHAPE).queries(100) == 5


def test_unused_branches_do_not_count():
    text = (
        "params: {values: false}\nbudget: 8\nkeep: top(score)\n"
        "score: norm1[dim](value) where values else norm1[dim](key)\n"
    )
    assert not bind(program(text), SHAPE).needs_values
    assert bind(program(text), SHAPE, {"values": "true"}).needs_values


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("snapkv", False),
        ("pyramidkv", False),
        ("lava", True),
        ("dynamickv", False),
        ("simlayerkv-prefill", False),
    ],
)
def test_needs(name, values):
    assert bind(shipped_program(name), SHAPE).needs_values == values


def test_splitting_known_numbers_needs_no_data():
    exact = bind(shipped_program("pyramidkv"), SHAPE, {"exact_total": "true", "capacity": "64"})
    assert not any(node.when >= When.LAYER for node in exact.lowered.prefill.budget.walk())
    assert max_entries(exact, 1000) == 4 * 2 * 64


@pytest.mark.parametrize("name", shipped())
def test_bound_never_exceeds_the_prompt(name):
    bound = bind(shipped_program(name), SHAPE)
    for tokens in (0, 1, 7, 100, 100_000):
        assert 0 <= max_entries(bound, tokens) <= 4 * 2 * tokens


WHENS = [
    "generated % interval == 0",
    "generated > sqrt(prompt) and generated % max(1, prompt // 9) == 1",
    "(generated == 3 or generated >= prompt * rate) and cos(prompt) > -2",
    "prompt > 40 where rate > 1 else generated * rate > 2.5",
    "generated < 0",
]


@pytest.mark.parametrize("when", [None, *WHENS])
def test_the_next_step_at_which_entries_leave_is_the_first_of_all(when):
    given = "" if when is None else f"  when: {when}\n"
    text = "params: {interval: 4, rate: 0.3}\ndecode:\n" + given + "  keep: recent(8)\n"
    bound = bind(program(text), SHAPE, fold_interval=3)
    for prompt in (0, 1, 7, 50, 51):
        for first, most in ((1, 30), (2, 1), (4, 60), (13, 0)):
            steps = (g for g in range(first, first + most) if bound.leaves_at(g, prompt))
            assert bound.next_leaving(first, prompt, most) == next(steps, None), (prompt, first)


def test_binding_imports_neither_torch_nor_numpy():
    code = (
        "import sys; from kvpolicy.dsl.bind.bind import bind; "
        "from kvpolicy.dsl.check.policy import load; "
        "from kvpolicy.dsl.ir.nodes import ModelShape; "
        "from kvpolicy.dsl.bind.bounds import max_entries; "
        "max_entries(bind(load('lava').require(), ModelShape(2, 4, 2, 8)), 100); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_condition_on_the_prompt_rules_a_propagation_out():
    asl = bind(shipped_program("asl"), SHAPE, {"capacity": "100"})
    # Data decide above the capacity; L, after the last layer, says that nothing is propagated.
    assert asl.propagation_layer(101) is None
    assert asl.propagation_layer(100) == SHAPE.layers
    twice = bind(shipped_program("asl"), SHAPE, {"capacity": "100", "two_pass": "true"})
    assert (twice.propagation_layer(101), twice.propagation_layer(100)) == (None, SHAPE.layers)
