"""Elementwise operations: each value follows from the values at the same place."""

from __future__ import annotations

import math
import operator
from typing import Any

from kvpolicy.dsl.ops import host, ranges
from kvpolicy.dsl.ops.operations import Function, Kind, Operation, Parameter


def _row(name: str, kind: Kind, arguments: int, *forms: Any, **traits: Any) -> Operation:
    """A row; `forms` are those of the host, intervals, the interpreter, torch and Triton."""
    form_of = dict(zip(("host", "interval", "interpret", "torch", "triton"), forms, strict=False))
    return Operation(name, kind, arguments, arguments, per_head=True, **form_of, **traits)


def _numeric(name: str, arguments: int, *forms: Any, **traits: Any) -> Operation:
    return _row(name, Kind.ARITHMETIC, arguments, *forms, result="number", takes="number", **traits)


def _call(
    name: str, meaning: str, *forms: Any, unit: str | None = None, **traits: Any
) -> Operation:
    """The row of an operation that authors write as a function of one number."""
    function = Function(
        name, "elementwise", (Parameter("x"),), meaning, unit=unit or "none", result="as x",
        group="Elementwise",
    )  # fmt: skip
    return _numeric(name, 1, *forms, function=function, unit=unit, **traits)


def _truth(name: str, kind: Kind, arguments: int, *forms: Any, **traits: Any) -> Operation:
    return _row(
        name, kind, arguments, *forms, result="truth", exact=True, always_finite=True,
        keeps_finite=True, **traits,
    )  # fmt: skip


def _compare(
    name: str, sign: str, host: Any, interpret: str, torch: str, **traits: Any
) -> Operation:
    return _truth(
        name, Kind.COMPARISON, 2, host, None, interpret, torch, f"{{0}} {sign} {{1}}", sign=sign,
        takes="number", unit="alike", **traits,
    )  # fmt: skip


def _logic(name: str, arguments: int, *forms: Any, **traits: Any) -> Operation:
    return _truth(name, Kind.LOGIC, arguments, *forms, sign=name, takes="truth", **traits)


def _branch(name: str, arguments: int, interval: Any, **traits: Any) -> Operation:
    paths = (f"elementwise.{name}",) * 3
    return _row(
        name, Kind.BRANCH, arguments, None, interval, *paths, exact=True, keeps_finite=True,
        **traits,
    )  # fmt: skip


ROWS = (
    _numeric("add", 2, operator.add, ranges.add, "numpy.add", "operator.add", "{0} + {1}",
             linear=True, sign="+", exact=True, commutative=True, unit="alike", combines="added",
             keeps_finite=True),
    _numeric("subtract", 2, operator.sub, ranges.subtract, "numpy.subtract", "operator.sub",
             "{0} - {1}", linear=True, sign="-", exact=True, unit="alike", combines="subtracted",
             keeps_finite=True),
    _numeric("multiply", 2, operator.mul, ranges.multiply, "numpy.multiply", "operator.mul",
             "{0} * {1}", scales=True, sign="*", exact=True, commutative=True, unit="product",
             keeps_finite=True),
    _numeric("divide", 2, operator.truediv, ranges.divide, "elementwise.divide",
             "elementwise.divide", "elementwise.divide", scales=True, sign="/", exact=True,
             unit="quotient", keeps_zero=True, may_be_nan=True, divides=True),
    _numeric("floor_divide", 2, host.floor_divide, ranges.floor_divide, "elementwise.floor_divide",
             "elementwise.floor_divide", sign="//", exact=True, unit="quotient", may_be_nan=True,
             divides=True),
    _numeric("modulo", 2, host.modulo, None, "elementwise.modulo", "elementwise.modulo", sign="%",
             exact=True, unit="first", may_be_nan=True, divides=True),
    _numeric("power", 2, host.power, ranges.power, "elementwise.power", "elementwise.power",
             "elementwise.power", sign="^", exact=True, keeps_zero=True, may_be_nan=True),
    _numeric("negate", 1, operator.neg, ranges.negate, "numpy.negative", "torch.neg", "-{0}",
             linear=True, sign="-", exact=True, unit="first", keeps_finite=True, keeps_zero=True),
    _call("abs", "absolute value", abs, ranges.absolute, "numpy.abs", "torch.abs", "tl.abs({0})",
          exact=True, keeps_finite=True, keeps_zero=True, unit="first"),
    _call("exp", "e to the power x", host.exp, ranges.POSITIVE, "numpy.exp", "torch.exp",
          "tl.exp({0})"),
    _call("log", "natural logarithm", host.log, ranges.logarithm, "numpy.log", "torch.log",
          "tl.log({0})", may_be_nan=True),
    _call("sqrt", "square root; of a negative number 0", math.sqrt, ranges.POSITIVE, "numpy.sqrt",
          "torch.sqrt", "tl.sqrt({0})", keeps_finite=True, keeps_zero=True, may_be_nan=True),
    _call("cos", "cosine", math.cos, ranges.TURN, "numpy.cos", "torch.cos", keeps_finite=True),
    _call("sin", "sine", math.sin, ranges.TURN, "numpy.sin", "torch.sin", keeps_finite=True),
    _call("acos", "arc cosine", math.acos, None, "numpy.arccos", "torch.acos", keeps_finite=True,
          may_be_nan=True),
    _call("floor", "largest whole number not above x", host.floor, ranges.floor,
          "elementwise.floor", "elementwise.floor", exact=True, keeps_finite=True, rounds_up_by=0,
          unit="first"),
    _call("ceil", "smallest whole number not below x", host.ceil, ranges.ceil, "elementwise.ceil",
          "elementwise.ceil", exact=True, keeps_finite=True, rounds_up_by=1, unit="first"),
    _call("round", "nearest whole number, halves to even", host.nearest, ranges.nearest,
          "elementwise.nearest", "elementwise.nearest", exact=True, keeps_finite=True,
          rounds_up_by=0.5, unit="first"),
    _numeric("minimum", 2, min, ranges.minimum, "numpy.minimum", "elementwise.minimum",
             "tl.minimum({0}, {1})", exact=True, commutative=True, unit="alike", keeps_finite=True),
    _numeric("maximum", 2, max, ranges.maximum, "numpy.maximum", "elementwise.maximum",
             "tl.maximum({0}, {1})", exact=True, commutative=True, unit="alike", keeps_finite=True),
    _compare("less", "<", operator.lt, "numpy.less", "operator.lt"),
    _compare("less_equal", "<=", operator.le, "numpy.less_equal", "operator.le"),
    _compare("greater", ">", operator.gt, "numpy.greater", "operator.gt"),
    _compare("greater_equal", ">=", operator.ge, "numpy.greater_equal", "operator.ge"),
    _compare("equal", "==", operator.eq, "numpy.equal", "operator.eq", commutative=True),
    _compare("not_equal", "!=", operator.ne, "numpy.not_equal", "operator.ne", commutative=True),
    _logic("and", 2, operator.and_, None, "numpy.logical_and", "torch.logical_and",
           "elementwise.both", commutative=True),
    _logic("or", 2, operator.or_, None, "numpy.logical_or", "torch.logical_or",
           "elementwise.either", commutative=True),
    _logic("not", 1, operator.not_, None, "numpy.logical_not", "torch.logical_not",
           "elementwise.neither"),
    _branch("mask", 2, None, meaning="x where c", keeps_zero=True),
    _branch("choose", 3, ranges.either, meaning="x where c else y; arguments x, c, y", unit="alike",
            combines="two branches of one `where`"),
    Operation("broadcast", Kind.OTHER, 1, 1, "x repeated along the axes of the node's type",
              made_by_lowering=True, torch="elementwise.repeated"),
)  # fmt: skip
