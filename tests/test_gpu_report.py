"""`make gpu-report` at toy sizes on a CPU: every section, and sections that do not end well."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import forked
import pytest

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
PICTURES = {"throughput.png", "latency.png", "prefill.png", "decode.png", "host.png"}
GOALS = 15
STOCK = "stock SGLang"
# Sections in the place of the report's own: each a Python text, and a limit in seconds.
OTHERS = f"""
import sys
sys.path.insert(0, {str(BENCHMARKS)!r})
import gpu_report
from gpu import sections as gpu_sections
def section(name, seconds, text):
    def steps(setting, model, limit, out):
        return {{name: [sys.executable, "-c", text, str(out / f"{{name}}.json")]}}
    gpu_sections.SECTIONS[name] = gpu_sections.Section(name, seconds, name, steps)
gpu_sections.SECTIONS.clear()
"""


@pytest.mark.thorough
@pytest.mark.server
@pytest.mark.slow
def test_every_section(tmp_path):
    """Each section runs to its end and has figures on the page; a CPU gets no verdict."""
    command = [sys.executable, "benchmarks/gpu_report.py", "--toy", "--together"]
    command += ["--out", str(tmp_path)]
    result = forked.run(command, cwd=ROOT, timeout=600)
    assert result.returncode == 0, f"{result.stdout[-6000:]}\n{result.stderr[-3000:]}"
    assert {path.name for path in tmp_path.iterdir()} == {"report.json", "report.md", *PICTURES}
    facts = json.loads((tmp_path / "report.json").read_text())
    sections = facts["sections"]
    assert [*sections] == [
        *("preflight", "smoke", "numerics", "targets", "server", "host"),
        *("serving model-tiny", "pools model-tiny"),
    ]
    assert {each["state"] for each in sections.values()} == {"done"}
    found = {name: x for each in sections.values() for name, x in each["results"].items()}
    assert found["preflight"]["copy"]["median"] > 0
    assert {case["state"] for case in found["smoke"]["cases"]} == {"passed"}
    assert found["numerics"]["outcomes"]["passed"] > 20
    assert len(found["kernels"]["cases"]) == 4
    assert set(found["server"]["equal"].values()) == {found["server"]["answers"]}
    assert found["server"]["agreement"] == {"none": 1.0, "snapkv": 1.0, "h2o": 1.0}
    assert found["server"]["leaked"] == 0
    assert {row["policy"] for row in found["host"]["rows"]} == {"stock SGLang", "none", "h2o"}
    assert all(row["host_us"] > 0 for row in found["host"]["rows"])
    assert {cell["tokens"] for cell in found["serving"]["cells"]} == {200, 300}
    for pool in ("pool-2.5", "pool-4.5"):
        at_once = {cell["server"]: max(cell["at_once"]) for cell in found[pool]["cells"]}
        assert at_once["snapkv 25%"] > at_once["stock SGLang"]
    assert len(facts["goals"]) == GOALS
    assert all(goal["verdict"].startswith("not measured") for goal in facts["goals"])
    page = (tmp_path / "report.md").read_text()
    assert page.count("| not measured: toy sizes say nothing of a GPU |") == GOALS
    for name in PICTURES:
        assert f"]({name})" in page
        assert (tmp_path / name).stat().st_size > 5_000
    assert "Of a machine without a GPU nothing is expected" in page
    for title in (
        "Verdicts",
        "Expected and measured",
        "Sections",
        "preflight",
        "targets: kernels",
        "host: fold_host",
    ):
        assert f"## {title}\n" in page


@pytest.fixture
def goals(monkeypatch):
    """The module benchmarks/gpu/goals.py."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from gpu import goals

    return goals


def test_nothing_is_judged_that_did_not_run(goals):
    verdicts = goals.judged({"toy": False, "sections": {}})
    assert len(verdicts) == GOALS
    assert {each["met"] for each in verdicts} == {None}
    assert {each["measured"] for each in verdicts} == {""}
    assert all(each["verdict"].startswith("not measured: ") for each in verdicts)


@pytest.mark.parametrize("gpu", ["NVIDIA H200", "NVIDIA L40S", "NVIDIA B300", None])
def test_what_is_expected_stands_beside_what_was_measured(goals, gpu):
    """For cells with an equal batch, a crowd, the host and scoring, on a GPU in the table."""
    from gpu import expected

    model = "llama-3.1-8b"
    run = {"new": 128, "at_once": 2, "flags": {"max_total_tokens": 150_000}}
    equal = [
        cell(STOCK, tokens=32768, requests=2, ttft=[2.0, 4.0], tpot=[0.01]),
        cell("snapkv 12%", 0.125, tokens=32768, requests=2, ttft=[3.0], tpot=[0.01]),
    ]
    crowd = [cell("h2o 12%", 0.125, requests=40, at_once=[9], throughput=[500.0])]
    rows = [
        {"policy": policy, "batch": 32, "host_us": us, "launches": number}
        for policy, us, number in (
            (STOCK, 1000.0, 2.0),
            ("none", 1100.0, 2.0),
            ("h2o", 1500.0, 4.0),
        )
    ]
    scored = {"topic": "scoring", "case": "all layers with selection", "tokens": 32768,
              "calls": {"ours": {"share_of_prefill": 0.002}}}  # fmt: skip
    results = {
        "preflight": {"preflight": {"gpu": gpu}},
        f"serving {model}": {"serving": {**run, "cells": equal}},
        f"pools {model}": {"pool-4.5": {**run, "cells": crowd}},
        "host": {"host": {"rows": rows, "prompt": 1024, "steps": 64}},
        "targets": {"kernels": {"cases": [scored]}},
    }  # fmt: skip
    sections = {key: {"results": each, "model": None} for key, each in results.items()}
    for key in sections:
        sections[key]["model"] = model if " " in key else None
    parts = expected.text({"sections": sections})
    if gpu not in ("NVIDIA H200", "NVIDIA L40S"):
        assert "nothing is expected" in parts[0]
        return
    lines = [line.split(" | ") for line in parts[1].splitlines()[2:]]
    found = {(what.removeprefix("| "), figure): numbers for what, figure, *numbers in lines}
    served = f"{model}, {STOCK}, 2 x 32,768"
    assert [figure for what, figure in found if what == served] == ["TTFT, ms", "TPOT, ms"]
    wanted, measured, ratio = found[served, "TTFT, ms"]
    assert float(measured) == 3000
    assert float(ratio.removesuffix(" |")) == pytest.approx(3000 / float(wanted), rel=0.02)
    crowded = f"{model}, h2o 12%, 40 x 4,096"
    assert [figure for what, figure in found if what == crowded] == ["at once", "tokens/s"]
    assert found["h2o, 32 requests", "host per step, us"][1] == "500"
    assert found["h2o, 32 requests", "launches per step"][:2] == [f"{10 / 16:.3g}", "2"]
    assert found["all layers with selection, 32,768", "of a prefill, %"][1] == "0.2"
    assert len(found) == 9


def cell(server, share=1.0, tokens=4096, **figures):
    """A cell of serving.py with twelve requests."""
    made = {"server": server, "share": share, "tokens": tokens, "requests": 12, "held": [share]}
    return {**made, "seconds": [1.0], "ttft": [1.0], "throughput": [1.0], "at_once": [2], **figures}


def test_verdicts(goals):
    """By hand: each figure against its limit, for each model."""
    crowd = [
        cell("stock SGLang"),
        cell("snapkv 50%", 0.5, throughput=[1.8], at_once=[4]),
        cell("snapkv 25%", 0.25, throughput=[2.07], at_once=[4]),
        cell("snapkv 10%", 0.1, throughput=[9.0], at_once=[5]),  # 20 would not come at once
    ]
    equal = [
        cell("stock SGLang"),
        cell("the package installed, no --kv-policy", seconds=[1.005]),
        cell("with the package, no policy", seconds=[1.04]),
        cell("stock SGLang", tokens=32768),
        cell("fastkv 12%", 0.125, tokens=32768, ttft=[0.5]),
    ]
    attention = {"topic": "decode attention", "targets": [
        {"target": "over as many entries", "value": 1.05},
        {"target": "over as many entries", "value": None},
    ]}  # fmt: skip
    results = {
        "serving a": {"serving": {"cells": equal, "at_once": 12}},
        "pools a": {"pool-2": {"cells": crowd, "flags": {"max_total_tokens": 9}}},
        "serving b": {},
        "targets": {"kernels": {"cases": [attention]}},
        "server": {"server": {"answers": 6, "compiled_after_ready": 3, "equal": {
            "stock SGLang, once more": 6, "the package installed, no --kv-policy": 6,
        }}},
    }  # fmt: skip
    sections = {key: {"results": each} for key, each in results.items()}
    verdicts = goals.judged({"toy": False, "sections": sections})
    found = {(v["goal"], v["model"]): (v["measured"], v["verdict"]) for v in verdicts}
    assert found["plugin off: answers unlike stock's", None] == ("0 answers", "met")
    assert found["plugin off: slower than stock", "a"] == ("0.5 %", "met")
    slower = "ample pool, no policy asked for: slower than stock"
    assert found[slower, "a"] == ("4 %", "missed by 2 points")
    assert found[slower, "b"] == ("", "not measured: no prompt was served by both")
    tight = "tight pool, {} % kept: throughput / stock's"
    assert found[tight.format(50), "a"] == ("1.8 x", "met")
    assert found[tight.format(25), "a"] == ("2.07 x", "missed by 10 %")
    at_once = "decoded at once / stock's, times the share held"
    assert found[at_once, "a"] == ("0.5 x", "missed by 47.4 %")
    assert found["FastKV: stock's TTFT / its own, 32k", "a"] == ("2 x", "met")
    equal_entries = "decode of compressed lists / FlashInfer's, equal entries"
    assert found[equal_entries, None] == ("1.05 x", "met")
    assert found["kernels compiled once a server was ready", None][1] == "missed by 3 kernels"
    assert sum(v["met"] is not None for v in verdicts) == 10
    page = goals.judged({"toy": True, "sections": sections})
    assert {each["met"] for each in page} == {None}


def test_compiled_kernels_are_kept_for_the_next_machine(tmp_path, monkeypatch, capsys):
    """Existing caches stay unchanged."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from gpu import cache

    archive, first, second = (tmp_path / name for name in ("cache.tar.gz", "first", "second"))
    for home, names in ((first, (".triton/cache", ".cache/sglang")), (second, (".cache/sglang",))):
        for name in names:
            (home / name / "kernel").mkdir(parents=True)
            (home / name / "kernel" / "code").write_text(f"{home.name} {name}")
    monkeypatch.setenv("HOME", str(first))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    cache.keep(archive)
    monkeypatch.setenv("HOME", str(second))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(second / "elsewhere"))
    cache.restore(archive)
    assert (second / "elsewhere/kernel/code").read_text() == "first .triton/cache"
    assert (second / ".cache/sglang/kernel/code").read_text() == "second .cache/sglang"
    assert not (second / ".triton").exists()
    import gpu_report

    archive.write_bytes(archive.read_bytes()[: archive.stat().st_size // 2])  # its run was cut off
    gpu_report._tried(cache.restore, archive)
    assert "it is not used" in capsys.readouterr().err


def others(folder, *words, sections, status):
    """The report's facts and page after a run of the given sections."""
    lines = [
        f"section({name!r}, {seconds}, {text!r})" for name, (seconds, text) in sections.items()
    ]
    words = ["--toy", "--sections", ",".join(sections), "--out", str(folder), *words]
    script = "\n".join([OTHERS, *lines, f"gpu_report.main({words!r})"])
    result = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=300
    )
    assert result.returncode == status, f"{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
    return json.loads((folder / "report.json").read_text()), (folder / "report.md").read_text()


WELL = "import sys; open(sys.argv[1], 'w').write('{}')"
DIES = """
import os, sys
print(*range(100), sep="\\n", flush=True)
open(sys.argv[1], "w").write('{"figure": 1}')
os.kill(os.getpid(), 11)
"""
# Ignores being asked to end, and so does what it has started, in a session of its own.
HANGS = """
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
text = "import time; time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", text], start_new_session=True)
open(sys.argv[1], "w").write('{"child": %d}' % child.pid)
print("begun", flush=True)
time.sleep(600)
"""
MEMORY = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
bytearray(1 << 31)
"""


@pytest.mark.thorough
@pytest.mark.slow
def test_sections_that_do_not_end_well(tmp_path):
    """Other sections run; results and last lines are kept; a resumed run repeats only these."""
    sections = {"well": (60, WELL), "dies": (60, DIES), "hangs": (3, HANGS), "memory": (60, MEMORY)}
    facts, page = others(tmp_path, sections=sections, status=1)
    found = facts["sections"]
    states = {name: each["state"] for name, each in found.items()}
    assert states == {
        "well": "done",
        "dies": "failed",
        "hangs": "time limit",
        "memory": "out of memory",
    }
    [died] = found["dies"]["steps"].values()
    assert died["status"] == -11
    assert died["tail"] == [str(n) for n in range(60, 100)]
    assert found["dies"]["results"] == {"dies": {"figure": 1}}
    assert found["hangs"]["steps"]["hangs"]["tail"] == ["begun"]
    assert ended(found["hangs"]["results"]["hangs"]["child"])
    assert "MemoryError" in found["memory"]["steps"]["memory"]["tail"][-1]
    for title in ("dies: dies: failed, exit status -11", "hangs: hangs: time limit"):
        assert f"## {title}\n" in page
    assert "62\n63\n" in page
    before = found["well"]
    sections |= dict.fromkeys(("dies", "memory"), (60, WELL))
    facts, _ = others(tmp_path, "--resume", sections=sections, status=1)
    assert facts["sections"]["well"] == before
    assert facts["sections"]["dies"]["state"] == facts["sections"]["memory"]["state"] == "done"
    assert facts["sections"]["hangs"]["state"] == "time limit"
    sections["hangs"] = (9000, WELL)
    facts, page = others(tmp_path, "--resume", sections=sections, status=1)
    assert facts["left_out"] == ["hangs"]
    assert "Left out for want of time: hangs." in page


def ended(pid):
    """Whether a process ends within ten seconds."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    os.kill(pid, 9)
    return False
