"""Binding of a parameter's text, range and default, by the rules of docs/language.md."""

from __future__ import annotations

from fractions import Fraction

import pytest
from definition import Definition, OutOfReach, written
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kvpolicy.dsl.bind.bind import bind
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.dsl.syntax.diagnostics import PolicyError
from kvpolicy.dsl.syntax.source import Source
from trees import LEAVES, ONE, numbers

SHAPE = ModelShape(layers=5, heads=6, kv_heads=3, head_dim=1)
KEEP = "keep: all where {} > 0 else recent(4)\n"
digits = st.text("0123456789", min_size=1, max_size=18)
# Model sizes and the parameter `a`; not `layer`, which a default does not know.
SIZES = (*LEAVES[:12], ("^", ("name", "layers"), ONE), ("^", ("name", "a"), ONE))


def program(text: str):
    return load(Source("x.yaml", f"policy: x\nlanguage: 1\n{text}")).require()


PLAIN = program("params: {p: 0}\n" + KEEP.format("p"))


@given(
    st.sampled_from(["", "-"]), digits, st.none() | digits, st.none() | st.integers(-99, 99),
    st.booleans(),
)  # fmt: skip
def test_decimal_numbers(sign, before, after, exponent, signed):
    text = sign + before + ("" if after is None else f".{after}")
    if exponent is not None:
        text += f"e{exponent:+d}" if signed or exponent < 0 else f"e{exponent}"
    whole = int(before + (after or ""))
    scale = (exponent or 0) - len(after or "")
    value = Fraction(whole) * Fraction(10) ** scale
    assert bind(PLAIN, SHAPE, {"p": text}).params["p"] == (-value if sign else value)


few = st.none() | st.integers(-3, 3).map(lambda x: Fraction(x, 2))
UNITS = (None, "tokens", "layers", "ratio")


@settings(max_examples=300)
@given(
    st.fixed_dictionaries(
        {"min": few, "max": few, "above": few, "odd": st.booleans(), "unit": st.sampled_from(UNITS)}
    ),
    st.integers(-16, 16).map(lambda x: Fraction(x, 4)),
    st.integers(-16, 16).map(lambda x: Fraction(x, 4)),
)
def test_ranges(rules, default, value):
    """Numbers of tokens and layers are whole; a ratio is from 0 to 1 by default."""
    shown = {**rules, "odd": "true" if rules["odd"] else None}
    pairs = [f"{key}: {_text(x)}" for key, x in shown.items() if x is not None]
    text = f"params:\n  p: {{default: {_text(default)}, {', '.join(pairs)}}}\n" + KEEP.format("p")
    if not _accepted(default, rules):
        assert load(Source("x.yaml", f"policy: x\nlanguage: 1\n{text}")).program is None
        return
    checked = program(text)
    assert bind(checked, SHAPE).params == {"p": default}
    if _accepted(value, rules):
        assert bind(checked, SHAPE, {"p": _text(value)}).params == {"p": value}
    else:
        with pytest.raises(PolicyError, match=r"error\[range\]: `p` is .*; it must be"):
            bind(checked, SHAPE, {"p": _text(value)})


def _text(x: Fraction | str) -> str:
    return x if isinstance(x, str) else f"{float(x):g}"


def _accepted(x: Fraction, rules: dict) -> bool:
    low, high = rules["min"], rules["max"]
    if rules["unit"] == "ratio":
        low, high = (0 if low is None else low), (1 if high is None else high)
    if rules["unit"] in ("tokens", "layers") and x.denominator > 1:
        return False
    if rules["odd"] and (x.denominator > 1 or x.numerator % 2 == 0):
        return False
    if rules["above"] is not None and x <= rules["above"]:
        return False
    return (low is None or x >= low) and (high is None or x <= high)


@given(st.lists(st.integers(-4, 4), min_size=1, max_size=4), st.data(), st.integers(-6, 6))
def test_choices(choices, data, value):
    default = data.draw(st.sampled_from(choices))
    checked = program(
        f"params:\n  p: {{default: {default}, choices: {choices}}}\n" + KEEP.format("p")
    )
    if value in choices:
        assert bind(checked, SHAPE, {"p": str(value)}).params == {"p": value}
    else:
        with pytest.raises(PolicyError, match="it must be one of"):
            bind(checked, SHAPE, {"p": str(value)})


@given(numbers(SIZES, absent=False, across=False), st.integers(-5, 5))
def test_defaults_of_sizes_and_other_parameters(tree, a):
    sizes = {"layers": 5, "heads": 6, "kv_heads": 3, "a": a}
    names = {name: lambda layer, x=Fraction(x): x for name, x in sizes.items()}
    try:
        value = Definition(names, SHAPE.layers).value(tree, 0)
    except OutOfReach:
        assume(False)
    text = f"params:\n  p: |\n    {written(tree)}\n  a: 0\nkeep: all where p > a else recent(4)\n"
    assert bind(program(text), SHAPE, {"a": str(a)}).params == {"p": value, "a": a}


@given(numbers(SIZES, absent=False, across=False), st.integers(-5, 5))
def test_require(tree, a):
    """A false condition is refused: for defaults by the check, for overrides by binding."""
    condition = (">", tree, ("number", "1"))
    holds = []
    for given_ in (0, a):
        sizes = {"layers": 5, "heads": 6, "kv_heads": 3, "a": given_}
        names = {name: lambda layer, x=Fraction(x): x for name, x in sizes.items()}
        try:
            holds.append(Definition(names, SHAPE.layers).value(condition, 0))
        except OutOfReach:
            assume(False)
    text = f"params: {{a: 0}}\nrequire:\n  - |\n    {written(condition)}\n"
    checked = load(Source("x.yaml", f"policy: x\nlanguage: 1\n{text}" + KEEP.format("a")))
    if checked.program is None:  # without a model, where its sizes do not matter
        assert not holds[0]
    elif holds[1]:
        bind(checked.program, SHAPE, {"a": str(a)})
    else:
        with pytest.raises(PolicyError, match="requires"):
            bind(checked.program, SHAPE, {"a": str(a)})
