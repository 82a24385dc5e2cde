"""What looks at other layers, and what each layer gets of something."""

from __future__ import annotations

from typing import Any

from kvpolicy.dsl.ops import ranges
from kvpolicy.dsl.ops.operations import Function, Kind, Operation, Parameter

_SHARED = (
    Parameter("total", unit="tokens"),
    Parameter("weight"),
    Parameter("max", optional=True, unit="tokens"),
)


def _look(
    name: str, arguments: tuple[Parameter, ...], meaning: str, cost: str, shape: str, **traits: Any
) -> Operation:
    function = Function(
        name, name, arguments, meaning, cost, unit="first", result=shape, group="Across layers"
    )
    order = ", ".join(each.name for each in arguments)
    return Operation(
        name, Kind.LOOK, 2, 2, order, function, fleeting=True, interpret=f"layers.{name}", **traits
    )


def _partition(
    name: str, arguments: tuple[Parameter, ...], meaning: str, cost: str, shape: str,
    rule: str = "split", **traits: Any,
) -> Operation:  # fmt: skip
    function = Function(
        name, rule, arguments, meaning, cost, axes="layer", result=shape, group="Across layers"
    )
    order = ", ".join(each.name for each in arguments)
    least = sum(not each.optional for each in arguments)
    return Operation(
        name, Kind.PARTITION, least, len(arguments), f"axes = (layer,); {order}", function,
        result="number", names_axes=True, interpret=f"layers.{name}", **traits,
    )  # fmt: skip


ROWS = (
    _look("past", (Parameter("x", "any"), Parameter("n")),
          "x at this layer and the n - 1 before it; absent below layer 0", "n times the size kept",
          "[past] and the axes of x", interval=ranges.first),
    _look("at", (Parameter("layer"), Parameter("x", "any")),
          "x at that layer; absent where that layer does not exist, or is deeper than this one "
          "and x is known at its own layer", "size kept", "as x", exact=True,
          interval=ranges.last),
    _partition("split", _SHARED,
               "whole numbers for the layers that add up to floor(total), in proportion to the "
               "weights; no layer gets more than max", "O(L log L)", "number tokens",
               takes="number", exact=True, shares_out=True),
    _partition("cascade", _SHARED,
               "`split` made after every layer among the layers so far; each layer has the least "
               "that any of these gave it, because what left does not come back", "O(L^2 log L)",
               "number tokens", takes="number", shares_out=True),
    _partition("cluster", (Parameter("x"), Parameter("k")),
               "optimal k-means of one number per layer; the label of this layer, 0 for the lowest "
               "mean", "O(k L^2)", "number", "cluster"),
)  # fmt: skip
