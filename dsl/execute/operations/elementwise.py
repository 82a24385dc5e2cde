"""Elementwise operations of the torch program."""

from __future__ import annotations

import ctypes
import math
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from kvpolicy.dsl.execute.tensors.values import (
    Frame,
    Scalar,
    Value,
    aligned,
    as_tensor,
    broadcast,
    filled,
    repeated_along,
    sizes_of,
    snapped,
    union,
)
from kvpolicy.dsl.ir.nodes import Node


def elementwise(
    function: Callable[..., torch.Tensor], *, safe: bool = False, clean: bool = False
) -> Callable[..., Value]:
    """An operation on values, aligned by name of axes; absent in, absent out.

    Args:
        function: of tensors that broadcast, and of numbers of the host.
        safe: finite values give finite ones, even if not in all uses of the operation.
        clean: the function gives NaN only from NaN.
    """

    def apply(node: Node, frame: Frame, *args: Value) -> Value:
        axes = union(*(x.axes for x in args))
        parts = [aligned(x.data, x.axes, axes) for x in args]
        if not any(isinstance(part, torch.Tensor) for part in parts):
            parts[0] = as_tensor(parts[0], frame.device)
        data = function(*parts)
        finite = all(x.finite for x in args)
        may_be_nan = node.operation.may_be_nan and not safe
        if data.dtype != torch.bool and not clean and (may_be_nan or not finite):
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
    return a.clamp(min=b) if isinstance(a, torch.Tensor) else b.clamp(min=a)


def _at_most(a: Any, b: Any) -> torch.Tensor:
    """The smaller one."""
    return a.clamp(max=b) if isinstance(a, torch.Tensor) else b.clamp(max=a)


def divide(node: Node, frame: Frame, a: Value, b: Value) -> Value:
    """Division; a divisor that is known to the host and not 0 keeps values finite."""
    safe = not isinstance(b.data, torch.Tensor) and b.data != 0
    return (_DIVIDE_SAFE if safe else _DIVIDE)(node, frame, a, b)


# A divisor of -0 counts as 0: adding 0 makes it so.
_DIVIDE = elementwise(binary(lambda a, b: a / (b + 0.0)))
_DIVIDE_SAFE = elementwise(binary(operator.truediv), safe=True)


def _floor_divide(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return snapped(a / (b + 0.0)).floor()  # -0 is 0


def _power(a: Any, b: Any) -> torch.Tensor:
    """Powers; NaN for a negative base and an exponent that is not whole."""
    powers = binary(lambda x, y: torch.pow(x + 0.0, y))(a, b)
    if not isinstance(b, torch.Tensor):
        is_whole = math.isinf(b) or float(b).is_integer()
        return powers if is_whole else powers.masked_fill(a < 0, math.nan)
    return torch.where((a < 0) & (b != b.floor()), math.nan, powers)


_POWER = elementwise(_power)
_POWER_EVEN = elementwise(torch.pow, clean=True)


def power(node: Node, frame: Frame, a: Value, b: Value) -> Value:
    """Powers; an even exponent from 0 that the host knows ignores the base's sign."""
    known = not isinstance(b.data, torch.Tensor) and isinstance(a.data, torch.Tensor)
    even = known and b.data >= 0 and b.data % 2 == 0
    return (_POWER_EVEN if even else _POWER)(node, frame, a, b)


floor_divide = elementwise(binary(_floor_divide))
modulo = elementwise(binary(lambda a, b: a - b * _floor_divide(a, b)))
floor = elementwise(lambda x: snapped(x).floor())
ceil = elementwise(lambda x: snapped(x).ceil())
nearest = elementwise(lambda x: snapped(x).round())
minimum = elementwise(_at_most, clean=True)
maximum = elementwise(_at_least, clean=True)


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
        return Value(
            data, result.axes, result.mask, result.mask_axes, zero_where_absent=True, finite=True
        )

    return apply


def logic(function: Callable[..., torch.Tensor]) -> Callable[..., Value]:
    """`and`, `or`, `not`: an absent truth value counts as false."""
    plain = elementwise(function)

    def apply(node: Node, frame: Frame, *args: Value) -> Value:
        present = [Value(x.data if x.mask is None else filled(x, False), x.axes) for x in args]
        result, first = plain(node, frame, *present), args[0]
        if len(args) > 1 and all(x.zero_where_absent and x.mask is first.mask for x in args):
            return replace(
                result, mask=first.mask, mask_axes=first.mask_axes, zero_where_absent=True
            )
        return result

    return apply


def mask(node: Node, frame: Frame, x: Value, condition: Value) -> Value:
    """`x where condition`: only the mask changes."""
    axes = union(x.axes, condition.axes)
    holds = condition.data
    if not isinstance(holds, torch.Tensor):
        if holds and condition.mask is None:
            return x
        holds = as_tensor(holds, frame.device)
    present, present_axes = holds, condition.axes
    if condition.mask is not None:
        present = filled(condition, False)
    data = repeated_along(as_tensor(x.data, frame.device), x.axes, axes, sizes_of(x, condition))
    if x.mask is not None and not (condition.zero_where_absent and condition.mask is x.mask):
        present, present_axes = frame.conjunction(x.mask, x.mask_axes, present, present_axes)
    return Value(data, axes, present, present_axes, finite=x.finite)


def choose(node: Node, frame: Frame, x: Value, condition: Value, y: Value) -> Value:
    """`x where condition else y`."""
    if not isinstance(condition.data, torch.Tensor):
        return broadcast(x if condition.data else y, node.type, frame)
    chosen = filled(condition, False)
    axes = union(x.axes, condition.axes, y.axes)
    holds = aligned(chosen, condition.axes, axes)
    data = _where(holds, aligned(x.data, x.axes, axes), aligned(y.data, y.axes, axes), frame)
    finite = x.finite and y.finite
    if x.mask is y.mask:
        zero = x.zero_where_absent and y.zero_where_absent
        return Value(data, axes, x.mask, x.mask_axes, zero_where_absent=zero, finite=finite)
    in_x, in_y = (
        aligned(True if value.mask is None else value.mask, value.mask_axes, axes)
        for value in (x, y)
    )
    present = _where(holds, in_x, in_y, frame)
    return Value(data, axes, present.expand(data.shape), axes, finite=finite)


def repeated(node: Node, frame: Frame, x: Value) -> Value:
    """The operation `broadcast`."""
    return broadcast(x, node.type, frame)


def _where(
    condition: torch.Tensor, a: torch.Tensor | Scalar, b: torch.Tensor | Scalar, frame: Frame
) -> torch.Tensor:
    return torch.where(condition, as_tensor(a, frame.device), as_tensor(b, frame.device))
