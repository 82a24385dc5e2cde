"""Values known before the prefill, which the host evaluates: exact rationals, or float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from kvpolicy.dsl.ir import counts
from kvpolicy.dsl.ir.nodes import Node
from kvpolicy.dsl.ops.operations import Kind

Value = Fraction | bool | float

# An exact number with more digits than this goes on as float64: time is bounded, and an exact
# number can always become a float.
MAX_BITS = 1000


class NotStatic(Exception):
    """The node depends on something that is not known before the prefill."""


def evaluate(node: Node, env: Mapping[str, Value]) -> Value:
    """The value of a static node.

    Args:
        node: a number or condition without axes.
        env: values of `layers`, `heads`, `kv_heads`, `layer`, `prompt`, `length`, `budget` and
            `param:NAME`; what is missing is not known. Reductions over `layer` need `layers`.

    Returns:
        An exact Fraction or a bool; a float after `cos`, `exp`, `log`, `sqrt`, irrational powers
        and infinities. An operation whose result would be NaN gives 0.

    Raises:
        NotStatic: the value depends on data, on a missing name, or is absent.
    """
    return evaluator(env)(node)


def evaluator(env: Mapping[str, Value]) -> Callable[[Node], Value]:
    """`evaluate` in one environment for many nodes: what they share is computed once.

    The nodes must outlive the result.
    """
    evaluation = _Evaluation(env)

    def value(node: Node) -> Value:
        found = evaluation.value(node)
        if found is None:
            raise NotStatic("the value is absent")
        return found

    return value


class _Evaluation:
    """One environment; None stands for an absent value."""

    def __init__(self, env: Mapping[str, Value]) -> None:
        self.env = env
        self.known: dict[int, Value | None] = {}
        self.layers: list[_Evaluation] | None = None

    def value(self, node: Node) -> Value | None:
        if id(node) not in self.known:
            self.known[id(node)] = self._compute(node)
        return self.known[id(node)]

    def _compute(self, node: Node) -> Value | None:
        if node.type.axes:
            raise NotStatic(node.op)
        if node.operation.kind is Kind.LITERAL:
            return node.literal
        if node.op == "size" and node.value == "pi":
            return math.pi
        if node.operation.kind is Kind.GIVEN or node.op == "budget":
            return self._given(node)
        if "layer" in node.axes:
            return self._over_layers(node)
        if node.op == "at":
            return self._at(node)
        if node.op == "choose":
            return self._choose(node)
        args = [self.value(arg) for arg in node.args]
        if node.op in _LOGIC:
            return _LOGIC[node.op](*(bool(arg) for arg in args))
        if node.op == "mask":
            return args[0] if args[1] else None
        if node.op not in _NUMERIC:
            raise NotStatic(node.op)
        if any(arg is None for arg in args):
            return False if node.type.kind == "truth" else None
        return _number(_NUMERIC[node.op], args)

    def _given(self, node: Node) -> Value:
        name = {"size": str(node.value), "param": f"param:{node.value}"}.get(node.op, "budget")
        if name not in self.env:
            raise NotStatic(name)
        value = self.env[name]
        return Fraction(value) if type(value) is int else value

    def _choose(self, node: Node) -> Value | None:
        chosen = node.args[0] if self.value(node.args[1]) else node.args[2]
        return self.value(chosen)

    def _each_layer(self) -> list[_Evaluation]:
        """This environment at every layer."""
        if self.layers is None:
            if "layers" not in self.env:
                raise NotStatic("layers")
            count = int(self.env["layers"])
            self.layers = [_Evaluation({**self.env, "layer": Fraction(i)}) for i in range(count)]
            for layer in self.layers:
                layer.layers = self.layers
        return self.layers

    def _at(self, node: Node) -> Value | None:
        which, here = self.value(node.args[0]), self._given_layer()
        layer = None if which is None else counts.index(which, here + 1)
        return None if layer is None else self._each_layer()[layer].value(node.args[1])

    def _given_layer(self) -> int:
        if "layer" not in self.env:
            raise NotStatic("layer")
        return int(self.env["layer"])

    def _over_layers(self, node: Node) -> Value | None:
        layers = self._each_layer()
        if node.operation.shares_out:
            return self._split(node, layers)
        if node.op not in _REDUCTIONS:
            raise NotStatic(node.op)
        values = [v for v in (layer.value(node.args[0]) for layer in layers) if v is not None]
        if any(isinstance(value, float) for value in values):
            values = [_float(value) for value in values]
        return _number(lambda: _REDUCTIONS[node.op](values), [])

    def _split(self, node: Node, layers: list[_Evaluation]) -> Value:
        here = self._given_layer()
        columns = [[_share(layer.value(arg)) for layer in layers] for arg in node.args]
        maxima = columns[2] if len(columns) > 2 else None
        cascade = node.op == "cascade"
        return Fraction(counts.split(columns[0][here], columns[1], maxima, cascade=cascade)[here])


def _share(value: Value | None) -> Value:
    if value is None:
        raise NotStatic("an absent share")
    return value


def _number(operation: Callable[..., Value], args: Sequence[Any]) -> Value:
    """The result of an operation under the rules for NaN, infinities and size."""
    try:
        value = operation(*args)
    except ZeroDivisionError:
        return _by_zero(args[0])
    except OverflowError:
        value = operation(*(_float(arg) for arg in args))
    except (ValueError, TypeError):  # outside a function's domain, or a complex power
        return Fraction(0)
    if isinstance(value, complex):
        return Fraction(0)
    if isinstance(value, float) and math.isnan(value):
        return Fraction(0)
    if isinstance(value, Fraction) and _bits(value) > MAX_BITS:
        return _float(value)
    return value


def _by_zero(dividend: Value) -> Value:
    if dividend == 0 or dividend != dividend:
        return Fraction(0)
    return math.inf if dividend > 0 else -math.inf


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _float(value: Value) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _power(base: Value, exponent: Value) -> Value:
    if base == 0 and exponent < 0:
        return math.inf
    if base < 0 and math.isfinite(exponent) and exponent != math.floor(exponent):
        return Fraction(0)  # not a number
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        if _bits(base) * abs(exponent.numerator) <= 2 * MAX_BITS:
            return base**exponent.numerator
    try:
        return math.pow(_float(base), _float(exponent))
    except OverflowError:
        return -math.inf if base < 0 and exponent % 2 == 1 else math.inf


def _round_to(function: Callable[[Value], int]) -> Callable[[Value], Value]:
    """floor, ceil or round; an infinity stays what it is."""

    def rounded(x: Value) -> Value:
        infinite = isinstance(x, float) and math.isinf(x)
        return x if infinite else Fraction(function(counts.snap(x)))

    return rounded


def _floor_divide(a: Value, b: Value) -> Value:
    if isinstance(a, float) or isinstance(b, float):
        quotient = _number(lambda: _float(a) / _float(b), []) if b else _by_zero(a)
        return _round_to(math.floor)(quotient)
    return Fraction(a // b)


def _modulo(a: Value, b: Value) -> Value:
    if isinstance(a, float) or isinstance(b, float):
        return a - b * _floor_divide(a, b) if b else Fraction(0)
    return a % b if b else Fraction(0)


def _exp(x: Value) -> float:
    try:
        return math.exp(_float(x))
    except OverflowError:
        return math.inf


_NUMERIC: dict[str, Callable[..., Value]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: a / b,
    "floor_divide": _floor_divide,
    "modulo": _modulo,
    "power": _power,
    "negate": lambda a: -a,
    "abs": abs,
    "exp": _exp,
    "log": lambda x: math.log(x) if x > 0 else -math.inf if x == 0 else Fraction(0),
    "sqrt": lambda x: math.sqrt(x),
    "cos": lambda x: math.cos(x),
    "sin": lambda x: math.sin(x),
    "acos": lambda x: math.acos(x),
    "floor": _round_to(math.floor),
    "ceil": _round_to(math.ceil),
    "round": _round_to(round),
    "minimum": min,
    "maximum": max,
    "less": lambda a, b: a < b,
    "less_equal": lambda a, b: a <= b,
    "greater": lambda a, b: a > b,
    "greater_equal": lambda a, b: a >= b,
    "equal": lambda a, b: a == b,
    "not_equal": lambda a, b: a != b,
}
_LOGIC: dict[str, Callable[..., bool]] = {
    "and": lambda a, b: a and b,
    "or": lambda a, b: a or b,
    "not": lambda a: not a,
}


def _mean(values: Sequence[Any]) -> Value:
    return sum(values, Fraction(0)) / len(values) if values else Fraction(0)


def _variance(values: Sequence[Any]) -> Value:
    middle = _mean(values)
    return _mean([(value - middle) * (value - middle) for value in values])


_REDUCTIONS: dict[str, Callable[[Sequence[Any]], Value]] = {
    "sum": lambda values: sum(values, Fraction(0)),
    "mean": _mean,
    "max": lambda values: max(values, default=-math.inf),
    "min": lambda values: min(values, default=math.inf),
    "var": _variance,
    "any": any,
    "count": lambda values: Fraction(sum(1 for v in values if v is not False)),
}
