"""The benchmarks and the demo run at toy sizes and check their own results.

No times are compared.
"""

import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import forked
import pytest

ROOT = Path(__file__).parents[1]
pytestmark = [pytest.mark.server, pytest.mark.thorough]

CHECKOUT = f"""
import importlib.util, subprocess, sys
sys.path[:0] = ["{ROOT / "benchmarks"}", sys.argv[1]]
print(importlib.util.find_spec("kvpolicy") is not None)
import checkout, importlib.metadata
from kvpolicy.dsl.syntax.library import POLICIES, shipped
print(*[p.value for p in importlib.metadata.entry_points(group="sglang.srt.plugins")
        if p.name == "kvpolicy"])
print(POLICIES.resolve() == checkout.ROOT / "policies" and "snapkv" in shipped())
code = "import kvpolicy.kernels.entries.tables as t; print('kvpolicy-checkout' in t.__file__)"
paths = f"import sys; sys.path.append({{sys.argv[1]!r}}); "
subprocess.run([sys.executable, "-S", "-c", paths + code], check=True)
"""


def run(*words, timeout=600):
    """Output of a script, run as a fork, as are its servers."""
    result = forked.run([sys.executable, *words], cwd=ROOT, timeout=timeout)
    assert result.returncode == 0, f"{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
    return result.stdout


def rows(output):
    """Cells of a table's rows, without the header."""
    lines = [line for line in output.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_demo():
    output = run("examples/demo.py", "--tokens", "256")
    table = {line[:22].strip(): line[22:].split("  ") for line in output.splitlines()}
    answer = [cell.strip() for cell in table["answer"] if cell.strip()]
    expected = [cell.strip() for cell in table["expected"] if cell.strip()]
    assert answer == expected
    assert "64 of 256" not in output
    assert "192 of 256" in output  # slots freed at 64 entries


def test_demo_experiment(tmp_path):
    """The good arm is cleared, the bad one is rolled back, and the report says so."""
    page = tmp_path / "report.html"
    output = run("examples/demo_experiment.py", "--out", str(page))
    lines = {line.split()[0]: line for line in output.splitlines() if "nats per token" in line}
    assert "drift 0.0000" in lines["control"]
    assert "cleared after" in lines["lava-50"]
    assert lines["sinks-6"].endswith("rolled back by itself")
    assert "sinks-6" in page.read_text()


def test_quality(tmp_path):
    """Every part at its smallest: table, conversations, variants, layers, and resumption."""
    names = "snapkv,sinks-recent,h2o,minicache"
    words = ("--policies", names, "--budgets", "0.25", "--tasks", "niah,kv", "--samples", "6")
    sizes = ("--length", "128", "--turn-budgets", "0.25", "--turn-samples", "2", "--layers", "0")
    layers = ("--layer-tasks", "kv", "--layer-prompts", "2")
    out = ("--servers", "1", "--out", str(tmp_path))
    command = ("benchmarks/quality.py", *words, *sizes, *layers, *out)
    text = run(*command, timeout=1500)  # starts four servers
    accuracy, turns = text.split("## Accuracy")[1].split("## A second question")
    table = {row[0]: row for row in rows(accuracy) if row[0] not in ("policy", "---")}
    assert set(table) >= {"full KV", *names.split(",")}
    for name in ("snapkv", "sinks-recent", "h2o"):
        assert table[name][1] == "25 %"
    assert percent(table["full KV"][3]) > 80
    assert percent(table["snapkv"][3]) > percent(table["sinks-recent"][3])
    asked = {row[0]: row for row in rows(turns.split("## What papers")[0])}
    assert set(asked) == {"full KV", "h2o 25 %", "minicache", "sinks-recent 25 %", "snapkv 25 %"}
    assert percent(asked["full KV"][4]) > 80
    assert "snapkv / h2o" in text
    assert "fastkv-after-0" in text
    assert "| asl-looser | kv |" in text
    answers = {path: path.read_bytes() for path in tmp_path.glob("*/run-*/samples.jsonl")}
    assert len(answers) == 4  # of the estimate too
    again = run(*command)
    assert again.split("## Seconds")[0] == text.split("## Seconds")[0]
    assert answers == {path: path.read_bytes() for path in answers}


def percent(cell):
    """The mean of a cell such as `97 (92 to 99)`."""
    return int(cell.split()[0])


def test_quality_speed():
    output = run("benchmarks/quality_speed.py", "--samples", "2", "--length", "128")
    assert "20 samples of 128 tokens" in output
    seconds = {row[0]: float(row[1]) for row in rows(output.split("# Speed of")[1])}
    assert seconds["server start"] > 0
    assert seconds["everything"] == pytest.approx(sum(seconds.values()) / 2, abs=0.5)


def test_capacity():
    words = ("--requests", "60", "--prompt", "256", "--new", "16", "--at-once", "6")
    found = rows(run("benchmarks/capacity.py", *words))
    assert [row[1] for row in found] == ["16", "8", "16", "8"]
    stock, stock_of_8, policy, policy_of_8 = (int(row[2]) for row in found)
    assert stock == 6
    assert stock_of_8 >= 2 * 6
    assert policy >= 3 * 6
    assert policy_of_8 > policy


def test_tight_pool():
    words = ("--policies", "snapkv,h2o", "--shares", "0.25", "--rounds", "1", "--layers", "2")
    sizes = ("--requests", "6", "--prompt", "128", "--new", "24", "--pool", "320")
    stock, ample, *policies = rows(run("benchmarks/tight_pool.py", *words, *sizes))
    assert (stock[0], stock[2].split()[0], stock[3]) == ("stock SGLang", "1.00", "2")
    assert (ample[0], ample[3]) == ("stock SGLang, room for all", "6")
    assert stock[6] == ample[6] == "6 in full"
    assert [row[0] for row in policies] == ["snapkv@0.25", "h2o@0.25"]
    for row in policies:
        assert int(row[3]) > 2
        assert row[6] == "6 compressed"


METHODS = ("fastkv", "gemfilter", "streamingllm", "d2o", "roco", "minicache")


@pytest.fixture(scope="module")
def beside_stock(tmp_path_factory):
    """Rows of the benchmarks that compare with the same stock server, which they share."""
    folder = tmp_path_factory.mktemp("together")
    once, methods = "--rounds 1 --batch 2", f"--policies {','.join(METHODS)}"
    result = forked.run(
        [
            *(sys.executable, "tests/benchmarks_together.py", str(folder)),
            f"cost {once} --lengths 256 --policies snapkv,lava --new 8",
            f"methods {once} --tokens 200 --new 34 {methods}",
            f"fold_interval {once} --prompt 100 --budget 40 --new 9 --intervals 2",
        ],
        cwd=ROOT,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stderr.count("a server is started") == 1 + 3
    return {path.stem: rows(path.read_text()) for path in folder.iterdir()}


def test_cost(beside_stock):
    assert len(beside_stock["cost"]) == 2
    for row in beside_stock["cost"]:
        assert 11 < float(row[2]) < 13
        assert float(row[3].split()[0]) > 0


def test_methods(beside_stock):
    found = beside_stock["methods"]
    assert [row[0] for row in found] == [*METHODS]
    held = {row[0]: float(row[2]) for row in found}
    assert all(10 < held[name] < 30 for name in ("fastkv", "gemfilter", "streamingllm", "d2o"))
    assert 80 < held["roco"] < 100
    assert held["minicache"] < 80
    assert [int(row[5]) for row in found[2:5]] == [2, 2, 1]


def test_fold_interval(beside_stock):
    found = beside_stock["fold_interval"]
    assert [row[:3] for row in found] == [
        [name, "2", "4"] for name in ("h2o", "tova", "streamingllm")
    ]
    for row in found:
        assert float(row[6].split()[0]) > 0  # seconds of folds are counted
        assert row[7] == "40 to 41"


def test_propagation():
    words = ("--tokens", "300", "--rounds", "1", "--layers", "4")
    stock, none, fastkv = rows(run("benchmarks/propagation.py", *words))
    assert stock[3] == none[3] == "100"
    assert 50 < float(fastkv[3]) < 70


def test_architectures():
    [row] = rows(run("benchmarks/architectures.py", "ernie-4.5", "--each", "1"))
    assert row[:4] == ["`ernie-4.5`", "`Ernie4_5ForCausalLM`", "22", "25"]
    assert (row[4], row[-1]) == ("0", "0")


@pytest.mark.parametrize("more", [(), ("--dp", "2"), ("--pp", "2", "--tp", "2")])
def test_soak(more):
    words = ("--requests", "24", "--longest", "400", "--pool", "2000", "--at-once", "12")
    [row] = rows(run("benchmarks/soak.py", *words, *more))
    requests, compared, compressed, _, different, _, leaked, _ = row
    assert (requests, different, leaked) == ("24", "0", "0")
    assert int(compared) > 12
    assert int(compressed) > 3


@pytest.mark.parametrize("more", [(), ("--pp", "2")])
def test_experiment_soak(more):
    output = run("benchmarks/experiment_soak.py", "--requests", "150", *more)
    found, _, counts = output.partition("\n\n| requests | count |")
    [row] = rows(found)
    assert row[0] == "150"
    assert (row[2], row[4], row[5], row[7], row[8]) == ("0", "0", "0", "tight", "0")
    assert "| operator: POST experiment/abort | 1 |" in counts


def test_experiment_null():
    none, lava, one_key = rows(run("benchmarks/experiment_null.py", "--requests", "60"))
    assert none[2:6] == ["60", "0", "0", "-"]
    assert (lava[5], lava[7]) == ("-", "-")
    assert float(lava[3]) > 0
    assert one_key[7] == "all traffic in one arm"


def test_experiment_overhead():
    words = ("--rounds", "1", "--requests", "12", "--prompt", "40", "--new", "4", "--sample", "1")
    output = run("benchmarks/experiment_overhead.py", *words)
    assert "us per request in the median" in output
    assert [row[0] for row in rows(output)] == ["without an experiment", "with it"]


@pytest.mark.skipif(importlib.util.find_spec("smg") is None, reason="smg is not installed")
def test_gateway():
    """Cache-aware routing has the higher hit rate, with a policy as without one."""
    words = ("--policies", "snapkv", "--groups", "6", "--turns", "4", "--shared", "120")
    made = {(row[0], row[1]): float(row[4]) for row in rows(run("benchmarks/gateway.py", *words))}
    for policy in ("none", "snapkv"):
        assert made["cache_aware", policy] > made["round_robin", policy] > 0
    assert abs(made["cache_aware", "snapkv"] - made["cache_aware", "none"]) < 15


def test_host_model():
    """The benchmark itself checks operations of a fold; of times only their presence is checked."""
    words = ("--prefills", "snapkv", "--folds", "h2o,d2o", "--sizes", "3x2", "--requests", "1,3")
    output = run("benchmarks/host_model.py", *words, "--rounds", "2", "--asked", "h2o")
    times, asked = output.split("## By length")
    made = rows(times)
    assert [(row[0], row[1], row[3]) for row in made] == [
        ("prefill", "snapkv", "1"), *(("fold", "h2o", n) for n in "13"),
        *(("fold", "d2o", n) for n in "13"),
    ]  # fmt: skip
    assert [row[4] for row in made[1:]] == ["10", "10", "32", "32"]
    assert all(float(row[5]) > 0 for row in made)
    # The longer a prompt, the fewer layers are scored together.
    [(policy, *numbers)] = rows(asked)
    assert policy == "h2o"
    assert numbers == sorted(numbers, key=int)
    assert 32 < int(numbers[0]) < int(numbers[-1])


def test_scale():
    """As many requests wait as were sent, and every part finds what it is to find."""
    words = ("--servers", "h2o", "--queued", "1,20", "--rounds", "3", "--policies", "2")
    parts = ("--parts", "queue,arrival,policies,fleet,experiment,ranks", "--replicas", "1,3")
    words += ("--arriving", "snapkv")
    ranks = ("--ranks", "2", "--tokens", "200")
    made = rows(run("benchmarks/scale.py", *words, *parts, *ranks))
    assert [row[:2] for row in made[:2]] == [["h2o", "1"], ["h2o", "20"]]
    firsts = [row[0] for row in made]
    assert (firsts.count("snapkv"), firsts.count("2"), firsts.count("3")) == (2, 1, 2)
    assert [row[:4] for row in made[-4:]] == [
        ["snapkv", "2", "1", "0.0"], ["cake", "2", "1", "0.1"], ["lava", "2", "1", "0.0"],
        ["tova", "2", "1", "25.0"],
    ]  # fmt: skip


def test_long_generation(tmp_path):
    picture = tmp_path / "slots.png"
    words = ("--new", "200", "--budget", "40", "--prompt", "20", "--plot", str(picture))
    stock, *policies = rows(run("benchmarks/long_generation.py", *words))
    assert stock[1] == "200"
    assert 20 + 198 <= int(stock[2]) <= 20 + 199  # the last step may be in flight or not
    assert [row[0] for row in policies] == ["streamingllm", "h2o"]
    for row in policies:
        assert row[1] == "200"
        assert 40 < int(row[2]) <= int(row[3]) == 40 + 16 + 2
    assert picture.stat().st_size > 10_000


def test_kernels(tmp_path):
    """Every case is checked against its reference; the report and the picture are written."""
    run("benchmarks/kernels.py", "--toy", "--out", str(tmp_path))
    facts = json.loads((tmp_path / "kernels.json").read_text())
    assert not facts["failed"]
    assert not facts["left_out"]
    topics = {case["topic"] for case in facts["cases"]}
    assert topics == {
        "scoring",
        "layer budgets",
        "decode steps",
        "decode attention",
        "compaction",
        "fold in place",
        "selection",
        "sums over all queries",
        "merge",
        "propagation",
        "folds",
    }
    for case in facts["cases"]:
        assert case["checked"]
        assert len(case["calls"]) >= 2  # ours, and something beside it
        assert all(call["called"]["median"] > 0 for call in case["calls"].values())
    targets = {target["target"]: target for case in facts["cases"] for target in case["targets"]}
    [scoring] = [target for name, target in targets.items() if "prefill" in name]
    assert scoring["limit"] == "at most 0.5 %"
    assert isinstance(scoring["met"], bool)  # it was timed
    [attention] = [target for name, target in targets.items() if "FlashInfer" in name]
    assert attention["met"] is None  # there is none on a CPU
    text = (tmp_path / "kernels.md").read_text()
    assert "Command: `python benchmarks/kernels.py --toy" in text
    assert (tmp_path / "kernels.png").stat().st_size > 10_000


def test_alternatives_to_decode_attention():
    """Each reads the lists that it is timed over, with a stand-in for FlashInfer."""
    said = run("tests/alternatives.py")
    for name in ("page 1", "page 16", "whole cache", "ragged", "SGLang", "FlashAttention"):
        assert name in said
    assert said.count("of the bound") == 7 + 2


def test_kernels_of_named_sizes_have_their_targets():
    """At the sizes of the targets, too large for a CPU, the plan has them first."""
    lines = run("benchmarks/kernels.py", "--list").splitlines()
    assert sorted(lines[:4]) == [
        "compaction 32768",
        "decode attention 65536 x 16",
        "scoring all layers 32768",
        "sums over all queries 32768",
    ]
    assert len(lines) == len(set(lines)) == 6 * (5 + 1 + 4 + 5 + 3) + 16 * 4


def test_figures_of_a_cpu_do_not_replace_those_of_a_gpu():
    for name in ("kernels", "serving"):
        command = [f"benchmarks/{name}.py", "--toy", "--out", "docs/performance"]
        result = forked.run([sys.executable, *command], cwd=ROOT, timeout=600)
        assert result.returncode == 2
        assert "holds figures of a GPU at full size" in result.stderr


def test_serving(tmp_path):
    words = ("--policies", "snapkv,streamingllm", "--shares", "0.25", "--lengths", "200")
    sizes = ("--new", "12", "--at-once", "2", "--rounds", "1", "--crowd", "3")
    run("benchmarks/serving.py", "--toy", *words, *sizes, "--out", str(tmp_path))
    written = tmp_path / "serving-snapkv-streamingllm"
    facts = json.loads(written.with_suffix(".json").read_text())
    assert not facts["failed"]
    cells = {(cell["server"], cell["requests"]): cell for cell in facts["cells"]}
    [number] = {number for _, number in cells} - {2}
    labels = ("stock SGLang", "with the package, no policy", "snapkv 25%", "streamingllm 25%")
    assert set(cells) == {(label, n) for label in labels for n in (2, number)}
    for label in labels[2:]:
        held = cells[label, 2]["held"]
        assert all(0.25 * 200 / 211 - 0.05 < share < 61 / 211 + 0.05 for share in held)
        assert max(cells[label, number]["at_once"]) > max(cells[labels[0], number]["at_once"])
    text = written.with_suffix(".md").read_text()
    assert text.count("| 200 | stock SGLang |") == 2
    assert written.with_suffix(".png").stat().st_size > 10_000


def test_a_package_that_is_missing_is_named():
    """One sentence, before anything is imported that needs it."""
    code = "import sys; sys.modules['lark'] = None; sys.argv[0] = 'gpu_report.py'; import checkout"
    words = [sys.executable, "-P", "-c", code]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "benchmarks")}
    ended = subprocess.run(words, env=env, capture_output=True, text=True)
    assert ended.returncode == 1
    [line] = ended.stderr.splitlines()
    assert line.startswith("gpu_report: kvpolicy needs lark, which this Python (")
    assert "PYTHONPATH" in line


def test_a_checkout_needs_no_installation(tmp_path):
    """Without the installed package a benchmark finds this checkout, and so do its servers."""
    script = tmp_path / "script.py"
    script.write_text(CHECKOUT)
    packages = sysconfig.get_paths()["purelib"]
    # -S: no .pth files, by which the package is installed here.
    command = [sys.executable, "-S", str(script), packages]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert found == ["False", "kvpolicy.sglang_ext.plugin:register", "True", "True"]
