"""The arrows between the folders: sglang_ext -> dsl, kernels, experiments; evaluation -> dsl,
experiments; experiments -> dsl; nothing else imports sglang. Within a folder the packages stand in
an order, and no files import each other in a cycle.
"""

import ast
from graphlib import TopologicalSorter
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

# Each package imports only those before it; what lies beside the packages may import all of them.
PACKAGES = {
    "dsl": ("syntax", "ops", "ir", "check", "bind", "data", "interpret", "codegen", "execute",
            "tools"),
    "dsl/execute": ("tensors", "operations", "layer", "planned", "prefill", "decode"),
    "experiments": ("statistics", "definition", "replica", "fleet", "reporting", "simulate"),
    "kernels": ("launch", "entries", "templates", "scoring", "merging", "attention"),
    "sglang_ext": ("face", "memory", "request", "report", "forward", "attention", "serving",
                   "experiment", "clients"),
}  # fmt: skip
# Functions that Triton compiles, in two ways.
COMPILED = {"rows_triton._copy"}
APART = {("dsl", "execute", "interpret"), ("dsl", "interpret", "execute")}


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


@pytest.mark.parametrize("folder", PACKAGES)
def test_packages_stand_in_an_order(folder):
    order, above = PACKAGES[folder], ["kvpolicy", *folder.split("/")]
    there = {path.parent.name for path in (ROOT / folder).glob("*/__init__.py")}
    assert there == set(order)
    for place, package in enumerate(order):
        summary = ast.get_docstring(
            ast.parse((ROOT / folder / package / "__init__.py").read_text())
        )
        assert summary
        assert "\n" not in summary
        for path in (ROOT / folder / package).rglob("*.py"):
            for name in imported_names(path):
                parts = name.split(".")
                if parts[: len(above)] != above or len(parts) < len(above) + 2:
                    continue
                other = parts[len(above)]
                where = f"{path.relative_to(ROOT)} imports {name}"
                assert other in order[: place + 1], where
                assert (folder, package, other) not in APART, where


def module_name(path: Path) -> str:
    name = ".".join(("kvpolicy", *path.relative_to(ROOT).with_suffix("").parts))
    return name.removesuffix(".__init__")


def test_no_files_import_each_other():
    files = {module_name(path): path for folder in FORBIDDEN for path in modules(folder)}
    graph = {
        name: {other for other in imported_names(path) if other in files} - {name}
        for name, path in files.items()
    }
    assert len(graph) > 300
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the files


def test_a_class_has_a_name_of_its_own():
    """A name stands for one thing in the whole project, so that a search finds that thing."""
    places: dict[str, list[str]] = {}
    for folder in FORBIDDEN:
        for path in modules(folder):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert len(places) > 300
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


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


def test_launched_kernels_serve_arguments_of_any_size():
    """Functions launched as `name[grid](...)` are declared by `launch/kernel.py`."""
    launched, declared = set(), set()
    for path in modules("kernels"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any(
                ast.unparse(each).startswith("kernel(") for each in node.decorator_list
            ):
                declared.add(node.name)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                launched.add(ast.unparse(node.func.value).removeprefix("frames."))
    assert len(declared) > 30
    # Both of `function` are declared beside the function that they compile.
    assert launched - declared == {"function"}


def test_functions_of_kernels_take_few_arguments():
    """More than 12 are bundled; what Triton compiles is called by these functions alone."""
    found = {}
    for path in modules("kernels"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                name = f"{path.stem}.{node.name}"
                compiled = name in COMPILED or any(
                    ast.unparse(each).startswith(("triton.jit", "kernel("))
                    for each in node.decorator_list
                )
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                if not compiled:
                    found[name] = len(arguments)
    assert len(found) > 100
    assert {name: number for name, number in found.items() if number > 12} == {}
