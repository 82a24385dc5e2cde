"""Static values: exact rationals, floats where functions leave them, the rule for NaN."""

import math
from fractions import Fraction

import pytest
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.ir.host import NotStatic, evaluate
from kvpolicy.dsl.syntax.source import Source

ENV = {"layers": Fraction(4), "heads": Fraction(8), "kv_heads": Fraction(2), "layer": Fraction(1),
       "prompt": Fraction(1000), "length": Fraction(1000)}  # fmt: skip


def node_of(text, **params):
    """The node of an expression."""
    lines = "".join(f"  {name}: {value}\n" for name, value in params.items())
    parameters = f"params:\n{lines}" if params else ""
    let = f"let:\n  v: |\n    {text}\n"
    file = f"policy: x\nlanguage: 1\n{parameters}{let}keep: all where v > 0 else recent(4)\n"
    return load(Source("x.yaml", file)).require().prefill.lets["v"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.1 * prompt", 100),
        ("0.1 + 0.2", Fraction(3, 10)),
        ("floor(0.29 * 100)", 29),
        ("7 // 2 + 7 % 2", 4),
        ("-7 // 2", -4),
        ("-7 % 3", 2),
        ("round(0.5) + round(1.5)", 2),
        ("ceil(0.1)", 1),
        ("2 ^ 10", 1024),
        ("2 ^ -2", Fraction(1, 4)),
        ("(-1 / 0) ^ 0.5", 0),
        ("(-1 / 0) ^ 2", math.inf),
        ("abs(-3)", 3),
        ("clamp(prompt, 1, 64)", 64),
        ("8 where layer == 1 else 16", 8),
        ("8 where 0 <= layer < 1 else 16", 16),
        ("8 where layer == 1 and not layer > 2 or false else 16", 8),
        ("sum[layer](layer)", 6),
        ("mean[layer](layer)", Fraction(3, 2)),
        ("var[layer](layer)", Fraction(5, 4)),
        ("max[layer](layer) + min[layer](layer)", 3),
        ("count[layer](layer > 1)", 2),
        ("count[layer](layer where layer > 0)", 3),
        ("sum[layer](layer where layer > 9)", 0),
        ("1 where any[layer](layer > 2) else 0", 1),
        ("split[layer](10, layer)", 1),
        ("split[layer](10, 1, max = 2)", 2),
        ("sum[layer](split[layer](101, layer + 0.5))", 101),
        # An operation that would give NaN gives 0; a division by 0 is infinite.
        ("0 / 0", 0),
        ("1 / 0 - 1 / 0", 0),
        ("0 * (1 / 0)", 0),
        ("sqrt(-1)", 0),
        ("log(-1)", 0),
        ("acos(2)", 0),
        ("(-8) ^ 0.5", 0),
        ("5 % 0", 0),
        ("1 / 0", math.inf),
        ("-1 / 0", -math.inf),
        ("0 ^ -1", math.inf),
        ("log(0)", -math.inf),
        ("exp(1e300)", math.inf),
        ("floor(1 / 0)", math.inf),
        # exp(log(8)) is 7.999999999999998 and exp(log(9)) 9.000000000000002.
        ("floor(exp(log(8)))", 8),
        ("ceil(exp(log(9)))", 9),
        ("exp(log(8)) // 2", 4),
        ("floor(exp(log(8)) % 4)", 0),
        ("round(exp(log(9)) / 2)", 4),
        ("sum[layer](split[layer](exp(log(8)), 1))", 8),
        ("at(layer, layer)", 1),
        ("count[layer](not at(layer, layer) >= 0)", 0),
        ("1 where (layer > 0 where layer > 1) else 2", 2),
        ("count[layer]((layer where layer > 1) >= 2)", 2),
        # Layers that do not exist.
        ("count[layer](at(1 / 0, layer))", 0),
        ("count[layer](at(layer where layer > 1, layer))", 2),
    ],
)
def test_value(text, value):
    assert evaluate(node_of(text), ENV) == value


@pytest.mark.parametrize("text", ["0.1 * prompt", "7 // 2", "2 ^ -2", "sum[layer](layer / 3)"])
def test_stays_exact(text):
    assert isinstance(evaluate(node_of(text), ENV), Fraction)


def test_floats():
    assert evaluate(node_of("cos(pi * layer / layers)"), ENV) == pytest.approx(math.sqrt(0.5))
    assert evaluate(node_of("prompt ^ 0.5"), ENV) == pytest.approx(math.sqrt(1000))


def test_large_numbers_go_on_as_floats():
    value = evaluate(node_of("9 ^ 9 ^ 9"), ENV)
    assert value == math.inf
    assert isinstance(evaluate(node_of("9 ^ 300 * 9 ^ 300 * 9 ^ 300"), ENV), float)


def test_parameters():
    node = node_of("rate * prompt", rate=0.25)
    assert evaluate(node, {**ENV, "param:rate": Fraction(1, 4)}) == 250
    with pytest.raises(NotStatic, match="param:rate"):
        evaluate(node, ENV)


@pytest.mark.parametrize("text", ["count[token](all)", "max[token](position)"])
def test_data_is_not_static(text):
    with pytest.raises(NotStatic):
        evaluate(node_of(text), ENV)


def test_needs_the_number_of_layers():
    with pytest.raises(NotStatic, match="layers"):
        evaluate(node_of("sum[layer](layer)"), {"prompt": Fraction(9)})
