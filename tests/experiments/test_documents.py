"""The documents on experiments are true: example, keys, metrics, figures, script."""

import json
import re
import subprocess
import sys
from pathlib import Path

from kvpolicy.experiments.definition.form import FILE
from kvpolicy.experiments.definition.metrics import METRICS
from kvpolicy.experiments.definition.reading import load, read
from kvpolicy.experiments.statistics.distinct_keys import MAX_KEYS
from kvpolicy.experiments.statistics.sample_ratio import ALARM

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "experiments.md").read_text()
RESULTS = json.loads((ROOT / "docs" / "results" / "experiment_errors.json").read_text())
FOUND = {(row["metric"], row["question"], row["data"]): row for row in RESULTS["rows"]}


def test_the_example_of_the_page_is_the_file():
    shown = re.search(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S)[1]
    example = ROOT / "examples" / "experiments" / "lava-25.yaml"
    assert shown == example.read_text()
    assert read(shown, "page").require() == load(example).require()


def test_the_page_has_every_key_and_metric():
    for name in [field.name for field in FILE] + list(METRICS):
        assert f"`{name}`" in PAGE


def test_committed_errors_are_within_their_bounds():
    bounded = [row for row in RESULTS["rows"] if row["bound"] is not None]
    assert len(bounded) == 22
    for row in bounded:
        assert row["runs"] >= 2_000
        assert row["share"] <= row["bound"], row


def test_figures_of_the_page_are_those_committed():
    def row(metric, question, data):
        return next(r for k, r in FOUND.items() if k[:2] == (metric, question) and data in k[2])

    alarm = row("all guardrails", "false alarm", "margin")
    assert f"{100 * alarm['share']:.1f} % of 4,000 runs" in PAGE
    worst = [
        max(r["share"] for r in RESULTS["rows"] if r["question"] == question)
        for question in ("false clearing", "interval misses")
    ]
    assert "{:.1f} %, {:.1f} %; 5 % are allowed".format(*(100 * share for share in worst)) in PAGE
    bad = [row("drift", "breach", f"mean {mean}") for mean in ("0.1", "0.5")]
    good = [row("drift", "clear", f"mean {mean}") for mean in ("0.01", "0.025")]
    for first, second in (bad, good):
        said = f"median {first['median']:,} ({second['median']:,}), 90 % within "
        assert said + f"{first['ninety']:,} ({second['ninety']:,})" in PAGE
    failing = [row("error_rate", "breach", f"{rate} against") for rate in ("0.025", "0.055")]
    assert "median {:,} ({:,}) ".format(*(each["median"] for each in failing)) in PAGE
    assert f"median {row('error_rate', 'clear', '')['median']:,}" in PAGE
    split, one = row("sample ratio", "alarm", "60/40"), row("sample ratio", "alarm", "100/0")
    assert f"median {split['median']}; {one['median']}" in PAGE


def test_the_script_runs():
    words = ["--runs", "20", "--values", "200", "--requests", "300"]
    command = [sys.executable, "benchmarks/experiment_errors.py", *words]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert output.startswith("# Errors and delays of experiments\n\nCommand: `python benchmarks/")
    assert output.count("| drift |") == 17
    assert "4,000" not in output


def test_constants_of_the_page():
    assert f"p < {ALARM:g}" in PAGE
    assert f"first {MAX_KEYS:,} keys" in PAGE
