"""The wheel holds every folder, policy and grammar, and nothing at the top level but `kvpolicy`."""

import importlib.metadata
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", folder, ROOT],
        check=True,
        capture_output=True,
    )
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def test_wheel_holds_every_module_and_policy(wheel):
    names = set(wheel.namelist())
    for folder in ("dsl", "evaluation", "experiments", "kernels", "sglang_ext"):
        for path in [*(ROOT / folder).rglob("*.py"), ROOT / folder / "py.typed"]:
            assert f"kvpolicy/{path.relative_to(ROOT)}" in names
    assert not any("__pycache__" in name for name in names)
    for path in (ROOT / "policies").glob("*.yaml"):
        assert f"kvpolicy/policies/{path.name}" in names
    assert {"kvpolicy/dsl/syntax/expr.lark", "kvpolicy/dsl/syntax/expr.lark.saved"} <= names
    for path in (ROOT / "kernels" / "tuned").glob("*.json"):  # none before a GPU has been measured
        assert f"kvpolicy/kernels/tuned/{path.name}" in names


def test_wheel_adds_one_top_level_name(wheel):
    assert {name.split("/")[0].split("-")[0] for name in wheel.namelist()} == {"kvpolicy"}


def test_entry_points():
    points = importlib.metadata.entry_points(group="sglang.srt.plugins")
    assert [p.value for p in points if p.name == "kvpolicy"] == [
        "kvpolicy.sglang_ext.plugin:register"
    ]


def test_every_folder_of_code_is_linked_and_typed():
    links = {path.name: path for path in (ROOT / "src" / "kvpolicy").iterdir()}
    assert set(links) == {
        *("dsl", "evaluation", "experiments", "kernels", "policies", "sglang_ext")
    }
    for name, link in links.items():
        assert link.resolve() == ROOT / name
        assert name == "policies" or (link / "py.typed").exists()
