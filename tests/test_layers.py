"""The arrows between the folders: sglang_ext -> dsl, kernels, experiments; evaluation -> dsl,
experiments; experiments -> dsl; nothing else imports sglang.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FORBIDDEN = {
    "dsl": (
        "sglang",
        "kvpolicy.sglang_ext",
        "kvpolicy.kernels",
        "kvpolicy.evaluation",
        "kvpolicy.experiments",
        "triton",
        "flashinfer",
    ),
    "experiments": (
        "sglang",
        "kvpolicy.sglang_ext",
        "kvpolicy.kernels",
        "kvpolicy.evaluation",
        "torch",
        "scipy",
        "statsmodels",
    ),
    "kernels": (
        "sglang",
        "kvpolicy.sglang_ext",
        "kvpolicy.dsl",
        "kvpolicy.evaluation",
        "kvpolicy.experiments",
    ),
    "sglang_ext": ("kvpolicy.evaluation",),
    "evaluation": ("sglang", "kvpolicy.sglang_ext", "kvpolicy.kernels"),
}


def imported_names(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def modules(folder: str) -> list[Path]:
    found = sorted((ROOT / folder).rglob("*.py"))
    assert found, f"{folder} has no modules"
    return found


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_folder_imports_only_what_it_may(folder):
    for path in modules(folder):
        for name in imported_names(path):
            bad = [f for f in FORBIDDEN[folder] if name == f or name.startswith(f + ".")]
            assert not bad, f"{path.relative_to(ROOT)} imports {name}"


def test_sglang_names_stand_in_one_file():
    users = {
        path.name
        for path in modules("sglang_ext")
        if any(name.split(".")[0] == "sglang" for name in imported_names(path))
    }
    assert users == {"compat.py"}


def test_kernels_is_not_a_regular_package():
    # A real dependency of SGLang is called `kernels`; an __init__.py here would shadow it.
    assert not (ROOT / "kernels" / "__init__.py").exists()
