"""Cumulative sums and sorting along an axis, in the torch program."""

from __future__ import annotations

import math

import torch
from kvpolicy.dsl.execute.tensors.values import Frame, Value, aligned, filled
from kvpolicy.dsl.ir.nodes import Node


def cumsum(node: Node, frame: Frame, x: Value) -> Value:
    """Cumulative sums; absent values add nothing."""
    data = (x.tensor if x.zero_where_absent else filled(x, 0.0)).cumsum(x.axes.index(node.axes[0]))
    if not x.finite:
        data = torch.nan_to_num(data, nan=0.0, posinf=math.inf, neginf=-math.inf)
    return Value(data, x.axes, x.mask, x.mask_axes, finite=x.finite)


def sort(node: Node, frame: Frame, x: Value) -> Value:
    """The present values in ascending order, at the places of present values."""
    dim = x.axes.index(node.axes[0])
    data = filled(x, math.inf).sort(dim=dim).values
    if x.mask is not None and set(node.axes) <= set(x.mask_axes):
        present = aligned(x.mask, x.mask_axes, x.axes)
        nth = (present.cumsum(dim) - 1).clamp(min=0)
        data = data.gather(dim, nth.expand(data.shape))
    return Value(data, x.axes, x.mask, x.mask_axes, finite=x.finite)
