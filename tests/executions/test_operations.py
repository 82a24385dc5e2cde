"""Rows of the table of operations match the functions that compute them, none more or less."""

import ast
from pathlib import Path

import numpy as np
import pytest
from kvpolicy.dsl.data import arrays
from kvpolicy.dsl.execute.operations.table import TORCH_FORMS
from kvpolicy.dsl.ir import host
from kvpolicy.dsl.ir.nodes import Node
from kvpolicy.dsl.ops.forms import LIBRARIES, form
from kvpolicy.dsl.ops.operations import Kind
from kvpolicy.dsl.ops.table import BUILTINS, FUNCTIONS, OPERATIONS

DSL = Path(__file__).parents[2] / "dsl"
# How forms begin.
FORMS = {
    "interpret": (["e: Values", "node: Node"], ["x: Array", "axes: Sequence[str]"],
                  ["data: np.ndarray", "present: np.ndarray"], ["a: np.ndarray", "b: np.ndarray"],
                  ["x: np.ndarray"]),
    "torch": (["node: Node", "frame: Frame"],),
    "triton": (["writer: Writer", "node: Node"], ["writer: Leaves", "node: Node"]),
}  # fmt: skip


def names(*kinds, **traits):
    """Names of rows with one of these kinds and the given traits."""
    return {
        row.name
        for row in OPERATIONS.values()
        if row.kind in kinds and all(getattr(row, name) == each for name, each in traits.items())
    }


# Of no file that any execution takes; parameters are numbers by then.
NOWHERE = {"hidden_in", "hidden_mid", "number", "truth", "param"}
LOWERED = {name for name, row in OPERATIONS.items() if row.made_by_lowering}
FOLDERS = {"interpret": "interpret", "torch": "execute.operations", "triton": "codegen"}


def has_form(execution):
    return {name for name, row in OPERATIONS.items() if getattr(row, execution) is not None}


def paths(execution):
    """Paths of forms that rows name, without texts of Triton."""
    found = {getattr(OPERATIONS[name], execution) for name in has_form(execution)}
    return {path for path in found if not path.startswith("tl.") and "{" not in path}


@pytest.mark.parametrize("execution", FOLDERS)
def test_every_form_that_a_row_names_is_there(execution):
    for path in paths(execution):
        assert callable(form(path, FOLDERS[execution]))
    assert all(callable(form(f"calls.{function.rule}", "check")) for function in FUNCTIONS.values())


@pytest.mark.parametrize("execution", FOLDERS)
def test_files_of_forms_hold_none_that_no_row_names(execution):
    """A form is recognized by its first arguments; other functions of a file are helpers."""
    folder = DSL.joinpath(*FOLDERS[execution].split("."))
    files = {path.partition(".")[0] for path in paths(execution)} - set(LIBRARIES)
    assert files
    for file in files:
        for each in ast.parse((folder / f"{file}.py").read_text()).body:
            name = None
            if isinstance(each, ast.FunctionDef):
                arguments = [ast.unparse(x) for x in each.args.args[:2]]
                name = each.name if arguments in FORMS[execution] else None
            elif isinstance(each, ast.Assign) and "elementwise(" in ast.unparse(each.value):
                name = ast.unparse(each.targets[0])
            if name is not None and not name.startswith("_"):
                assert f"{file}.{name}" in paths(execution)


def test_the_interpreter_computes_every_operation_of_a_checked_program():
    assert has_form("interpret") == set(OPERATIONS) - NOWHERE - names(Kind.MERGE) - LOWERED


@pytest.mark.parametrize("name", sorted(names(Kind.REDUCTION)))
def test_every_execution_knows_what_a_reduction_of_nothing_is(name):
    row = OPERATIONS[name]
    data = [True, False] if row.takes == "truth" else [1.0, 2.0]
    nothing = arrays.Array.of(("token",), np.array(data), np.array([False, False]))
    assert arrays.reduce(form(row.interpret, "interpret"), nothing, ("token",)).data == row.of_none
    assert row.host([]) == row.of_none


def test_torch_computes_every_operation_of_a_lowered_program():
    by_name = names(Kind.REMEMBERED)  # read by `Evaluation` itself
    assert {"state", "before", "budget", "decided"} == by_name
    across = names(Kind.LOOK, Kind.PARTITION)  # by `across.py`
    assert {"past", "at", "split", "cascade", "cluster"} == across
    elsewhere = NOWHERE | names(Kind.MERGE) | by_name | across | {"then"}
    elsewhere |= {"data"}  # binding makes head tables of it
    assert has_form("torch") == set(TORCH_FORMS) == set(OPERATIONS) - elsewhere


def test_exact_numbers_know_every_operation_of_numbers():
    known = {name for name, row in OPERATIONS.items() if row.host is not None}
    assert known == names(Kind.ARITHMETIC, Kind.COMPARISON, Kind.LOGIC, Kind.REDUCTION)


def test_what_is_a_whole_number_needs_no_interval():
    assert all(not row.whole for row in OPERATIONS.values() if row.interval is not None)


def test_generated_kernels_fold_every_reduction_or_put_it_together():
    for name in names(Kind.REDUCTION):
        row = OPERATIONS[name]
        assert (row.triton is None) == row.averages


def test_texts_of_generated_kernels_take_all_arguments():
    texts = {name: OPERATIONS[name].triton for name in has_form("triton")}
    for name, text in texts.items():
        if "{" in text:
            numbers = [f"{{{i}}}" for i in range(OPERATIONS[name].most)]
            assert all(each in text for each in numbers)


def test_names_and_functions_of_the_language_are_made_of_rows():
    named = {name for name, row in OPERATIONS.items() if row.function or row.names or row.sign}
    pairs = {row.of_two for row in OPERATIONS.values()} - {None}
    rest = {"number", "param", "data", "state", "budget", "decided", "mask", "choose", "then"}
    assert set(OPERATIONS) == named | pairs | rest | {"dropped"} | LOWERED
    assert all(OPERATIONS[builtin.op].names for builtin in BUILTINS.values())
    assert set(FUNCTIONS) - set(OPERATIONS) == {f.name for f in FUNCTIONS.values() if f.body}


def test_exact_results_are_finite_where_the_table_says_so():
    for name in names(Kind.ARITHMETIC, keeps_finite=True):
        row = OPERATIONS[name]
        args = tuple(Node("number", value=host.Fraction(n)) for n in (1, 0)[: row.least])
        assert abs(host.evaluate(Node(name, args), {})) < float("inf"), name


@pytest.mark.parametrize("name", sorted(names(Kind.ARITHMETIC, commutative=True)))
def test_what_is_commutative_gives_the_same_either_way(name):
    x, y = (Node("number", value=host.Fraction(n)) for n in (3, 7))
    assert host.evaluate(Node(name, (x, y)), {}) == host.evaluate(Node(name, (y, x)), {})
