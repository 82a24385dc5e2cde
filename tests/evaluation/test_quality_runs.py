"""Runs of the quality benchmark, without a server: variants of policies, commands, merging."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("tqdm", reason="benchmarks show their progress")
sys.path[:0] = [str(Path(__file__).parents[2] / "benchmarks"), str(Path(__file__).parent)]

from kvpolicy.dsl.bind.bind import bind  # noqa: E402
from kvpolicy.dsl.check.policy import load  # noqa: E402
from kvpolicy.dsl.ir.nodes import ModelShape  # noqa: E402
from kvpolicy.evaluation import records  # noqa: E402
from quality_parts.orderings import LOOSER, WIDE  # noqa: E402
from quality_parts.runs import Run, RunFailed, carry_out, fixed, merge, split, variants  # noqa: E402
from test_orderings import record  # noqa: E402

SHAPE = ModelShape(layers=6, heads=8, kv_heads=4, head_dim=32)


def a_run(folder, policies):
    return Run(folder, policies, ("niah",), (0.5,), 2, 128, 0, "model", 4)


def test_variants_are_policies_that_differ_as_they_say(tmp_path):
    files = {Path(path).stem: path for path in variants([1, 3], 0.8, 9, tmp_path)}
    assert set(files) == {"fastkv-after-1", "fastkv-after-3", WIDE, LOOSER}
    values = {name: bind(load(path).require(), SHAPE, {}).params for name, path in files.items()}
    assert values["fastkv-after-3"]["tsp_layer"] == 3
    assert values["fastkv-after-3"]["tsp_rate"] == values["fastkv-after-3"]["kv_rate"]
    assert float(values[WIDE]["tau"]) == 0.3
    assert float(values[LOOSER]["tau"]) == 0.8
    assert {each["kernel"] for each in values.values()} == {9}


def test_settings_that_do_not_depend_on_the_share():
    assert fixed("snapkv") == ["snapkv.window=8"]
    assert fixed("streamingllm") == fixed("none") == []
    assert fixed(f"/somewhere/{WIDE}.yaml") == [f"{WIDE}.window=8"]


def test_policies_are_dealt_out_once():
    parts = split(["none", "a", "b", "c", "d"], 2)
    assert parts == [("none", "b", "d"), ("a", "c")]
    assert split(["none"], 3) == [("none",)]


def test_only_the_run_with_full_kv_asks_it(tmp_path):
    first, second = a_run(tmp_path, ("none", "a")), a_run(tmp_path, ("b",))
    assert "--no-full" not in first.words
    assert "--no-full" in second.words


def test_merged_folders_hold_every_answer_once_in_the_order_of_policies(tmp_path):
    runs = [
        a_run(tmp_path / "run-1", ("none", "b")),
        a_run(tmp_path / "run-2", ("a", "c")),
    ]
    for run in runs:
        run.folder.mkdir()
        entries = [{"policy": name, "budget": None} for name in run.policies]
        stages = {"server start": 2, "questions a": 3, "questions b": 4}
        (run.folder / "plan.json").write_text(json.dumps({"policies": entries, "stages": stages}))
        lines = [records.line(record(name, None, "niah", 0, 1.0)) for name in run.policies]
        (run.folder / "samples.jsonl").write_text("".join(lines) + '{"cut": ')
    merge(runs, tmp_path, "the command")
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert [entry["policy"] for entry in plan["policies"]] == ["none", "a", "b", "c"]
    assert plan["stages"]["questions (run 2)"] == 7
    assert plan["command"] == "the command"
    found = list(records.read(tmp_path / "samples.jsonl"))
    assert sorted(each.policy for each in found) == ["a", "b", "c", "none"]


def test_a_run_that_fails_says_why(tmp_path):
    run = replace(a_run(tmp_path / "run-1", ("snapkv",)), model="/nowhere")
    with pytest.raises(RunFailed, match="status 2") as failure:
        carry_out([run], 1)
    assert "/nowhere" in str(failure.value)
