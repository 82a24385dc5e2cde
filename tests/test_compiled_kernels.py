"""Kernels compiled without a GPU: their table, and compilation by an older Triton."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.thorough
OLDER = Path(sys.prefix) / "triton-3.6.0"  # tests/environment/setup.sh puts it there
SCRIPT = """
import json, sys
sys.path.insert(0, "benchmarks")
sys.argv = ["compiled_kernels.py"]
import compiled_kernels as script

def cell(group, name, *kernels):
    names = ("name", "registers", "spilled", "shared", "programs")
    made = [dict(zip(names, kernel)) for kernel in kernels]
    return {"target": 90, "size": 128, "group": group, "name": name, "seconds": 1.0,
            "kernels": made}

old = cell(4, "attention", ("_decode", 255, 12, 1 << 10, 0))
many = cell(script.MQA, "attention", ("_decode", 200, 0, 70 << 10, 2), ("_decode", 99, 0, 0, 5))
new = cell(4, "attention", ("_decode", 168, 0, 72 << 10, 3))
cells = script.merged([old, many, new])
bad = script.described([cell(1, "h2o", ("columns", 255, 12, 100 << 10, 1))])
print(json.dumps([len(cells), script.described(cells), bad, script.earlier(None, "x")]))
"""


@pytest.mark.slow
def test_of_each_shape_the_last_run_counts():
    pytest.importorskip("triton")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    words = [sys.executable, "-P", "-c", SCRIPT]
    run = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    number, text, bad, earlier = json.loads(run.stdout)
    assert number == 2
    assert earlier == []
    assert "| sm_90 | 128 | attention | 4, all (MQA) | 3 | 0 | 200 | 72 | 2 |" in text
    assert "Those that spill" not in text
    assert "| sm_90 | 128 | attention | 3 | 2-5 |" in text
    assert "| sm_90 | 128 | 1 | columns | 12 | 100 |" in bad


@pytest.mark.slow
@pytest.mark.skipif(not OLDER.is_dir(), reason="needs Triton 3.6.0 beside the environment's own")
def test_an_older_triton_compiles_the_kernels_of_a_policy(tmp_path):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(OLDER), "TRITON_CACHE_DIR": str(tmp_path)}
    command = "benchmarks/compiled_kernels.py --targets 90 --heads 128 --groups 4 --policies d2o"
    words = [sys.executable, *command.split()]
    run = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "Triton 3.6.0, bfloat16" in run.stdout
    assert "| sm_90 | 128 | d2o | 4 |" in run.stdout
    assert "Those that spill" not in run.stdout, run.stdout
