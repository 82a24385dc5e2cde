"""The format of `NAME.test.yaml`: what it can express, and how its defects are reported."""

from __future__ import annotations

import pytest
import torch
from kvpolicy.dsl.tools.cli import main

HEADER = "policy: p\nlanguage: 1\nabout: a policy\n"
H2O = """
params: {heavy: 2, window: 2}
state: {heat: 'heat + sum[group, query](attn(new))'}
score: heat
budget: heavy + window
keep: recent(window) then top(score)
decode: same
"""
MODEL = "model: {layers: 1, heads: 2, kv_heads: 2, head_size: 4}"
STEPS = f"""
    {MODEL}
    tokens: 9
    steps: 3
    q: {{seed: 1}}
    k: {{seed: 101}}
    q_step: {{seed: 7}}
    k_step: {{seed: 9}}
"""


def outcome(tmp_path, policy: str, case: str) -> int:
    (tmp_path / "p.yaml").write_text(HEADER + policy)
    (tmp_path / "p.test.yaml").write_text(f"policy: p\ntests:\n  - name: a case\n{case}\n")
    return main(["test", str(tmp_path / "p.yaml")])


def test_steps(tmp_path):
    after = '    kept: "0-1 7-8"\n    after: {1: "0-1 8-9", 3: [["0-1 10-11", "0-1 10-11"]]}'
    assert outcome(tmp_path, H2O, STEPS + after) == 0


def test_steps_that_differ(tmp_path, capsys):
    after = '    after: {2: {kept: "0-2 10"}}'
    assert outcome(tmp_path, H2O, STEPS + after) == 1
    expected = (
        "after step 2: layer 0, KV head 0: kept 0-1 9-10; 9 should not be there; 2 is missing"
    )
    assert expected in capsys.readouterr().out


def test_fold_interval(tmp_path):
    after = '    fold_interval: 2\n    after: {1: "0-1 7-9", 2: "0-1 9-10", 3: "0-1 9-11"}'
    assert outcome(tmp_path, H2O, STEPS + after) == 0


def test_propagation(tmp_path):
    policy = "propagate: {first: layer == 1, tokens: 'sinks(2) then recent(1)'}\n"
    case = """
    model: {layers: 3, heads: 1, kv_heads: 1, head_size: 2}
    tokens: 6
    selected_layer: 1
    propagated: "0-1 5"
    kept: [["0-5"], ["0-5"], ["0-1 5"]]
"""
    assert outcome(tmp_path, policy, case) == 0
    assert outcome(tmp_path, policy, case.replace("selected_layer: 1", "selected_layer: none")) == 1
    assert outcome(tmp_path, policy, case.replace('propagated: "0-1 5"', "propagated: none")) == 1


def test_propagation_of_every_layer(tmp_path):
    policy = "propagate: {every: layer < 2, tokens: 'recent(length - 1)'}\n"
    case = """
    model: {layers: 3, heads: 1, kv_heads: 1, head_size: 2}
    tokens: 6
    propagated: {0: "1-5", 1: "2-5"}
    selected_layer: none
    kept: [["0-5"], ["1-5"], ["2-5"]]
"""
    assert outcome(tmp_path, policy, case) == 0


MERGE = """
keep: recent(2)
merge:
  into: nearest(key)
  state: {bar: {start: 'mean[kv, dropped](cosine[dim](key, target(key)))', next: bar}}
"""


def test_merges(tmp_path, capsys):
    case = """
    model: {layers: 1, heads: 1, kv_heads: 1, head_size: 2}
    tokens: 3
    k: [[3, 0], [0, 1], [1, 0]]
    v: [[2, 2], [0, 0], [0, 1]]
    kept: "1-2"
    merged: {key: 1, value: 1}
    thresholds: 1
"""
    assert outcome(tmp_path, MERGE, case) == 0
    assert outcome(tmp_path, MERGE, case.replace("thresholds: 1", "thresholds: [0.9]")) == 1
    assert "thresholds are [1.0], not [0.9]" in capsys.readouterr().out
    assert outcome(tmp_path, MERGE, case.replace("value: 1}", "value: 1.1}")) == 1


def test_what_is_reported(tmp_path, capsys):
    policy = (
        "\nlet:\n  size: mean[token](norm1[dim](key))\n"
        "keep: recent(2) where mean[kv](size) > 1 else all\ndecode: same\nreport: [size]\n"
    )
    case = """
    model: {layers: 2, heads: 2, kv_heads: 2, head_size: 1}
    tokens: 3
    steps: 1
    k: [[[[1], [2], [3]], [[0], [0], [0]]], [[[4], [5], [6]], [[3], [2], [1]]]]
    reported: {size: [[2, 0], [5, 2]]}
    after: {1: {reported: {size: [[1.5, 0], [3.66666667, 1]]}}}
"""
    assert outcome(tmp_path, policy, case) == 0
    assert outcome(tmp_path, policy, case.replace("[5, 2]", "[5, none]")) == 1
    assert "size is [[2.0, 0.0], [5.0, 2.0]], not [[2.0, 0.0], [5.0, None]]" in (
        capsys.readouterr().out
    )
    assert outcome(tmp_path, policy, case.replace("{size: [[2", "{sise: [[2")) == 1
    assert "the policy has no sise to compare" in capsys.readouterr().out


def test_what_is_reported_may_be_infinite(tmp_path, capsys):
    policy = "let: {size: 'log(norm1[token, dim](key))'}\nkeep: all where size > 0 else recent(1)\n"
    case = """
    model: {layers: 1, heads: 1, kv_heads: 1, head_size: 1}
    tokens: 3
    reported: {size: [[-inf]]}
"""
    assert outcome(tmp_path, policy + "report: [size]\n", case) == 0
    assert outcome(tmp_path, policy + "report: [size]\n", case.replace("-inf", "inf")) == 1
    assert "size is [['-inf']], not [['inf']]" in capsys.readouterr().out


def test_no_tests_are_a_defect(tmp_path, capsys):
    (tmp_path / "p.test.yaml").write_text("policy: p\ntests: []\n")
    assert main(["test", str(tmp_path / "p.test.yaml")]) == 2
    assert "`tests` is empty, so that nothing is compared" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (f'    {MODEL}\n    after: {{1: "3"}}\n', "`1` is no step; the test has 0"),
        (f'    {MODEL}\n    steps: 2\n    after: {{3: "3"}}\n', "`3` is no step; the test has 2"),
        (f'    {MODEL}\n    steps: 2\n    after: {{²: "3"}}\n', "`²` is no whole number"),
        (f"    {MODEL}\n    steps: 1\n    after: 3\n", "`after` says by step what is cached"),
        (f"    {MODEL}\n    thresholds: [1, 2]\n", "2 layers are listed, the model has 1"),
        (f"    {MODEL}\n    propagated: x\n", "`x` is no position"),
        (
            f"    {MODEL}\n    steps: 2\n    q_step: {{seed: 1}}\n",
            "either what is expected (`kept`",
        ),
        (f"    {MODEL}\n    after: {{}}\n", "`after` is empty, so that nothing is compared"),
        (f"    {MODEL}\n    steps: 1\n    after: {{1: {{}}}}\n", "`after.1` is empty"),
        (f'    {MODEL}\n    steps: 1\n    after: {{1: "3", 01: "3"}}\n', "step 1 is given twice"),
        (f"    {MODEL}\n    reported: {{}}\n", "`reported` is empty"),
        (f'    {MODEL}\n    refused: ""\n', "`refused` is empty"),
        (f'    {MODEL}\n    q_step: {{seed: 1}}\n    kept: ""\n', "`q_step` is read at steps"),
        (f'    {MODEL}\n    inv_freq: [1]\n    kept: ""\n', "it has half the head size, 4"),
    ],
)
def test_defects(tmp_path, capsys, case, message):
    assert outcome(tmp_path, H2O, case) in (1, 2)
    output = capsys.readouterr()
    assert message in output.err + output.out


def test_a_policy_is_tried_before_its_own_tests(tmp_path, capsys, monkeypatch):
    case = STEPS + '    kept: "0-1 7-8"'
    assert outcome(tmp_path, H2O, case) == 0
    assert "2 passed, 0 failed (interpreter and torch); 1 policy tried\n" in capsys.readouterr().out
    right = torch.softmax
    # The test's prompt has nine tokens.
    wrong = lambda x, dim: right(x, dim).flip(-1) if x.shape[-2] != 9 else right(x, dim)  # noqa: E731
    monkeypatch.setattr(torch, "softmax", wrong)
    assert outcome(tmp_path, H2O, case) == 1
    out = capsys.readouterr().out
    assert "p.yaml:6:9: error[trial]: `p` is not the same in the interpreter and in the" in out
    assert out.endswith("2 passed, 1 failed (interpreter and torch); 1 policy tried\n")


def test_one_execution_alone_is_not_compared(tmp_path, capsys):
    outcome(tmp_path, H2O, STEPS + '    kept: "0-1 7-8"')
    capsys.readouterr()
    assert main(["test", "--execution", "interpreter", str(tmp_path / "p.yaml")]) == 0
    assert capsys.readouterr().out == "1 passed, 0 failed (interpreter)\n"


def test_a_policy_for_other_models_is_tried_as_its_tests_have_it(tmp_path, capsys):
    policy = "require: [layers == 1, heads < 9]\nkeep: recent(3)\n"
    assert outcome(tmp_path, policy, f'    {MODEL}\n    tokens: 5\n    kept: "2-4"') == 0
    assert "1 policy tried" in capsys.readouterr().out


def test_the_policy_that_is_named_is_tested(tmp_path):
    outcome(tmp_path, "keep: recent(4)\n", f'    {MODEL}\n    tokens: 5\n    kept: "2-4"')
    (tmp_path / "p.yml").write_text(HEADER + "keep: recent(3)\n")
    assert main(["test", str(tmp_path / "p.yaml")]) == 1
    assert main(["test", str(tmp_path / "p.yml")]) == 0
