"""A short run of the fuzzer, and planted defects that it must find."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from unittest.mock import patch

import every_execution
import fuzz
import judge
import mutants
import pytest
import shrink
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.execute.layer.generated import Generated
from kvpolicy.dsl.syntax import fmt, parse
from kvpolicy.dsl.syntax.source import Source
from kvpolicy.kernels.table import REFERENCE

POLICY = """\
policy: a-test
language: 1
about: a test  # of the fuzzer
score: |
  norm1[dim](key)
keep: recent(2) then top(score, 3)
decode: same
"""


def test_short_run():
    """Every kind of text; some are refused, some run everywhere."""
    block = fuzz.run_block("the tests", 0, 160)
    assert not block.failures, block.failures[0]
    assert sum(sum(each.values()) for each in block.counts.values()) == 160
    assert set(block.counts) == set(mutants.KINDS)
    total = {name: sum(x.get(name, 0) for x in block.counts.values()) for name in fuzz.COLUMNS}
    assert total["refused"] > 80
    assert total["agreed"] > 8
    assert total["unstable"] < 2


def test_a_text_has_a_number():
    assert fuzz.text_of("1", 17) == fuzz.text_of("1", 17)
    assert fuzz.text_of("1", 17) != fuzz.text_of("2", 17)


def failures(text: str, kind: str = "made") -> list[dict]:
    """Failures that the fuzzer finds in this text alone."""
    with patch.object(fuzz, "text_of", return_value=(kind, text)):
        return fuzz.run_block("planted", 0, 1).failures


def test_nothing_is_wrong_with_the_policy_itself():
    assert failures(POLICY) == []


def test_an_execution_that_selects_otherwise_is_found():
    """Planted: the torch program takes the least instead of the most."""
    keys = REFERENCE["keys"]

    def others(*arguments, **named):
        return -keys(*arguments, **named)

    with patch.dict(REFERENCE, keys=others):
        (found,) = failures(POLICY)
    assert "layer 0" in found["error"]
    assert "top(" in found["text"]
    assert len(found["text"]) < len(POLICY)


@pytest.mark.interpreted
def test_a_kernel_that_computes_otherwise_is_found(monkeypatch):
    """Planted: of the values that generated kernels compute, each has the other sign."""
    monkeypatch.setattr(every_execution, "BY_KERNELS", 1)
    assert failures(POLICY) == []
    values = Generated.values

    def others(*arguments, **options):
        made = values(*arguments, **options)
        return {node: replace(x, data=-x.tensor) for node, x in made.items()}

    monkeypatch.setattr(shrink, "shrunk", lambda text, wrong: text)  # takes a minute
    with patch.object(Generated, "values", others):
        (found,) = failures(POLICY)
    assert "by_kernels" in found["error"]


def test_rounding_to_float32_keeps_ties():
    program = load(Source("any.yaml", POLICY)).require()
    for seed in range(4):
        case = every_execution.Case((2, 4, 2, 4), 9, 1, {}, seed, ties=True)
        bound = case.bound(program)
        assert not every_execution._is_unstable_in_float32(bound, case, case.tensors())


def test_rounding_to_float32_decides_where_its_last_bits_do():
    """Sums over keys that differ by less than an addition in float32 may round away."""
    near = POLICY.replace("norm1[dim](key)", "sum[dim](key + 1e6)")
    program = load(Source("any.yaml", near)).require()
    case = every_execution.Case((2, 4, 2, 4), 9, 1, {}, 0, ties=False)
    assert every_execution._is_unstable_in_float32(case.bound(program), case, case.tensors())


def test_a_comment_that_fmt_loses_is_found():
    def without(source: Source) -> str:
        return plain(source).replace("  # of the fuzzer", "")

    plain = fmt.format_policy
    with patch.object(judge, "format_policy", without):
        (found,) = failures(POLICY)
    assert "comments" in found["error"]


def test_a_check_that_raises_is_found():
    with patch.object(parse, "read_yaml", side_effect=ZeroDivisionError("planted")):
        (found,) = failures("any text")
    assert "ZeroDivisionError" in found["error"]


def test_a_check_that_never_ends_is_found(monkeypatch):
    def wait(*_) -> None:
        while True:
            pass

    monkeypatch.setattr(judge, "CHECK_SECONDS", 0.2)
    with patch.object(parse, "read_yaml", wait):
        (found,) = failures("any text")
    assert "TooLong" in found["error"]
    assert found["text"] == "any text"


def test_a_check_that_grows_is_found(monkeypatch):
    monkeypatch.setattr(judge, "GROWTH", -1)
    with pytest.raises(judge.Wrong, match="MiB"):
        judge.judged(POLICY)


def test_a_run_goes_on(tmp_path, capsys):
    """Blocks are not done again, and the files of failures state the error."""
    arguments = ["--texts", "10", "--executed", "0", "--seed", "7", "--out", str(tmp_path)]
    made = []

    def block(seed: str, number: int) -> fuzz.Block:
        made.append(number)
        failure = {"name": f"7:{number}", "kind": "made", "error": "wrong", "text": "a text\n"}
        return fuzz.Block(number, counts={"made": {"agreed": 4, "failed": 1}}, failures=[failure])

    with patch.object(fuzz, "run_block", block):
        assert fuzz.main(arguments) == 1
        assert fuzz.main([*arguments, "--texts", "15"]) == 1
    assert made == [0, 1, 2]
    assert "| all | 15 | 0 | 0 | 12 | 0 | 0 | 0 | 3 |" in capsys.readouterr().out
    written = (tmp_path / "failures" / "7-0.yaml").read_text()
    assert written == "# made 7:0\n# wrong\na text\n"


def test_a_run_of_changed_code_is_another_one(tmp_path, monkeypatch):
    monkeypatch.setattr(fuzz, "ROOT", tmp_path)
    path = tmp_path / "dsl" / "bind" / "bounds.py"
    path.parent.mkdir(parents=True)
    path.write_text("one = 1\n")
    before = fuzz._digest()
    path.write_text("one = 2\n")
    assert fuzz._digest() != before


def test_texts_are_mostly_policies_where_they_are_meant_to_be():
    accepted = dict.fromkeys(mutants.KINDS, 0)
    for number in range(150):
        kind, text = fuzz.text_of("accepted", number)
        accepted[kind] += load(Source("any.yaml", text)).program is not None
    assert accepted["made"] >= 4
    assert accepted["expressions"] >= 2
    assert accepted["sections"] >= 1


def test_a_failure_is_taken_again(tmp_path, capsys):
    def raised(*_) -> str:
        raise judge.Wrong("planted")

    path = tmp_path / "7-3.yaml"
    path.write_text(f"# {fuzz.text_of('7', 3)[0]} 7:3\n# wrong\na text\n")
    with patch.object(fuzz, "outcome", raised):
        assert fuzz.main(["--again", str(path)]) == 1
    assert "planted" in capsys.readouterr().out
    assert fuzz.main(["--again", str(path)]) == 0


@pytest.mark.thorough
def test_the_command_finds_its_helpers(tmp_path):
    """`make fuzz`, where no other test has put folders on the path."""
    script = [
        sys.executable,
        "-P",
        fuzz.__file__,
        *"--texts 0 --executed 0 --out".split(),
        str(tmp_path),
    ]
    done = subprocess.run(script, capture_output=True, text=True)
    assert (done.returncode, "| all | 0 |" in done.stdout) == (0, True), done.stderr
