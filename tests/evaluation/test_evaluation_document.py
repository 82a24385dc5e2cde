"""docs/evaluation.md: its commands run, and its statements on files and values are true."""

import argparse
import json
import re
import shlex
import sys
from pathlib import Path

import forked
import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.thorough
TEXT = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
KVPOLICY = str(Path(sys.executable).parent / "kvpolicy")


def commands(language: str) -> list[list[str]]:
    found = re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.M | re.S)
    return [shlex.split(line) for block in found for line in block.splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Folder that replaces .cache/ of the commands, after these ran in order with two samples."""
    pytest.importorskip("sglang", reason="SGLang is an extra; authors check policies without it")
    cache = tmp_path_factory.mktemp("cache")
    for words in commands("sh"):
        line = shlex.join(words[1:]).replace(".cache/", f"{cache}/")
        line = re.sub(r"--samples \d+", "--samples 2", line)
        done = forked.run([sys.executable, KVPOLICY, *shlex.split(line)], cwd=ROOT, timeout=600)
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return cache


@pytest.mark.server
def test_commands_run_and_write_what_is_listed(folder):
    listed = re.findall(r"^\| ((?:`\w+\.\w+`(?:, )?)+) \|", TEXT, re.M)
    names = {name for cell in listed for name in re.findall(r"`(\w+\.\w+)`", cell)}
    assert {"report.html", "samples.jsonl", "kept.png"} <= names
    written = {path.name for path in (folder / "report").iterdir()}
    assert names - {"errors.jsonl"} <= written
    assert (folder / "kept.html").stat().st_size > 1000


@pytest.mark.server
def test_every_question_is_answered(folder):
    lines = (folder / "report" / "samples.jsonl").read_text().splitlines()
    assert len(lines) == 4 * 2 * 5
    turns = (folder / "turns" / "samples.jsonl").read_text().splitlines()
    assert len(turns) == 2 * 3 * 2 * 3


def test_commands_for_elsewhere_are_accepted():
    """Models and servers are missing here, but the options exist."""
    from kvpolicy.evaluation.asking import eval_arguments

    parser = argparse.ArgumentParser(exit_on_error=False)
    eval_arguments.add(parser)
    asked = [words[2:] for words in commands("text") if words[:2] == ["kvpolicy", "eval"]]
    assert len(asked) == 4
    for words in asked:
        parser.parse_args(words)


def test_values_that_the_text_names_are_found():
    from kvpolicy.dsl.bind.model_config import read_config
    from kvpolicy.dsl.check.policy import load
    from kvpolicy.evaluation.asking.variants import variants

    shape = read_config(str(ROOT / "examples" / "model-small")).shape
    names = ["snapkv", "vatp", "streamingllm", "minicache"]
    found, notes = variants(names, ["snapkv.window=8"], [0.125], [512], shape)
    settings = {variant.policy: dict(variant.setting) for variant in found}
    assert settings["snapkv"]["rate"] == "0.125"
    assert settings["vatp"]["rate"] == "0.0625"
    assert settings["streamingllm"]["window"] == "60"
    assert load("streamingllm").require().params["start"].default.value == 4
    assert [note.startswith("no parameter of minicache") for note in notes] == [True]


@pytest.mark.server
def test_the_plan_has_the_values(folder):
    plan = json.loads((folder / "report" / "plan.json").read_text())
    settings = {(p["policy"], p["budget"]): p["setting"] for p in plan["policies"]}
    assert settings["lava", 0.125] == {"window": "8", "rate": "0.125"}
