"""Budgets as shares of a prompt: the parameter that makes each shipped policy keep them."""

import numpy as np
import pytest
from kvpolicy.dsl.bind.bind import bind
from kvpolicy.dsl.bind.bounds import max_entries
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.interpret.interpreter import interpret
from kvpolicy.dsl.ir.nodes import Delivered, ModelShape
from kvpolicy.dsl.syntax.diagnostics import PolicyError
from kvpolicy.dsl.syntax.library import shipped
from kvpolicy.dsl.syntax.source import Source
from kvpolicy.evaluation.asking.budgets import kept, solve, thins_some
from kvpolicy.evaluation.asking.variants import full_kv, on_server, variants

SHAPE = ModelShape(6, 8, 4, 16)
SHARES = [0.5, 0.25, 0.125, 0.0625]
LENGTHS = [512, 1000]
# Of the default settings; pyramidinfer reaches shares above 77 % only.
WITHOUT = {"d2o-code", "minicache", "pyramidinfer", "roco"}
SOME_LAYERS = {"simlayerkv", "simlayerkv-prefill"}


@pytest.mark.thorough(every=4)
@pytest.mark.parametrize("name", shipped())
def test_shares_of_shipped_policies(name):
    """The predicted share is within 2 % of the budget, or there is a message that none fits."""
    found, notes = variants([name], [], SHARES, LENGTHS, SHAPE)
    if name in WITHOUT:
        assert [(v.alias, v.budget, v.setting) for v in found] == [(name, None, {})]
        assert notes == [f"no parameter of {name} sets such a share; it is served once as it is"]
        return
    assert {(v.budget, n) for v in found for n in v.lengths} == {
        (share, length) for share in SHARES for length in LENGTHS
    }
    for variant in found:
        for length, share in variant.predicted.items():
            loose = 0.01 if name == "d2o" else 0  # each layer may keep 1 % beside its share
            assert 0.98 * variant.budget <= share <= 1.02 * variant.budget + loose, length
    assert bool(notes) == (name in SOME_LAYERS)


@pytest.mark.parametrize("name", sorted(set(shipped()) - WITHOUT - SOME_LAYERS))
def test_what_is_predicted_is_kept(name):
    """On tensors, policies keep what the plan predicts, or less if data decide."""
    shape, tokens, share = ModelShape(4, 2, 2, 8), 96, 0.5
    [variant] = variants([name], [], [share], [tokens], shape)[0]
    bound = bind(load(name).program, shape, variant.setting)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((4, 2, tokens, 8)).astype(np.float32) for _ in range(3))
    result = interpret(bound, q, k, v)
    entries = sum(int(layer.sum()) for layer in result.kept)
    assert entries <= kept(bound, tokens)[0]
    assert entries >= 0.9 * share * 8 * tokens


def test_a_share_is_one_value_for_all_lengths_where_the_parameter_is_a_share():
    found, _ = variants(["lava", "streamingllm"], [], [0.125], [512, 1024], SHAPE)
    assert {v.alias: (dict(v.setting), v.lengths) for v in found} == {
        "lava@0.125": ({"rate": "0.125"}, (512, 1024)),
        "streamingllm@0.125@512": ({"window": "60"}, (512,)),
        "streamingllm@0.125@1024": ({"window": "124"}, (1024,)),
    }


def test_settings_come_first():
    """The user's settings stay, and budgets take them into account."""
    words = ["snapkv", "sinks-recent"]
    found, notes = variants(words, ["window=8", "sinks-recent.start=0"], [0.0625], [256], SHAPE)
    assert [dict(v.setting) for v in found] == [
        {"window": "8", "rate": "0.0625"},
        {"start": "0", "rate": "0.0625"},
    ]
    assert not notes


def test_a_share_that_the_user_has_set():
    """Another parameter that could reach it (here the window) is left alone."""
    found, notes = variants(["snapkv"], ["snapkv.rate=0.3"], [0.5], [256], SHAPE)
    assert [(v.alias, v.budget, dict(v.setting)) for v in found] == [
        ("snapkv", None, {"rate": "0.3"})
    ]
    [note] = notes
    assert note.startswith("no parameter of snapkv sets such a share, beside those of --set (rate)")


def test_a_setting_for_all_is_not_for_what_sets_the_share():
    """`--set window=8` means the observation window, not that of StreamingLLM."""
    words = ["snapkv", "streamingllm"]
    found, notes = variants(words, ["window=8"], [0.5], [256], SHAPE)
    assert [dict(v.setting) for v in found] == [{"window": "8", "rate": "0.5"}, {"window": "124"}]
    assert notes == ["window sets the share of streamingllm, so `--set window=...` is not for it"]
    found, notes = variants(words, ["window=8"], [], [256], SHAPE)
    assert [dict(v.setting) for v in found] == [{"window": "8"}] * 2
    assert not notes


def test_a_share_that_no_value_reaches_is_left_out():
    """A window of 32 tokens is more than 6.25 % of 256."""
    found, notes = variants(["snapkv"], [], [0.5, 0.0625], [256, 512], SHAPE)
    assert {(v.alias, v.lengths) for v in found} == {
        ("snapkv@0.5", (256, 512)),
        ("snapkv@0.0625@512", (512,)),
    }
    [note] = notes
    assert note.startswith("snapkv keeps 6.25 % of 256 tokens at no value of a parameter")


def test_layers_that_data_choose():
    """A budget applies only to the entries kept in layers that drop some."""
    for name in SOME_LAYERS:
        [variant], notes = variants([name], [], [0.25], [512], SHAPE)
        bound = bind(load(name).program, SHAPE, variant.setting)
        assert thins_some(bound, 512)
        assert max_entries(bound, 512) == 24 * 512
        assert notes == [
            f"data decide which layers {name} thins; the share is what it keeps of those"
        ]


@pytest.mark.parametrize("whole", ["layer < 2", "gate > 0.66"])
def test_layers_and_heads_that_are_known_to_be_whole(whole):
    """A third is whole whatever the rate, so that a quarter cannot be kept."""
    text = (
        "policy: mine\nlanguage: 1\nparams: {rate: {default: 0.9, unit: ratio}}\n"
        "data: {gate: {axes: [layer, kv]}}\n"
        f"keep: all where {whole} else recent(rate * prompt)\n"
    )
    gate = [[(4 * i + j) / 23 for j in range(4)] for i in range(6)]
    program = load(Source("mine.yaml", text)).require()
    program = program.given({"gate": Delivered(gate, "a test")})
    parameter, solved = solve(program, SHAPE, {}, [0.5, 0.25], [1000])
    [(share, [found])] = solved.items()
    assert (parameter, share, found.value, found.predicted) == ("rate", 0.5, "0.25", {1000: 0.5})
    bound = bind(program, SHAPE, {"rate": "0.25"})
    assert kept(bound, 1000) == (max_entries(bound, 1000), True)
    assert not thins_some(bound, 1000)


def test_a_policy_of_ones_own():
    """Without relying on shipped names, any parameter that decides the entries is found."""
    source = Source(
        "mine.yaml",
        "policy: mine\nlanguage: 1\nabout: a test\n"
        "params:\n  last: {default: 100, unit: tokens, min: 1}\n"
        "keep: recent(2 * last + 40)\n",
    )
    program = load(source).require()
    parameter, solved = solve(program, SHAPE, {}, [0.3, 0.5], [400])
    assert parameter == "last"
    assert {share: [(v.parameter, v.value) for v in vs] for share, vs in solved.items()} == {
        0.3: [("last", "40")],
        0.5: [("last", "80")],
    }


@pytest.mark.parametrize(
    ("param", "require", "value"),
    [
        ("default: 100, unit: tokens, max: 300", "", "90"),
        ("default: 80, unit: tokens, min: 80, max: 95", "", "90"),
        ("default: 90, unit: tokens", "last <= 95", "90"),
        ("default: 99, unit: tokens, odd: true, max: 201", "", "89"),
        ("default: 10, unit: tokens, choices: [10, 91, 101]", "", "91"),
        ("default: 0.1, unit: ratio, choices: [0.1, 0.226, 0.25]", "", "0.226"),
    ],
)
def test_values_that_a_policy_refuses_are_none_to_choose(param, require, value):
    tokens = "last" if "tokens" in param else "floor(last * prompt)"
    source = Source(
        "mine.yaml",
        f"policy: mine\nlanguage: 1\nabout: a test\nparams:\n  last: {{{param}}}\n"
        f"require: [{require}]\nkeep: sinks(10) or recent({tokens})\n",
    )
    _, solved = solve(load(source).require(), SHAPE, {}, [0.25], [400])
    assert [each.value for each in solved[0.25]] == [value]


@pytest.mark.parametrize(
    ("words", "settings", "message"),
    [
        (["lavva"], [], "did you mean `lava`?"),
        (["lava"], ["rate=2"], "`rate` is 2; it must be"),
        (["lava"], ["capcity=2"], "no policy here has a parameter `capcity`"),
        (["lava"], ["lava.capcity=2"], "did you mean `capacity`?"),
        (["lava"], ["snapkv.rate=0.5"], "no policy here is called `snapkv`; there is `lava`"),
        (["lava"], ["rate"], "`rate` is not NAME=VALUE or POLICY.NAME=VALUE"),
        (["none"], ["rate=1"], "no policy here has a parameter `rate`"),
    ],
)
def test_refusals(words, settings, message):
    with pytest.raises(PolicyError) as error:
        variants(words, settings, [0.5], [512], SHAPE)
    assert message in str(error.value)


def test_two_files_of_one_name(tmp_path):
    other = tmp_path / "other.yaml"
    other.write_text(shipped()["lava"].read_text())
    with pytest.raises(PolicyError, match="another file is called `lava` too"):
        variants(["lava", str(other)], [], [], [512], SHAPE)
    assert len(variants(["lava", str(shipped()["lava"]), "none"], [], [], [512], SHAPE)[0]) == 1


def test_policies_of_a_running_server():
    served = [{"name": "a@1", "path": "a.yaml", "settings": {"rate": 0.5}}]
    [variant] = on_server(["none", "a@1"], served, [512])
    assert (variant.alias, variant.policy, variant.budget) == ("a@1", "a@1", None)
    assert variant.setting == {"rate": "0.5"}
    assert on_server(["all"], served, [512]) == [variant]
    with pytest.raises(PolicyError, match="has no policy called `b`; it has `a@1`"):
        on_server(["b"], served, [512])
    with pytest.raises(PolicyError, match="serves no policies, so it cannot be asked for `b`"):
        on_server(["b"], [], [512])


def test_all_is_every_shipped_policy():
    found, _ = variants(["all"], [], [], [512], SHAPE)
    assert [v.policy for v in found] == list(shipped())
    assert full_kv([512]).label == "none"


def test_a_budget_is_asked_for_once():
    found, _ = variants(["lava"], [], [0.5, 0.50, 0.5000001, 0.25], [512], SHAPE)
    assert [each.alias for each in found] == ["lava@0.5", "lava@0.25"]
