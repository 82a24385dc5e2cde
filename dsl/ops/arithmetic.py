"""Operations of which each value follows from the values at the same place."""

from __future__ import annotations

import math
import operator
from typing import Any

from kvpolicy.dsl.ops import exact, ranges
from kvpolicy.dsl.ops.operations import Kind, Operation
from kvpolicy.dsl.ops.signatures import Function, Parameter


def _numeric(name: str, arguments: int, sign: str | None = None, /, **traits: Any) -> Operation:
    return Operation(
        name, Kind.ARITHMETIC, arguments, arguments, sign=sign, result="number", takes="number",
        per_head=True, **traits,
    )  # fmt: skip


def _call(name: str, meaning: str, /, unit: str | None = None, **traits: Any) -> Operation:
    """What authors write as a function of one number."""
    function = Function(
        name, "elementwise", (Parameter("x"),), meaning, unit=unit or "none", result="as x",
        group="Elementwise",
    )  # fmt: skip
    return _numeric(name, 1, function=function, unit=unit, **traits)


def _truth(name: str, kind: Kind, arguments: int, sign: str, **traits: Any) -> Operation:
    compares = kind is Kind.COMPARISON
    return Operation(
        name, kind, arguments, arguments, sign=sign, result="truth",
        takes="number" if compares else "truth", unit="alike" if compares else None, exact=True,
        always_finite=True, keeps_finite=True, per_head=True, in_kernels=True, **traits,
    )  # fmt: skip


def _branch(name: str, arguments: int, meaning: str, **traits: Any) -> Operation:
    return Operation(
        name, Kind.BRANCH, arguments, arguments, meaning, exact=True, keeps_finite=True,
        per_head=True, in_kernels=True, **traits,
    )  # fmt: skip


_FINITE: dict[str, Any] = {"keeps_finite": True, "in_kernels": True}

ROWS = (
    _numeric("add", 2, "+", exact=True, commutative=True, unit="alike", combines="added",
             keeps_present=True, host=operator.add, interval=ranges.add, **_FINITE),
    _numeric("subtract", 2, "-", exact=True, unit="alike", combines="subtracted",
             keeps_present=True, host=operator.sub, interval=ranges.subtract, **_FINITE),
    _numeric("multiply", 2, "*", exact=True, commutative=True, unit="product", keeps_present=True,
             host=operator.mul, interval=ranges.multiply, **_FINITE),
    _numeric("divide", 2, "/", exact=True, unit="quotient", keeps_zero=True, may_be_nan=True,
             divides=True, in_kernels=True, host=operator.truediv, interval=ranges.divide),
    _numeric("floor_divide", 2, "//", exact=True, unit="quotient", may_be_nan=True, divides=True,
             host=exact.floor_divide, interval=ranges.floor_divide),
    _numeric("modulo", 2, "%", exact=True, unit="first", may_be_nan=True, divides=True,
             host=exact.modulo),
    _numeric("power", 2, "^", exact=True, keeps_zero=True, may_be_nan=True, in_kernels=True,
             host=exact.power, interval=ranges.power),
    _numeric("negate", 1, "-", exact=True, unit="first", keeps_zero=True, keeps_present=True,
             host=operator.neg, interval=ranges.negate, **_FINITE),
    _call("abs", "absolute value", "first", exact=True, keeps_zero=True, keeps_present=True,
          host=abs, interval=ranges.absolute, **_FINITE),
    _call("exp", "e to the power x", in_kernels=True, host=exact.exp, interval=ranges.POSITIVE),
    _call("log", "natural logarithm", may_be_nan=True, in_kernels=True, host=exact.log,
          interval=ranges.logarithm),
    _call("sqrt", "square root; of a negative number 0", keeps_zero=True, may_be_nan=True,
          host=math.sqrt, interval=ranges.POSITIVE, **_FINITE),
    _call("cos", "cosine", keeps_finite=True, host=math.cos, interval=ranges.TURN),
    _call("sin", "sine", keeps_finite=True, host=math.sin, interval=ranges.TURN),
    _call("acos", "arc cosine", keeps_finite=True, may_be_nan=True, host=math.acos),
    _call("floor", "largest whole number not above x", "first", exact=True, keeps_finite=True,
          host=exact.floor, interval=ranges.floor),
    _call("ceil", "smallest whole number not below x", "first", exact=True, keeps_finite=True,
          host=exact.ceil, interval=ranges.ceil),
    _call("round", "nearest whole number, halves to even", "first", exact=True, keeps_finite=True,
          host=exact.nearest, interval=ranges.nearest),
    _numeric("minimum", 2, exact=True, commutative=True, unit="alike", host=min,
             interval=ranges.minimum, **_FINITE),
    _numeric("maximum", 2, exact=True, commutative=True, unit="alike", host=max,
             interval=ranges.maximum, **_FINITE),
    _truth("less", Kind.COMPARISON, 2, "<", host=operator.lt),
    _truth("less_equal", Kind.COMPARISON, 2, "<=", host=operator.le),
    _truth("greater", Kind.COMPARISON, 2, ">", host=operator.gt),
    _truth("greater_equal", Kind.COMPARISON, 2, ">=", host=operator.ge),
    _truth("equal", Kind.COMPARISON, 2, "==", commutative=True, host=operator.eq),
    _truth("not_equal", Kind.COMPARISON, 2, "!=", commutative=True, host=operator.ne),
    _truth("and", Kind.LOGIC, 2, "and", commutative=True, host=operator.and_),
    _truth("or", Kind.LOGIC, 2, "or", commutative=True, host=operator.or_),
    _truth("not", Kind.LOGIC, 1, "not", host=operator.not_),
    _branch("mask", 2, "x where c", keeps_zero=True),
    _branch("choose", 3, "x where c else y; arguments x, c, y", unit="alike",
            combines="two branches of one `where`", interval=ranges.either),
    Operation("broadcast", Kind.OTHER, 1, 1, "x repeated along the axes of the node's type",
              made_by_lowering=True),
)  # fmt: skip
