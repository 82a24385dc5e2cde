"""No kernel is compiled once a server is ready; held without a GPU, see warmed_cases.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
POLICIES = sorted(
    path.stem for path in (HERE.parents[1] / "policies").glob("*.yaml") if "." not in path.stem
)


def asked(*arguments: str) -> dict[str, tuple[int, list[str]]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (HERE, HERE.parent / "kernels")))
    command = [sys.executable, "-P", HERE / "warmed_cases.py", *arguments]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def every():
    return asked()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention", "attention of pairs", *POLICIES])
def test_what_is_served_was_warmed(every, name):
    """Prompts of 1,000 to 131,072 tokens, copies, decode steps and folds need no more kernels."""
    warmed, missing = every[name]
    assert warmed > 0
    assert missing == []


# One of each kind: of each head alone, across heads, both with layers, folds, merges, tokens that
# leave the prefill, layers in pairs.
DIVIDED = ("attention", "snapkv", "lava", "h2o", "tova", "d2o", "fastkv", "minicache")


@pytest.fixture(scope="module", params=[2, 16])
def rank(request):
    """On one of two ranks, and on one of two that hold the same KV head."""
    return asked("--ranks", str(request.param), *DIVIDED)


@pytest.mark.slow
@pytest.mark.parametrize("name", DIVIDED)
def test_what_is_served_with_divided_heads_was_warmed(rank, name):
    warmed, missing = rank[name]
    assert warmed > 0
    assert missing == []


@pytest.mark.parametrize("name", ["snapkv", "h2o"])
def test_what_was_not_warmed_is_seen(name):
    """Warmed without long prompts, kernels of long rows are missing."""
    ((_, missing),) = asked("--longest", "100", name).values()
    assert missing
