"""The wheel holds every folder, policy and grammar, and only `kvpolicy` at the top level."""

import importlib.metadata
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from kvpolicy.dsl.execute.tensors import kernels
from kvpolicy.dsl.execute.tensors.kernels import installed
from kvpolicy.dsl.syntax.diagnostics import PolicyError
from kvpolicy.kernels.table import REFERENCE
from kvpolicy.kernels.table_triton import TRITON

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


@pytest.mark.thorough
def test_wheel_holds_every_module_and_policy(wheel):
    names = set(wheel.namelist())
    for folder in ("dsl", "evaluation", "experiments", "kernels", "sglang_ext"):
        for path in [*(ROOT / folder).rglob("*.py"), ROOT / folder / "py.typed"]:
            assert f"kvpolicy/{path.relative_to(ROOT)}" in names
    assert not any("__pycache__" in name for name in names)
    for path in (ROOT / "policies").glob("*.yaml"):
        assert f"kvpolicy/policies/{path.name}" in names
    assert {"kvpolicy/dsl/syntax/expr.lark", "kvpolicy/dsl/syntax/expr.lark.saved"} <= names
    for path in (ROOT / "kernels" / "tuned").glob("*.json"):
        assert f"kvpolicy/kernels/tuned/{path.name}" in names


@pytest.mark.thorough
def test_wheel_adds_one_top_level_name(wheel):
    assert {name.split("/")[0].split("-")[0] for name in wheel.namelist()} == {"kvpolicy"}


def test_programs_are_given_torch_where_nobody_gives_them_kernels(monkeypatch):
    assert installed() is REFERENCE
    monkeypatch.setattr(kernels, "entry_points", lambda **_: ())
    with pytest.raises(PolicyError, match=r"no installed package has .* `kvpolicy.kernels`"):
        installed.__wrapped__()


def test_tables_have_the_same_names():
    assert set(TRITON) == {*REFERENCE, "generated"}
    code = "import sys, kvpolicy.kernels.table; sys.exit('triton' in sys.modules)"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


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
