"""`kvpolicy show`, and the kernels that `explain` lists."""

from __future__ import annotations

import json
import re

import pytest
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.ir.text import print_program
from kvpolicy.dsl.ir.written import written
from kvpolicy.dsl.syntax.library import shipped
from kvpolicy.dsl.syntax.source import Source
from kvpolicy.dsl.tools.cli import main

CONFIG = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 256,
    "intermediate_size": 512,
    "torch_dtype": "float16",
}


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def explained(capsys, model: str, policy: str) -> str:
    assert main(["explain", policy, "--model", model, "--length", "1000"]) == 0
    text = capsys.readouterr().out
    return text[text.index("\nKernels") : text.index("\nEntries kept")]


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_policy_is_shown(model, capsys, name):
    """As Python that compiles, or as a comment on why nothing is generated."""
    assert main(["show", name, "--triton", "--model", model]) == 0
    text = capsys.readouterr().out
    compile(text, name, "exec")
    assert ("@triton.jit" in text) != text.startswith("# This policy reduces no")


def test_decode_steps_have_files_of_their_own(model, capsys):
    for name, files in (("snapkv", 1), ("cake", 2), ("vatp", 4), ("roco", 1)):
        assert main(["show", name, "--triton", "--model", model]) == 0
        headers = re.findall('^"""Functions of.*?"""', capsys.readouterr().out, re.S | re.M)
        assert len(headers) == files
        of_steps = ["For decode steps, 4 query heads" in each for each in headers]
        assert of_steps == sorted(of_steps)
        assert any(of_steps) == (name != "snapkv")


def test_parameters_reach_the_source(model, capsys):
    for window in (5, 21):
        given = ["--set", f"window={window}"]
        assert main(["show", "snapkv", "--triton", "--model", model, *given]) == 0
        assert f"token < tokens - {window}" in capsys.readouterr().out.replace("near", "token")


def test_the_intermediate_representation(model, capsys):
    assert main(["show", "snapkv", "--model", model]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("prefill.keep = %")
    assert any('attn["recent"]' in line for line in lines)


@pytest.mark.parametrize(
    ("policy", "names"),
    [
        (
            "d2o",
            ("prefill.states.heat.next", "prefill.merge.into", "decode.merge.states.bar.start"),
        ),
        ("gemfilter", ("propagate.first", "propagate.tokens", "propagate.restart")),
        ("minicache", ("share.when", "share.direction", "share.exceptions")),
    ],
)
def test_all_that_decides_is_in_the_intermediate_representation(model, capsys, policy, names):
    """By its name; `when` and `except` of `share`, and `restart`, were left out."""
    assert main(["show", policy, "--model", model]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in names:
        assert any(line.startswith(f"{name} = %") for line in lines)


def test_input_that_cannot_be_used(model, capsys):
    assert main(["show", "snapkv", "--model", model + "/nothing"]) == 2
    assert main(["show", "snapkv", "--model", model, "--set", "windw=3"]) == 2
    assert main(["show", "snap", "--model", model]) == 2
    assert "error[" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["show", "snapkv"])


def test_explain_says_what_becomes_a_kernel(model, capsys):
    text = explained(capsys, model, "lava")
    twice = "(two passes where attention gives no log-sum-exp)"
    assert f"one pass over the keys, values read once, for recent(32) {twice}\n" in text
    assert "kernel  sum[dim](abs(value))" in text
    assert "kernel  hand-written, on small tensors: entropy, fill, top" in text
    assert "torch   on small tensors: missing, position, remaining" in text
    text = explained(capsys, model, "asl")
    assert "hand-written, on small tensors: any[past], fill, mean, rank, top, var[past]\n" in text
    assert "torch   on small tensors: at, missing, position, remaining\n" in text
    text = explained(capsys, model, "h2o")
    assert "kernel  sum[group, query](attn(new))" in text
    prefill, steps = text.split("  while decoding, states of several steps at once\n")
    assert f"  one pass over the keys for new {twice}\n    kernel  sum[group, query]" in prefill
    assert "    two passes over the keys for new\n      kernel  sum[group, query]" in steps
    assert "    kernel  hand-written, on small tensors: fill, top" in steps
    text = explained(capsys, model, "cam")
    assert text.count("hand-written: merge") == 1
    assert text.endswith("into those that stay\n")
    assert "kernel  hand-written: share, of directions" in explained(capsys, model, "minicache")
    assert "kernel  hand-written: merge, of the rows" in explained(capsys, model, "d2o")


def test_explain_says_why_not(model, capsys, tmp_path):
    path = tmp_path / "a-test.yaml"
    path.write_text(
        "policy: a-test\nlanguage: 1\nabout: a test\n"
        "score: sum[group, query](floor(9 * attn(recent(5))))\nbudget: 9\nkeep: top(score)\n"
    )
    text = explained(capsys, model, str(path))
    expected = "torch   score: sum[group, query](floor(9 * attn(recent(5)))): `floor` has no kernel"
    assert expected in text
    assert re.search("kernel  (?!hand)", text) is None


def test_explain_says_how_states_are_kept_while_decoding(model, capsys, tmp_path):
    path = tmp_path / "a-test.yaml"
    path.write_text(
        "policy: a-test\nlanguage: 1\nabout: a test\n"
        "state: {heat: '0.9 * heat + sum[group, query](floor(9 * attn(new)))'}\n"
        "score: heat\nbudget: 9\nkeep: top(score)\ndecode: same\n"
    )
    text = explained(capsys, model, str(path))
    steps = text[text.index("  while decoding, states step by step\n") :]
    assert "    torch   sum[group, query](floor(9 * attn(new))): `floor` has no kernel" in steps


def test_explain_says_why_directions_are_not_shared_by_kernels(model, capsys, tmp_path):
    path = tmp_path / "a-test.yaml"
    path.write_text(
        "policy: a-test\nlanguage: 1\nabout: a test\n"
        "share: {when: layer % 2 == 1, direction: 'below * own'}\n"
    )
    text = explained(capsys, model, str(path))
    assert "torch   share: (below * own): it is no sum of two layers' vectors" in text


@pytest.mark.parametrize(
    "text",
    [
        "sum[group](maxpool(sum[query](attn(recent(5))), 3))",
        "mean[head, query](attn(recent(5)) where not recent(2))",
        "sum[dim](abs(value)) * (1 - 2 ^ layer) / -position",
        "(max[kv](norm) where 2 <= layer and not sinks(3) else min(norm, 0.5))",
    ],
)
def test_expressions_are_written_as_authors_do(text):
    """The written text has the same meaning."""
    header = "policy: a-test\nlanguage: 1\nabout: a test\nlet:\n  norm: sum[dim](key)\n"

    def program(expression: str):
        source = f"{header}score: |\n  {expression} + 0 * norm\nbudget: 9\nkeep: top(score)\n"
        return load(Source("a-test.yaml", source)).require()

    score = written(program(text).prefill.score)
    again = score.removesuffix(" + (0 * norm))").removeprefix("(")
    assert print_program(program(again)) == print_program(program(text))
