"""Arithmetic that all executions share, compared with the rationals of definition.py."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from definition import OPERATIONS, Definition, OutOfReach, Tree, snapped, written
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kvpolicy.dsl.bind.bind import Bound, bind
from kvpolicy.dsl.bind.bounds import max_entries
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.interpret.interpreter import interpret
from kvpolicy.dsl.ir.host import NotStatic, evaluate
from kvpolicy.dsl.ir.nodes import ModelShape, Node
from kvpolicy.dsl.syntax.source import Source
from trees import LEAVES, NEAR_HALVES, ONE, numbers

SHAPE = ModelShape(layers=3, heads=4, kv_heads=2, head_dim=1)
SIZES = {"layers": 3, "heads": 4, "kv_heads": 2}
TOTALS = (*(("number", text) for text in ("0", "1", "7.5", "20", "101")), ("name", "heads"))
PARAMETER = (("^", ("name", "p"), ONE),) * 2


def program(text: str):
    return load(Source("x.yaml", f"policy: x\nlanguage: 1\n{text}")).require()


def node_of(text: str) -> Node:
    """The node of an expression; `p` is a parameter."""
    let = f"let:\n  v: |\n    {text}\n"
    file = f"params: {{p: 0}}\n{let}keep: all where v > 0 else recent(4)\n"
    return program(file).prefill.lets["v"]


def bound(text: str, **settings: str) -> Bound:
    return bind(program(text), SHAPE, settings)


def names_of(**more: int | Fraction):
    """Values of names by layer, for `Definition`."""
    fixed = {name: Fraction(x) for name, x in {**SIZES, **more}.items()}
    values = {name: lambda layer, x=x: x for name, x in fixed.items()}
    return {**values, "layer": Fraction}


def expected(tree: Tree, layer: int, definition: Definition):
    try:
        return definition.value(tree, layer)
    except OutOfReach:
        assume(False)


ARGUMENTS = tuple(("^", ("name", name), ONE) for name in "abc")
ONE_ARGUMENT = ("negate", "abs", "floor", "ceil", "round")


def operator_node(op: str) -> tuple[Tree, Node]:
    """An operator of the parameters a, b and c."""
    tree = (op, *ARGUMENTS[: 1 if op in ONE_ARGUMENT else 3 if op == "clamp" else 2])
    text = written(tree if isinstance(OPERATIONS[op](*[Fraction(1)] * (len(tree) - 1)), Fraction)
                   else ("choose", ONE, tree, ("number", "0")))  # fmt: skip
    file = f"params: {{a: 0, b: 0, c: 0}}\nlet:\n  v: |\n    {text}\n"
    return tree, program(file + "keep: all where v > 0 else recent(4)\n").prefill.lets["v"]


FEW = [Fraction(x, 6) for x in (-15, -12, -9, -6, -2, 0, 2, 3, 6, 9, 12, 15, 20)]


@pytest.mark.parametrize("op", OPERATIONS)
def test_operators(op):
    tree, node = operator_node(op)
    for values in product(FEW, repeat=len(tree) - 1):
        names = dict(zip("abc", values, strict=False))
        try:
            value = Definition(names_of(**names), 1).value(tree, 0)
        except OutOfReach:  # an infinity, or a float64
            continue
        assert evaluate(node, {f"param:{name}": x for name, x in names.items()}) == value, values


@pytest.mark.parametrize("op", ["floor", "ceil", "round", "//", "%"])
def test_computed_numbers_that_become_whole_ones(op):
    tree, node = operator_node(op)

    @given(NEAR_HALVES, st.sampled_from([Fraction(1), Fraction(-1)]))
    def same(a, b):
        found = evaluate(node, {"param:a": a, "param:b": b})
        if op == "%":  # what is left over the whole part, as computed
            assert found == a - float(b * math.floor(snapped(float(a / b))))
        else:
            names = names_of(a=snapped(a), b=b)
            assert found == Definition(names, 1).value(tree, 0)

    same()


@settings(max_examples=150)
@given(
    numbers(LEAVES + PARAMETER, TOTALS), st.integers(0, 2),
    st.builds(Fraction, st.integers(-20, 20), st.sampled_from([1, 2, 3])),
)  # fmt: skip
def test_expressions_known_beforehand_are_rationals(tree, layer, p):
    value = expected(tree, layer, Definition(names_of(p=p), SHAPE.layers))
    node = node_of(written(tree))
    env = {name: Fraction(x) for name, x in SIZES.items()}
    env |= {"layer": Fraction(layer), "param:p": p}
    if value is None:
        with pytest.raises(NotStatic):
            evaluate(node, env)
        return
    found = evaluate(node, env)
    assert found == value
    assert isinstance(found, Fraction)


DATA = (("name", "x"), ("name", "x"), ("name", "x"))


def as_float64(x: Fraction) -> None:
    """Raises OutOfReach for numbers that float64 or float32 would round or snap."""
    bits = x.denominator.bit_length() - 1
    exact = x.denominator == 1 << bits and bits < 20 and abs(x.numerator) < 1 << 20
    if not exact:
        raise OutOfReach


@settings(max_examples=150)
@given(
    numbers((*LEAVES[:5], *LEAVES[10:], *PARAMETER, *DATA), TOTALS),
    st.lists(st.integers(-12, 12), min_size=3, max_size=3),
    st.integers(-4, 4),
)
def test_expressions_of_data_are_the_same_numbers(tree, data, p):
    """The interpreter takes rationals where no data decide, and float64 elsewhere."""
    at_layers = {"x": lambda layer: Fraction(data[layer], 4)}
    definition = Definition(
        names_of(p=p) | at_layers, SHAPE.layers, as_float64, frozenset(at_layers)
    )
    values = [expected(tree, layer, definition) for layer in range(SHAPE.layers)]
    policy = bound(
        "params: {p: 0}\nlet: {x: 'max[kv, token, dim](value)'}\n"
        f"score: |\n  0 * position ^ 1 + ({written(tree)})\nkeep: all\n",
        p=str(p),
    )
    v = np.broadcast_to(np.array(data, np.float32)[:, None, None, None] / 4, (3, 2, 2, 1))
    scores = interpret(policy, np.zeros((3, 4, 2, 1), np.float32), np.zeros_like(v), v).scores
    for score, value in zip(scores, values, strict=True):
        assert np.array_equal(score, np.full((2, 2), _float(value)), equal_nan=True)


def _float(value: Fraction | None) -> float:
    return math.nan if value is None else float(value)


PROMPT = (("^", ("name", "prompt"), ONE),)


@given(
    numbers(LEAVES + PARAMETER + PROMPT, TOTALS, absent=False),
    st.integers(0, 9),
    st.integers(-5, 5),
)
def test_budgets_are_floored(tree, prompt, p):
    definition = Definition(names_of(p=p, prompt=prompt), SHAPE.layers)
    budgets = [expected(tree, layer, definition) for layer in range(SHAPE.layers)]
    kept = [min(prompt, max(0, math.floor(budget))) for budget in budgets]
    policy = bound(
        "params: {p: 0}\nscore: max[dim](key)\nkeep: top(score)\n"
        f"budget: |\n  0 * prompt ^ 1 + ({written(tree)})\n",
        p=str(p),
    )
    k = np.zeros((3, 2, prompt, 1), np.float32)
    result = interpret(policy, np.zeros((3, 4, prompt, 1), np.float32), k, k)
    assert [layer.sum(-1).tolist() for layer in result.kept] == [[each] * 2 for each in kept]
    assert sum(2 * each for each in kept) <= max_entries(policy, prompt)


INFINITE = {math.inf: "(1 / 0)", -math.inf: "(-1 / 0)"}
ENDS = [-math.inf, *(Fraction(x, 2) for x in (-6, -1, 0, 1, 4)), math.inf]


def _shown(x: Fraction | float) -> str:
    return INFINITE[x] if isinstance(x, float) else f"({float(x):g})"


def _limits(op: str, a, b) -> Fraction | float:
    """Result for numbers of which one is infinite; 0 instead of NaN."""
    x, y = float(a), float(b)
    if op == "max" or op == "min":
        return (max if op == "max" else min)(x, y)
    if op == "^":
        return _power_of_infinite(x, y)
    if op in ("/", "//", "%") and y == 0:
        return 0 if x == 0 or op == "%" else math.copysign(math.inf, x)
    if op == "/" or op == "//":
        if math.isinf(x) and math.isinf(y):
            return 0
        quotient = x / y
        return quotient if math.isinf(quotient) or op == "/" else math.floor(quotient)
    if op == "%":
        return 0  # x - y * floor(x / y), where one of the products has no value
    made = {"+": x + y, "-": x - y, "*": x * y}[op]
    return 0 if math.isnan(made) else made


def _power_of_infinite(x: float, y: float) -> float:
    if y == 0 or x == 1:
        return 1
    if math.isinf(y):
        if x < 0:
            return 0 if (y > 0 and x > -1) or (y < 0 and x < -1) else _unbounded_power(x, y)
        return math.inf if (x > 1) == (y > 0) else 0
    if x > 0:
        return math.inf if y > 0 else 0
    if y != math.floor(y):
        return 0  # of a negative number only whole powers
    if y < 0:
        return 0
    return -math.inf if y % 2 else math.inf


def _unbounded_power(x: float, y: float) -> float:
    return 1 if x == -1 else math.inf


@pytest.mark.parametrize("op", ["+", "-", "*", "/", "//", "%", "^", "min", "max"])
def test_infinities(op):
    pairs = [(a, b) for a, b in product(ENDS, ENDS) if math.inf in (abs(a), abs(b))]
    call = f"{op}(%s, %s)" if op in ("min", "max") else f"%s {op.replace('%', '%%')} %s"
    lets = [f"  v{i}: '{call % (_shown(a), _shown(b))}'\n" for i, (a, b) in enumerate(pairs)]
    nodes = program(f"keep: all\nlet:\n{''.join(lets)}").prefill.lets.values()
    found = {pair: evaluate(node, {}) for pair, node in zip(pairs, nodes, strict=True)}
    assert found == {pair: _limits(op, *pair) for pair in pairs}
