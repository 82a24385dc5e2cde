"""Reductions: one value of many, along the axes that are named."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from kvpolicy.dsl.ops import host, ranges
from kvpolicy.dsl.ops.operations import Kind, Operation, Parameter, called


def _row(
    name: str, verb: str, meaning: str, unit: str = "first", *, of: str = "number",
    interpret: str, torch: str, result: str = "number", of_none: float = 0, **traits: Any,
) -> Operation:  # fmt: skip
    """A row; `Node.axes` are the axes removed, or (layer,)."""
    return called(
        name, "reduction", (Parameter("x", of),), meaning, kind=Kind.REDUCTION, group="Reductions",
        shape="x without a", axes="required", unit=unit, verb=verb, result=result, exact=True,
        per_head=True, of_none=of_none, interpret=f"elementwise.{interpret}",
        torch=f"reductions.{torch}", **traits,
    )  # fmt: skip


ROWS = (
    _row("sum", "sum", "sum of the present values; 0 of none", linear=True, keeps_finite=True,
         host=host.total, interval=ranges.total, interpret="total", torch="total",
         triton="tl.sum"),
    _row("mean", "average", "mean of the present values; 0 of none", linear=True, keeps_finite=True,
         averages=True, has_small_kernel=True, host=host.mean, interval=ranges.with_zero,
         interpret="mean", torch="averaged"),
    _row("max", "take the maximum", "largest present value; -inf of none. `max(a, b)`, without "
         "axes, is elementwise", of_none=-math.inf, of_two="maximum",
         host=partial(max, default=-math.inf), interpret="largest", torch="extreme",
         triton="tl.max"),
    _row("min", "take the minimum", "smallest present value; inf of none. `min(a, b)`, without "
         "axes, is elementwise", of_none=math.inf, of_two="minimum",
         host=partial(min, default=math.inf), interpret="smallest", torch="extreme",
         triton="tl.min"),
    _row("var", "take the variance", "variance, divided by the number of present values; 0 of "
         "none", "none", keeps_finite=True, averages=True, has_small_kernel=True,
         host=host.variance, interval=ranges.POSITIVE, interpret="variance", torch="averaged"),
    _row("any", "look", "whether it is true anywhere", "none", of="truth", takes="truth",
         result="truth", always_finite=True, keeps_finite=True, host=any, interpret="anywhere",
         torch="anywhere",
         triton="tl.max"),
    _row("count", "count", "how many are true or, of numbers, present", "count", of="any",
         always_finite=True, keeps_finite=True, whole=True, host=host.count, interpret="count",
         torch="count", triton="tl.sum"),
)  # fmt: skip
