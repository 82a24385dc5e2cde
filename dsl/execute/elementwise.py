"""Elementwise operations and reductions of the torch program."""

from __future__ import annotations

import ctypes
import math
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from kvpolicy.dsl.execute.values import (
    Frame,
    Scalar,
    Value,
    aligned,
    as_tensor,
    broadcast,
    filled,
    sizes_of,
    snapped,
    there_of,
    union,
)
from kvpolicy.dsl.ir.nodes import Node

# Elementwise.


def elementwise(
    function: Callable[..., torch.Tensor], *, safe: bool = False, chooses: bool = False
) -> Callable[..., Value]:
    """An operation by name of axes; absent in, absent out.

    Args:
        function: on tensors that broadcast.
        safe: finite numbers give finite ones, whatever the operation may do.
        chooses: the result is one of the numbers, none of which is NaN.
    """

    def apply(node: Node, frame: Frame, *args: Value) -> Value:
        axes = union(*(x.axes for x in args))
        parts = [aligned(x.data, x.axes, axes) for x in args]
        if not any(isinstance(part, torch.Tensor) for part in parts):
            parts[0] = as_tensor(parts[0], frame)
        data = function(*parts)
        finite = all(x.finite for x in args)
        may_be_nan = node.operation.may_be_nan and not safe
        if data.dtype != torch.bool and not chooses and (may_be_nan or not finite):
            data = data.nan_to_num_(nan=0.0, posinf=math.inf, neginf=-math.inf)
        mask: torch.Tensor | None = None
        mask_axes: tuple[str, ...] = ()
        for x in args:
            mask, mask_axes = frame.both(Value(0, axes, mask, mask_axes), x)
        return Value(
            data, axes, mask, mask_axes, finite=finite and (safe or node.operation.keeps_finite)
        )

    return apply


def binary(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A function of two tensors that also takes Python scalars."""

    def apply(a: Any, b: Any) -> torch.Tensor:
        if not isinstance(a, torch.Tensor):
            a = torch.full((), a, dtype=b.dtype, device=b.device)
        if not isinstance(b, torch.Tensor):
            b = torch.full((), b, dtype=a.dtype, device=a.device)
        return function(a, b)

    return apply


def _at_least(a: Any, b: Any) -> torch.Tensor:
    """The larger one; a number of the host need not be sent."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.maximum(a, b)
    return a.clamp(min=b) if isinstance(a, torch.Tensor) else b.clamp(min=a)


def _at_most(a: Any, b: Any) -> torch.Tensor:
    """The smaller one."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.minimum(a, b)
    return a.clamp(max=b) if isinstance(a, torch.Tensor) else b.clamp(max=a)


def divide(node: Node, frame: Frame, a: Value, b: Value) -> Value:
    """Division; by a number known to the host it cannot give NaN."""
    safe = not isinstance(b.data, torch.Tensor) and b.data != 0
    return (_DIVIDE_SAFE if safe else _DIVIDE)(node, frame, a, b)


# -0 is 0: adding 0 makes it so.
_DIVIDE = elementwise(binary(lambda a, b: a / (b + 0.0)))
_DIVIDE_SAFE = elementwise(binary(operator.truediv), safe=True)


def _floor_divide(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return snapped(a / (b + 0.0)).floor()  # -0 is 0


def _power(a: Any, b: Any) -> torch.Tensor:
    """Of a negative base only whole powers exist, also of -inf."""
    made = binary(lambda x, y: torch.pow(x + 0.0, y))(a, b)
    if not isinstance(b, torch.Tensor):
        whole = math.isinf(b) or float(b).is_integer()
        return made if whole else made.masked_fill(a < 0, math.nan)
    return torch.where((a < 0) & (b != b.floor()), math.nan, made)


floor_divide = elementwise(binary(_floor_divide))
modulo = elementwise(binary(lambda a, b: a - b * _floor_divide(a, b)))
power = elementwise(_power)
floor = elementwise(lambda x: snapped(x).floor())
ceil = elementwise(lambda x: snapped(x).ceil())
nearest = elementwise(lambda x: snapped(x).round())
minimum = elementwise(_at_most, chooses=True)
maximum = elementwise(_at_least, chooses=True)


def compare(function: Callable[..., torch.Tensor]) -> Callable[..., Value]:
    """A comparison in float32; false where a side is absent."""

    def single(x: torch.Tensor | Scalar) -> torch.Tensor | Scalar:
        if isinstance(x, torch.Tensor):
            return x.float() if x.dtype != torch.bool else x
        return x if isinstance(x, bool) else ctypes.c_float(x).value

    plain = elementwise(function)

    def apply(node: Node, frame: Frame, a: Value, b: Value) -> Value:
        rounded = [Value(single(x.data), x.axes, x.mask, x.mask_axes) for x in (a, b)]
        result = plain(node, frame, *rounded)
        data = filled(result, False)
        return Value(data, result.axes, result.mask, result.mask_axes, zero=True, finite=True)

    return apply


def logic(function: Callable[..., torch.Tensor]) -> Callable[..., Value]:
    """`and`, `or`, `not`: an absent truth value counts as false."""
    plain = elementwise(function)

    def apply(node: Node, frame: Frame, *args: Value) -> Value:
        present = [Value(x.data if x.mask is None else filled(x, False), x.axes) for x in args]
        made, first = plain(node, frame, *present), args[0]
        if len(args) > 1 and all(x.zero and x.mask is first.mask for x in args):
            return replace(made, mask=first.mask, mask_axes=first.mask_axes, zero=True)
        return made

    return apply


def mask(node: Node, frame: Frame, x: Value, condition: Value) -> Value:
    """`x where condition`: only the mask changes."""
    axes = union(x.axes, condition.axes)
    holds = condition.data
    if not isinstance(holds, torch.Tensor):
        if holds and condition.mask is None:
            return x
        holds = as_tensor(holds, frame)
    kept, kept_axes = holds, condition.axes
    if condition.mask is not None:
        kept = filled(condition, False)
    data = aligned(as_tensor(x.data, frame), x.axes, axes)
    if axes != x.axes:
        sizes = sizes_of(x, condition)
        data = data.expand(tuple(sizes[axis] for axis in axes))
    if x.mask is not None and not (condition.zero and condition.mask is x.mask):
        kept, kept_axes = frame.conjunction(x.mask, x.mask_axes, kept, kept_axes)
    return Value(data, axes, kept, kept_axes, finite=x.finite)


def choose(node: Node, frame: Frame, x: Value, condition: Value, y: Value) -> Value:
    """`x where condition else y`."""
    if not isinstance(condition.data, torch.Tensor):
        return broadcast(x if condition.data else y, node.type, frame)
    chosen = filled(condition, False)
    axes = union(x.axes, condition.axes, y.axes)
    at = aligned(chosen, condition.axes, axes)
    data = _where(at, aligned(x.data, x.axes, axes), aligned(y.data, y.axes, axes), frame)
    finite = x.finite and y.finite
    if x.mask is y.mask:
        return Value(data, axes, x.mask, x.mask_axes, zero=x.zero and y.zero, finite=finite)
    there = _where(
        at,
        aligned(True if x.mask is None else x.mask, x.mask_axes, axes),
        aligned(True if y.mask is None else y.mask, y.mask_axes, axes),
        frame,
    )
    return Value(data, axes, there.expand(data.shape), axes, finite=finite)


def repeated(node: Node, frame: Frame, x: Value) -> Value:
    """The operation `broadcast`."""
    return broadcast(x, node.type, frame)


def _where(
    at: torch.Tensor, a: torch.Tensor | Scalar, b: torch.Tensor | Scalar, frame: Frame
) -> torch.Tensor:
    return torch.where(at, as_tensor(a, frame), as_tensor(b, frame))


# Reductions.


def of_each_layer(x: Value, heads: int) -> Value:
    """KV heads of several layers, `heads` of each, with an axis `layer` of their own."""
    mask, axes = x.mask, x.mask_axes
    if mask is not None and "kv" in axes:
        mask, axes = mask.unflatten(0, (-1, heads)), ("layer", *axes)
    data = torch.as_tensor(x.data).unflatten(0, (-1, heads))
    return Value(data, ("layer", *x.axes), mask, axes, zero=x.zero, finite=x.finite)


def for_each_head(x: Value, heads: int) -> Value:
    """A value of several layers, the same for all `heads` KV heads of each."""
    data = torch.as_tensor(x.data).repeat_interleave(heads, 0)
    return Value(data, ("kv", *x.axes[1:]), finite=x.finite)


def reduce(node: Node, frame: Frame, x: Value) -> Value:
    """A reduction over `node.axes` that skips absent values."""
    if frame.layered and "kv" in node.axes:
        plain, heads = replace(frame, layered=False), frame.bound.shape.kv_heads
        return for_each_head(reduce(node, plain, of_each_layer(x, heads)), heads)
    dims = [x.axes.index(axis) for axis in node.axes]
    axes = tuple(axis for axis in x.axes if axis not in node.axes)
    if node.operation.averages:
        data = frame.kernels[node.op](x.tensor.double(), there_of(x), dims)
        return Value(data, axes, finite=x.finite)
    if node.op == "count":
        if x.tensor.dtype == torch.bool:
            number = filled(x, False).sum(dims).double()
        else:
            number = _present(x, node.axes, dims, axes, frame)
        return Value(number, axes, finite=True)
    if node.op == "any":
        data = filled(x, False)
        for dim in sorted(dims, reverse=True):
            data = data.any(dim)
        return Value(data, axes, finite=True)
    if node.operation.infinite_of_none:
        return Value(_extreme(node.op, x, dims), axes, finite=x.finite and x.mask is None)
    data = (x.tensor if x.zero else filled(x, 0.0)).sum(dims)
    if not x.finite:
        data = torch.nan_to_num(data, nan=0.0, posinf=math.inf, neginf=-math.inf)
    return Value(data, axes, finite=x.finite)


def _extreme(op: str, x: Value, dims: list[int]) -> torch.Tensor:
    worst = -math.inf if op == "max" else math.inf
    data = filled(x, worst)
    if 0 in [data.shape[dim] for dim in dims]:
        shape = [size for dim, size in enumerate(data.shape) if dim not in dims]
        return data.new_full(shape, worst)
    return data.amax(dims) if op == "max" else data.amin(dims)


def _present(
    x: Value, over: tuple[str, ...], dims: list[int], axes: tuple[str, ...], frame: Frame
) -> torch.Tensor:
    """How many values are present, with the axes of the result."""
    unmasked = math.prod(
        x.tensor.shape[dim] for dim, axis in zip(dims, over, strict=True) if axis not in x.mask_axes
    )
    mask = x.mask
    if mask is None:
        return torch.full((), float(unmasked), dtype=torch.float64, device=frame.device).expand(
            [x.tensor.shape[i] for i, axis in enumerate(x.axes) if axis in axes]
        )
    inner = [i for i, axis in enumerate(x.mask_axes) if axis in over]
    left = tuple(axis for axis in x.mask_axes if axis not in over)

    def make() -> torch.Tensor:
        return (mask.sum(inner) if inner else mask).double() * unmasked

    number = frame.once(("count", id(mask), tuple(inner), unmasked), (mask,), make)
    sizes = sizes_of(x)
    return aligned(number, left, axes).expand([sizes[axis] for axis in axes])
