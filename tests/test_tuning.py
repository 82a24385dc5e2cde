"""Tuning the kernels: variants are measured, the fastest written, and the wrappers read them."""

import json
import os
import sys
from pathlib import Path

import forked
import pytest
import torch
from kvpolicy.kernels.launch import tuned
from triton.runtime.errors import OutOfResources

ROOT = Path(__file__).parents[1]
# Last: other tests have modules of the same names.
sys.path.append(str(ROOT / "benchmarks"))
from cases import tuned_file, tuning  # noqa: E402

NAME = tuned.device_name(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def run(*words, **environment):
    command = [sys.executable, "benchmarks/kernels.py", "--toy", *words]
    return forked.run(command, cwd=ROOT, timeout=600, env=os.environ | environment)


@pytest.mark.thorough
def test_knobs_of_kernels(tmp_path):
    """Every variant is checked; choices of all kernels are written in the form wrappers read."""
    result = run("--topics", "tuning", "--write", str(tmp_path))
    assert result.returncode == 0, result.stderr[-4000:]
    output = result.stdout
    lines = [line.split("|") for line in output.splitlines() if line.startswith("| ")]
    cases = [cells[1].strip() for cells in lines if len(cells) == 11]
    assert [case for case in cases if case not in ("", "case", "---")] == [
        "decode attention",
        "scoring of one layer",
        "attention of 4 new tokens",
        "compaction, all layers",
        "gathered lists",
        "placed rows",
        "fold of 16 tokens in place, all layers",
        "selection",
        "rows",
        "nearest",
        "merged rows",
        "decode attention, readers",
    ]
    path = tuned.path_of(NAME, tmp_path)
    assert f"written to {path}" in output
    assert tuned.read(path, NAME).keys() == tuned.KERNELS.keys()
    [facts] = json.loads(path.read_text())["runs"]
    assert "--topics tuning" in facts["command"]
    assert "torch" in facts["machine"]
    for choice in facts["choices"]:
        assert choice["checked"]
        assert choice["seconds"]["p10"] <= choice["seconds"]["p90"]
        assert choice["seconds"]["median"] <= choice["default_seconds"]["median"]
    # What was written serves the next run, which says so and finds every result as it should be.
    words = ("--topics", "merging")
    used = run(*words, **{tuned.FOLDER_VARIABLE: str(tmp_path)})
    assert used.returncode == 0, used.stderr[-4000:]
    assert f"The kernels are tuned for {NAME} by {path}." in used.stdout


@pytest.mark.thorough
def test_choices_that_cannot_be_written_are_said_before_the_measurement(tmp_path):
    path = tuned.path_of(NAME, tmp_path)
    path.write_text("{")
    for words, message in (
        (("--topics", "tuning", "--write", str(tmp_path)), f"kernels: {path}: Expecting"),
        (("--topics", "tuning", "--write"), "is for GPUs; --toy needs a folder of its own"),
        (("--write", str(tmp_path)), "--write: only --topics tuning has anything to write"),
        (("--heads", "32,8"), "--heads: expected three numbers such as 32,8,128, got 32,8"),
        (("--heads", "30,8,128"), "--heads: 8 KV heads do not divide 30 query heads"),
    ):
        result = run(*words)
        assert result.returncode
        assert message in result.stderr.splitlines()[-1]


def facts_of_tuning(**medians):
    """Facts of a run with one case whose calls take these median seconds, 10 % more or less."""
    calls = {
        name: {"called": {"median": x, "p10": 0.9 * x, "p90": 1.1 * x}}
        for name, x in medians.items()
    }
    tuning = {"kernel": "rows", "where": {"row_bytes": 64}, "called": False}
    tuning["knobs"] = {"b1": {"block": 16}, "b2": {"block": 32}}
    case = {"tuning": tuning, "calls": calls, "checked": "as it should be"}
    return {"command": "c", "machine": "m", "cases": [case, {"tuning": None}]}


@pytest.mark.parametrize(
    ("times", "choice"),
    [
        ({"ours": 10, "b1": 9, "b2": 8}, {"block": 32}),
        ({"ours": 10, "b1": 9.05, "b2": 9.5}, {"block": 16}),  # b2: not nine of ten times
        ({"ours": 10, "b1": 9.5, "b2": 11}, {}),
        ({"ours": 10}, {}),
    ],
)
def test_the_fastest_is_written_if_it_is_faster_for_sure(tmp_path, times, choice):
    path = tmp_path / "a_gpu.json"
    [made] = tuned_file.write(facts_of_tuning(**times), "a gpu", path)
    assert made["choice"] == choice
    assert tuned.read(path, "a gpu") == {"rows": [({"row_bytes": 64}, choice)]}


def test_replays_decide_where_there_are_any():
    case = facts_of_tuning(ours=10, b1=9)["cases"][0]
    assert tuned_file.chosen(case)["choice"] == {"block": 16}
    case["calls"]["b1"]["graph"] = {"median": 20, "p90": 21}
    assert tuned_file.chosen(case)["choice"] == {}


def test_choices_of_other_sizes_stay(tmp_path):
    path = tmp_path / "a_gpu.json"
    facts = facts_of_tuning(ours=10, b1=9)
    tuned_file.write(facts, "a gpu", path)
    facts["cases"][0]["tuning"]["where"] = {"row_bytes": 128}
    tuned_file.write(facts, "a gpu", path)
    facts["cases"][0]["calls"]["b1"]["called"]["p90"] = 12
    tuned_file.write(facts, "a gpu", path)
    found = tuned.read(path, "a gpu")["rows"]
    assert found == [({"row_bytes": 64}, {"block": 16}), ({"row_bytes": 128}, {})]
    assert len(json.loads(path.read_text())["runs"]) == 2


def test_what_was_chosen_serves_the_cases_after_it(tmp_path, monkeypatch):
    monkeypatch.setenv(tuned.FOLDER_VARIABLE, str(tmp_path))
    tuned.load.cache_clear()
    device = torch.device("cpu")
    try:
        assert tuned.choice("rows", device, 64) == {}
        tuned_file.use(facts_of_tuning(ours=10, b1=8), device)
        assert tuned.choice("rows", device, 64) == {"block": 16}
    finally:
        tuned.load.cache_clear()


def test_a_tile_that_does_not_fit_with_lengths_is_no_variant():
    """Calls with pairs need more than the timed call."""

    def largest(tile):
        if tile.entries * tile.stages > 400:
            raise OutOfResources(300_000, 232_448, "shared memory")

    calls, knobs, note = tuning.split_kv(lambda **options: None, largest, toy=False)
    assert len(calls) == 1 + len(knobs) == 1 + 5 * 3 * 2 * 2
    assert {each["entries"] * each["stages"] for each in knobs.values()} <= set(range(400))
    assert note.startswith("entries, warps, stages that do not always fit: (64, 4, 7), (64, 8, 7)")
