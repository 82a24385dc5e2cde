"""Order, what is chosen by it, and values that follow from others along an axis."""

from __future__ import annotations

from typing import Any

from kvpolicy.dsl.ops import ranges
from kvpolicy.dsl.ops.operations import Function, Kind, Operation, Parameter

_X = (Parameter("x"),)


def _selection(name: str, least: int, most: int | None, meaning: str, **traits: Any) -> Operation:
    return Operation(name, Kind.SELECTION, least, most, meaning, **traits)


def _choice(
    name: str, rule: str, meaning: str, cost: str, axes: str, shape: str,
    parameters: tuple[Parameter, ...] = _X, **traits: Any,
) -> Operation:  # fmt: skip
    """What authors call; axes: who competes, in the order written."""
    function = Function(
        name, rule, parameters, meaning, cost, axes=axes, result=shape,
        group="Order and selection",
    )  # fmt: skip
    return _selection(
        name, 1, len(parameters), "x and, of `top`, the count",
        function=function, names_axes=True, **traits,
    )  # fmt: skip


def _along_tokens(name: str, meaning: str, cost: str = "O(size)", **traits: Any) -> Operation:
    """What keeps the axes and the unit of its argument."""
    function = Function(
        name, "along", _X, meaning, cost, axes="token", unit="first", result="as x",
        group="Along tokens",
    )  # fmt: skip
    return Operation(
        name, Kind.OTHER, 1, 1, "x; axes = (token,)", function, result="number", takes="number",
        names_axes=True, keeps_finite=True, keeps_present=True, per_head=True,
        interpret=f"along.{name}", torch=f"along.{name}", **traits,
    )  # fmt: skip


def _pool(name: str, meaning: str, **traits: Any) -> Operation:
    meaning += "; centred, stride 1, odd width; absent stays absent"
    function = Function(
        name, "pool", (*_X, Parameter("width", "width")), meaning, unit="first", result="as x",
        group="Along tokens",
    )  # fmt: skip
    return Operation(
        name, Kind.POOL, 2, 2, "x, width", function, result="number", takes="number",
        reads_along=("token",), keeps_finite=True, keeps_present=True, per_head=True,
        interpret=f"along.{name}", torch="pool.pool", triton=f"pooling.{name}", **traits,
    )  # fmt: skip


ROWS = (
    _choice("top", "top", "the n highest present values among those that compete along a; equal "
            "values in the order of the axes as written, lower index first. Without n, in last "
            "place of `keep` and `propagate.tokens`: as many as the budget still misses", "select",
            "optional", "truth, axes of x",
            (*_X, Parameter("n", "entries", optional=True, unit="tokens")), result="truth",
            takes="number", sorts=True, per_head=True, interpret="select.top", torch="select.top",
            triton="leaves.end"),
    _choice("rank", "along", "1 for the highest along a, ties by index; absent stays absent",
            "sort", "optional", "as x", result="number", takes="number", exact=True, whole=True,
            sorts=True, per_head=True, interpret="along.rank", torch="select.rank"),
    _choice("index", "index", "0, 1, ... along axis a of x", "O(size)", "required", "number[a]",
            result="number", always_finite=True, whole=True, interpret="along.index",
            torch="select.index", triton="leaves.index"),
    _selection("then", 2, None, "token sets in order", result="truth", takes="truth",
               interpret="select.then"),
    _selection("missing", 2, 2, "budget, taken: entries to fill, of all who compete",
               result="number", names_axes=True, made_by_lowering=True, whole=True, per_head=True,
               torch="select.missing"),
    _selection("remaining", 1, 1, "taken: candidates left over, of all who compete",
               result="number", names_axes=True, made_by_lowering=True, whole=True, per_head=True,
               torch="select.remaining"),
    _selection("fill", 4, 4, "x, taken, n, left: taken, and the n best of the rest by x",
               result="truth", names_axes=True, made_by_lowering=True, sorts=True, per_head=True,
               torch="select.fill"),
    _pool("avgpool", "sum of the present neighbours along `token`, divided by the width",
          interval=ranges.with_zero),
    _pool("maxpool", "largest present neighbour along `token`", interval=ranges.first),
    _along_tokens("cumsum", "sum of the present values at this token and those before it; absent "
                  "stays absent", interval=ranges.total),
    _along_tokens("sort", "the present values, ascending, at the tokens that have one; absent "
                  "stays absent", "sort", sorts=True, interval=ranges.first),
)  # fmt: skip
