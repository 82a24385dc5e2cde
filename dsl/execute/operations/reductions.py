"""Reductions of the torch program, named by the rows in `ops/reductions.py`.

Each takes a value and the dimensions of its data to reduce, and gives data of the others.
"""

from __future__ import annotations

import math

import torch
from kvpolicy.dsl.execute.tensors.values import (
    Frame,
    Value,
    filled,
    mask_of,
    repeated_along,
    sizes_of,
)
from kvpolicy.dsl.ir.nodes import Node


def total(node: Node, frame: Frame, x: Value, dims: list[int]) -> torch.Tensor:
    """The sum; where infinities of both signs meet 0, or NaN of a part (`ir/heads.py`)."""
    data = filled(x, 0.0).sum(dims)
    may_stay = x.finite or node.value == "part"
    return data if may_stay else data.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)


def averaged(node: Node, frame: Frame, x: Value, dims: list[int]) -> torch.Tensor:
    """`mean` or `var`, by the kernel of that name."""
    data: torch.Tensor = frame.kernels[node.op](x.tensor.double(), mask_of(x), dims)
    return data


def extreme(node: Node, frame: Frame, x: Value, dims: list[int]) -> torch.Tensor:
    """The largest or smallest value; of none the operation's `of_none`."""
    worst = float(node.operation.of_none or 0.0)
    data = filled(x, worst)
    if 0 in [data.shape[dim] for dim in dims]:
        shape = [size for dim, size in enumerate(data.shape) if dim not in dims]
        return data.new_full(shape, worst)
    return data.amax(dims) if worst < 0 else data.amin(dims)


def anywhere(node: Node, frame: Frame, x: Value, dims: list[int]) -> torch.Tensor:
    """Whether any present value is true."""
    data = filled(x, False)
    for dim in sorted(dims, reverse=True):
        data = data.any(dim)
    return data


def count(node: Node, frame: Frame, x: Value, dims: list[int]) -> torch.Tensor:
    """Number of true values, or of present ones if they are numbers."""
    if x.tensor.dtype == torch.bool:
        return filled(x, False).sum(dims).double()
    rest = [i for i in range(x.tensor.ndim) if i not in dims]
    unmasked = math.prod(x.tensor.shape[i] for i in dims if x.axes[i] not in x.mask_axes)
    mask = x.mask
    if mask is None:
        number = torch.full((), float(unmasked), dtype=torch.float64, device=frame.device)
        return number.expand([x.tensor.shape[i] for i in rest])
    inner = [i for i, axis in enumerate(x.mask_axes) if axis in node.axes]
    number = (mask.sum(inner) if inner else mask).double() * unmasked
    axes = tuple(x.axes[i] for i in rest)
    number_axes = tuple(axis for axis in x.mask_axes if axis not in node.axes)
    return repeated_along(number, number_axes, axes, sizes_of(x))
