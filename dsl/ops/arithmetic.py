"""Operations of which each value follows from the values at the same place."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

from kvpolicy.dsl.ops import exact, ranges
from kvpolicy.dsl.ops.operations import Kind, Operation
from kvpolicy.dsl.ops.signatures import Function, Parameter


def _numeric(
    name: str, arguments: int, sign: str | None, host: Callable[..., Any],
    interval: ranges.Rule | None, interpret: str, torch: str, triton: str | None = None, /,
    **traits: Any,
) -> Operation:  # fmt: skip
    return Operation(
        name, Kind.ARITHMETIC, arguments, arguments, sign=sign, result="number", takes="number",
        per_head=True, host=host, interval=interval, interpret=interpret, torch=torch,
        triton=triton, **traits,
    )  # fmt: skip


def _call(
    name: str, meaning: str, unit: str | None, host: Callable[..., Any],
    interval: ranges.Rule | None, interpret: str, torch: str, triton: str | None = None, /,
    **traits: Any,
) -> Operation:  # fmt: skip
    """What authors write as a function of one number."""
    function = Function(
        name, "elementwise", (Parameter("x"),), meaning, unit=unit or "none", result="as x",
        group="Elementwise",
    )  # fmt: skip
    return _numeric(
        name, 1, None, host, interval, interpret, torch, triton, function=function, unit=unit,
        **traits,
    )  # fmt: skip


def _truth(
    name: str, kind: Kind, arguments: int, sign: str, host: Callable[..., Any], interpret: str,
    torch: str, triton: str, /, **traits: Any,
) -> Operation:  # fmt: skip
    return Operation(
        name, kind, arguments, arguments, sign=sign, result="truth", exact=True,
        always_finite=True, keeps_finite=True, per_head=True, host=host, interpret=interpret,
        torch=torch, triton=triton, **traits,
    )  # fmt: skip


def _compare(
    name: str, sign: str, host: Callable[..., Any], interpret: str, torch: str, **traits: Any
) -> Operation:
    return _truth(
        name, Kind.COMPARISON, 2, sign, host, interpret, torch, f"{{0}} {sign} {{1}}",
        takes="number", unit="alike", **traits,
    )  # fmt: skip


def _branch(name: str, arguments: int, meaning: str, **traits: Any) -> Operation:
    path = f"elementwise.{name}"
    return Operation(
        name, Kind.BRANCH, arguments, arguments, meaning, exact=True, keeps_finite=True,
        per_head=True, interpret=path, torch=path, triton=path, **traits,
    )  # fmt: skip


ROWS = (
    _numeric("add", 2, "+", operator.add, ranges.add, "numpy.add", "torch.add", "{0} + {1}",
             exact=True, commutative=True, unit="alike", combines="added", keeps_finite=True,
             keeps_present=True),
    _numeric("subtract", 2, "-", operator.sub, ranges.subtract, "numpy.subtract", "torch.subtract",
             "{0} - {1}", exact=True, unit="alike", combines="subtracted", keeps_finite=True,
             keeps_present=True),
    _numeric("multiply", 2, "*", operator.mul, ranges.multiply, "numpy.multiply", "torch.multiply",
             "{0} * {1}", exact=True, commutative=True, unit="product", keeps_finite=True,
             keeps_present=True),
    _numeric("divide", 2, "/", operator.truediv, ranges.divide, "elementwise.divide",
             "elementwise.divide", "elementwise.divide", exact=True, unit="quotient",
             keeps_zero=True, may_be_nan=True, divides=True),
    _numeric("floor_divide", 2, "//", exact.floor_divide, ranges.floor_divide,
             "elementwise.floor_divide", "elementwise.floor_divide", exact=True, unit="quotient",
             may_be_nan=True, divides=True),
    _numeric("modulo", 2, "%", exact.modulo, None, "elementwise.modulo", "elementwise.modulo",
             exact=True, unit="first", may_be_nan=True, divides=True),
    _numeric("power", 2, "^", exact.power, ranges.power, "elementwise.power", "elementwise.power",
             "elementwise.power", exact=True, keeps_zero=True, may_be_nan=True),
    _numeric("negate", 1, "-", operator.neg, ranges.negate, "numpy.negative", "torch.neg", "-{0}",
             exact=True, unit="first", keeps_finite=True, keeps_zero=True, keeps_present=True),
    _call("abs", "absolute value", "first", abs, ranges.absolute, "numpy.abs", "torch.abs",
          "tl.abs({0})", exact=True, keeps_finite=True, keeps_zero=True, keeps_present=True),
    _call("exp", "e to the power x", None, exact.exp, ranges.POSITIVE, "numpy.exp", "torch.exp",
          "tl.exp({0})"),
    _call("log", "natural logarithm", None, exact.log, ranges.logarithm, "numpy.log", "torch.log",
          "tl.log({0})", may_be_nan=True),
    _call("sqrt", "square root; of a negative number 0", None, math.sqrt, ranges.POSITIVE,
          "numpy.sqrt", "torch.sqrt", "tl.sqrt({0})", keeps_finite=True, keeps_zero=True,
          may_be_nan=True),
    _call("cos", "cosine", None, math.cos, ranges.TURN, "numpy.cos", "torch.cos",
          keeps_finite=True),
    _call("sin", "sine", None, math.sin, ranges.TURN, "numpy.sin", "torch.sin", keeps_finite=True),
    _call("acos", "arc cosine", None, math.acos, None, "numpy.arccos", "torch.acos",
          keeps_finite=True, may_be_nan=True),
    _call("floor", "largest whole number not above x", "first", exact.floor, ranges.floor,
          "elementwise.floor", "elementwise.floor", exact=True, keeps_finite=True),
    _call("ceil", "smallest whole number not below x", "first", exact.ceil, ranges.ceil,
          "elementwise.ceil", "elementwise.ceil", exact=True, keeps_finite=True),
    _call("round", "nearest whole number, halves to even", "first", exact.nearest, ranges.nearest,
          "elementwise.nearest", "elementwise.nearest", exact=True, keeps_finite=True),
    _numeric("minimum", 2, None, min, ranges.minimum, "numpy.minimum", "elementwise.minimum",
             "tl.minimum({0}, {1})", exact=True, commutative=True, unit="alike",
             keeps_finite=True),
    _numeric("maximum", 2, None, max, ranges.maximum, "numpy.maximum", "elementwise.maximum",
             "tl.maximum({0}, {1})", exact=True, commutative=True, unit="alike",
             keeps_finite=True),
    _compare("less", "<", operator.lt, "numpy.less", "torch.lt"),
    _compare("less_equal", "<=", operator.le, "numpy.less_equal", "torch.le"),
    _compare("greater", ">", operator.gt, "numpy.greater", "torch.gt"),
    _compare("greater_equal", ">=", operator.ge, "numpy.greater_equal", "torch.ge"),
    _compare("equal", "==", operator.eq, "numpy.equal", "torch.eq", commutative=True),
    _compare("not_equal", "!=", operator.ne, "numpy.not_equal", "torch.ne", commutative=True),
    _truth("and", Kind.LOGIC, 2, "and", operator.and_, "numpy.logical_and", "torch.logical_and",
           "elementwise.both", takes="truth", commutative=True),
    _truth("or", Kind.LOGIC, 2, "or", operator.or_, "numpy.logical_or", "torch.logical_or",
           "elementwise.either", takes="truth", commutative=True),
    _truth("not", Kind.LOGIC, 1, "not", operator.not_, "numpy.logical_not", "torch.logical_not",
           "elementwise.neither", takes="truth"),
    _branch("mask", 2, "x where c", keeps_zero=True),
    _branch("choose", 3, "x where c else y; arguments x, c, y", unit="alike",
            combines="two branches of one `where`", interval=ranges.either),
    Operation("broadcast", Kind.OTHER, 1, 1, "x repeated along the axes of the node's type",
              made_by_lowering=True, torch="elementwise.repeated"),
)  # fmt: skip
