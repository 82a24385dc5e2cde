"""Operations that look at other layers, or give each layer its part of a total."""

from __future__ import annotations

from functools import partial

from kvpolicy.dsl.ops import ranges
from kvpolicy.dsl.ops.operations import Kind, Parameter, called

_SHARED = (
    Parameter("total", unit="tokens"),
    Parameter("weight"),
    Parameter("max", optional=True, unit="tokens"),
)


_look = partial(called, kind=Kind.LOOK, group="Across layers", unit="first", gone_after_layer=True)
_partition = partial(
    called, kind=Kind.PARTITION, group="Across layers", axes="layer", result="number"
)

ROWS = (
    _look("past", "past", (Parameter("x", "any"), Parameter("n")),
          "x at this layer and the n - 1 before it; absent below layer 0", "n times the size kept",
          shape="[past] and the axes of x", interval=ranges.first, interpret="layers.past"),
    _look("at", "at", (Parameter("layer"), Parameter("x", "any")),
          "x at that layer; absent where that layer does not exist, or is deeper than this one "
          "and x is known at its own layer", "size kept", shape="as x", exact=True,
          interval=ranges.last, interpret="layers.at"),
    _partition("split", "across", _SHARED,
               "whole numbers for the layers that add up to floor(total), in proportion to the "
               "weights; no layer gets more than max", "O(L log L)", shape="number tokens",
               takes="number", exact=True, shares_out=True, has_small_kernel=True,
               interpret="layers.split"),
    _partition("cascade", "across", _SHARED,
               "`split` made after every layer among the layers so far; each layer has the least "
               "that any of these gave it, because what left does not come back", "O(L^2 log L)",
               shape="number tokens", takes="number", shares_out=True, has_small_kernel=True,
               interpret="layers.split"),
    _partition("cluster", "across", (Parameter("x"), Parameter("k")),
               "optimal k-means of one number per layer; the label of this layer, 0 for the lowest "
               "mean", "O(k L^2)", shape="number", interpret="layers.cluster"),
)  # fmt: skip
