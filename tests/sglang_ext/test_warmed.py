"""No kernel is compiled once a server is ready; held without a GPU, see warmed_cases.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kvpolicy.kernels.launch import tuned

HERE = Path(__file__).parent
POLICIES = sorted(
    path.stem for path in (HERE.parents[1] / "policies").glob("*.yaml") if "." not in path.stem
)


MEASURED = sorted(tuned.SHIPPED.glob("*.json"))


def asked(*arguments: str, **more: str) -> dict[str, tuple[int, list[str]]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | more
    environment["PYTHONPATH"] = os.pathsep.join(
        map(str, (HERE, HERE.parent, HERE.parent / "kernels"))
    )
    command = [sys.executable, "-P", HERE / "warmed_cases.py", *arguments]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def every():
    return asked()


@pytest.mark.thorough
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


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("name", DIVIDED)
def test_what_is_served_with_divided_heads_was_warmed(rank, name):
    warmed, missing = rank[name]
    assert warmed > 0
    assert missing == []


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.stem)
def test_choices_that_were_measured_are_warmed(path, tmp_path):
    """A file of a GPU gives tiles to calls of many sizes."""
    choices = json.loads(path.read_text(encoding="utf-8")) | {"device": "cuda"}
    (tmp_path / "cuda.json").write_text(json.dumps(choices), encoding="utf-8")
    found = asked("attention", "snapkv", "h2o", "d2o", **{tuned.FOLDER_VARIABLE: str(tmp_path)})
    assert len(found) == 4
    assert [missing for _, missing in found.values()] == [[]] * 4


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["snapkv", "h2o"])
def test_what_was_not_warmed_is_seen(name):
    """Warmed without long prompts, kernels of long rows are missing."""
    ((_, missing),) = asked("--longest", "100", name).values()
    assert missing
