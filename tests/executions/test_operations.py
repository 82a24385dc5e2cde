"""The table of operations against the tables that compute them: none lacks or invents one."""

import numpy as np
import pytest
from kvpolicy.dsl.codegen import expressions
from kvpolicy.dsl.data import arrays
from kvpolicy.dsl.execute import ops as torch_operations
from kvpolicy.dsl.interpret import select, values
from kvpolicy.dsl.ir import host
from kvpolicy.dsl.ir.nodes import Node
from kvpolicy.dsl.ops.operations import Kind
from kvpolicy.dsl.ops.table import BUILTINS, FUNCTIONS, OPERATIONS


def names(*kinds, **traits):
    """Of which rows the kind is one of these and the traits are as given."""
    return {
        row.name
        for row in OPERATIONS.values()
        if row.kind in kinds and all(getattr(row, name) == each for name, each in traits.items())
    }


# Of no file that any execution takes; parameters are numbers by then.
NOWHERE = names(Kind.MODEL)
STATIC = {"number", "truth", "param"}
IN_MERGE = names(Kind.MERGE)
LOWERED = {name for name, row in OPERATIONS.items() if row.made_by_lowering}


def test_the_interpreter_computes_every_operation_of_a_checked_program():
    assert set(arrays.FUNCTIONS) == names(Kind.ARITHMETIC)
    assert set(arrays.COMPARISONS) == names(Kind.COMPARISON)
    assert set(arrays.LOGIC) == names(Kind.LOGIC)
    others = set(values._LEAVES) | set(select.SELECTIONS)
    whole = names(Kind.ARITHMETIC, Kind.COMPARISON, Kind.LOGIC, Kind.REDUCTION)
    assert others == set(OPERATIONS) - whole - NOWHERE - STATIC - IN_MERGE - LOWERED


@pytest.mark.parametrize("name", sorted(names(Kind.REDUCTION)))
def test_the_interpreter_knows_what_a_reduction_of_nothing_is(name):
    data = [True, False] if OPERATIONS[name].takes == "truth" else [1.0, 2.0]
    nothing = arrays.Array.of(("token",), np.array(data), np.array([False, False]))
    found = arrays.reduce(name, nothing, ("token",)).data
    assert bool(abs(found) == float("inf")) == OPERATIONS[name].infinite_of_none


def test_torch_computes_every_operation_of_a_lowered_program():
    by_name = names(Kind.REMEMBERED)  # read by `Evaluation` itself
    assert {"state", "before", "budget", "decided"} == by_name
    across = names(Kind.LOOK, Kind.PARTITION)  # by `across.py`
    assert {"past", "at", "split", "cascade", "cluster"} == across
    expected = set(OPERATIONS) - NOWHERE - STATIC - IN_MERGE - by_name - across - {"then"}
    assert set(torch_operations.TORCH_FORMS) == expected


def test_exact_numbers_know_every_operation_of_numbers():
    known = {name for name, row in OPERATIONS.items() if row.host is not None}
    assert known == names(Kind.ARITHMETIC, Kind.COMPARISON, Kind.LOGIC, Kind.REDUCTION)


def test_what_is_a_whole_number_needs_no_interval():
    assert all(not row.whole for row in OPERATIONS.values() if row.interval is not None)


def test_generated_kernels_fold_every_reduction_or_put_it_together():
    assert set(expressions.FOLDS) == set(expressions.EMPTY)
    assert set(expressions.FOLDS) == names(Kind.REDUCTION) - {"mean", "var"}


def test_generated_kernels_have_a_text_for_what_they_say_they_compute():
    own = {"divide", "power", "negate"}
    calls = set(expressions._CALLS)
    infix = {
        name for name in names(Kind.ARITHMETIC, Kind.COMPARISON, in_kernels=True)
        if OPERATIONS[name].sign is not None
    }  # fmt: skip
    assert calls | infix == names(Kind.ARITHMETIC, Kind.COMPARISON, in_kernels=True)
    assert own <= infix
    for name in names(Kind.LOGIC, Kind.BRANCH):
        assert OPERATIONS[name].in_kernels
        assert hasattr(expressions.Writer, f"_{name}")


def test_names_and_functions_of_the_language_are_made_of_rows():
    assert {builtin.op for builtin in BUILTINS.values()} <= set(OPERATIONS)
    elementwise = {"max": "maximum", "min": "minimum"}
    made = {f.name for f in FUNCTIONS.values() if f.body is None}
    assert made | set(elementwise.values()) <= set(OPERATIONS)
    leaves = {builtin.op for builtin in BUILTINS.values()}
    signs = {name for name, row in OPERATIONS.items() if row.sign is not None}
    rest = {"number", "param", "data", "state", "budget", "decided", "mask", "choose", "then"}
    rest |= {"dropped"} | LOWERED
    assert set(OPERATIONS) == made | set(elementwise.values()) | leaves | signs | rest


def test_exact_results_are_finite_where_the_table_says_so():
    for name in names(Kind.ARITHMETIC, keeps_finite=True):
        row = OPERATIONS[name]
        args = tuple(Node("number", value=host.Fraction(n)) for n in (1, 0)[: row.least])
        assert abs(host.evaluate(Node(name, args), {})) < float("inf"), name


@pytest.mark.parametrize("name", sorted(names(Kind.ARITHMETIC, commutative=True)))
def test_what_is_commutative_gives_the_same_either_way(name):
    x, y = (Node("number", value=host.Fraction(n)) for n in (3, 7))
    assert host.evaluate(Node(name, (x, y)), {}) == host.evaluate(Node(name, (y, x)), {})
