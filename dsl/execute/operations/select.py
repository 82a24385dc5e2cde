"""Order and selection in the torch program: float32 keys, ties by index, no loop over heads."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from kvpolicy.dsl.execute.operations.elementwise import mask
from kvpolicy.dsl.execute.tensors.values import (
    Frame,
    Value,
    aligned,
    as_tensor,
    mask_of,
    of_layer,
    repeated_along,
    sizes_of,
    union,
    without_heads,
)
from kvpolicy.dsl.ir import counts
from kvpolicy.dsl.ir.nodes import Node


def _competing(
    x: Value, axes: tuple[str, ...], frame: Frame
) -> tuple[torch.Tensor, list[int], list[int]]:
    """Sort keys of a value in rows that compete: along `axes`, in their order as written.

    Returns:
        int32 keys [R, M] in the order of float32 (absent lowest), the permutation of the dimensions
        that was applied, and the permuted shape, before it became two dimensions.
    """
    rest = [i for i, axis in enumerate(x.axes) if axis not in axes]
    permutation = rest + [x.axes.index(axis) for axis in axes]
    data, present = x.tensor.double().permute(permutation), mask_of(x)
    keys = frame.kernels["keys"](data, None if present is None else present.permute(permutation))
    shape = list(data.shape)
    rows = math.prod(shape[: len(rest)])
    return keys.view(rows, math.prod(shape[len(rest) :])), permutation, shape


def _back(data: torch.Tensor, permutation: list[int], shape: list[int]) -> torch.Tensor:
    """Undoes the reshape and permutation of `_competing`."""
    order = sorted(range(len(permutation)), key=permutation.__getitem__)
    return data.reshape(shape).permute(order)


def top(node: Node, frame: Frame, x: Value, count: Value) -> Value:
    """The `count` highest along `node.axes`."""
    number = count.data
    if node.takes_an_end and frame.held_mask is None and not isinstance(number, torch.Tensor):
        return _ends(node, frame, counts.whole(number, frame.tokens))
    return _top(frame, x, count, node.axes)


def _ends(node: Node, frame: Frame, number: int) -> Value:
    """The first or last tokens, without sorting positions."""
    order = torch.arange(frame.tokens, device=frame.device)
    data = order < number if node.origin == "sinks" else order >= frame.tokens - number
    return Value(data, ("token",))


def _top(frame: Frame, x: Value, count: Value, axes: tuple[str, ...]) -> Value:
    if "layer" in axes and "layer" in count.axes:
        return _top_of_each_layer(frame, x, count, axes)
    if "kv" in axes:  # one number, though decode steps remember it for each KV head
        count = without_heads(count)
    rest = tuple(axis for axis in x.axes if axis not in axes)
    number = count.data
    if isinstance(number, torch.Tensor):
        number = frame.kernels["whole"](number.double())
        missing = [axis for axis in count.axes if axis not in x.axes]
        if missing:
            all_axes = union(x.axes, count.axes)
            data = repeated_along(x.tensor, x.axes, all_axes, sizes_of(x, count))
            x = Value(data, all_axes, x.mask, x.mask_axes)
            rest = tuple(axis for axis in all_axes if axis not in axes)
        number = aligned(number, count.axes, rest) if count.axes else number
        number = number.reshape(*(number.shape or [1] * len(rest)), 1)
    else:
        number = counts.whole(number, 2**31)
    keys, permutation, shape = _competing(x, axes, frame)
    if isinstance(number, torch.Tensor):
        number = number.expand(*shape[: len(rest)], 1).reshape(len(keys), 1)
    return Value(_back(frame.kernels["top"](keys, number), permutation, shape), x.axes)


def _top_of_each_layer(frame: Frame, x: Value, count: Value, axes: tuple[str, ...]) -> Value:
    """Layers compete; each takes its part of the winners that its own `count` allows."""
    parts = []
    for layer in range(sizes_of(x)["layer"]):
        winners = _top(frame, x, of_layer(count, layer), axes)
        dim = winners.axes.index("layer")
        parts.append(as_tensor(winners.data, frame.device).select(dim, layer))
    return Value(torch.stack(parts, dim), winners.axes)


def rank(node: Node, frame: Frame, x: Value) -> Value:
    """1 for the highest along `node.axes`."""
    keys, permutation, shape = _competing(x, node.axes, frame)
    places = _back(frame.kernels["rank"](keys), permutation, shape)
    return Value(places, x.axes, x.mask, x.mask_axes, finite=True)


def index(node: Node, frame: Frame, x: Value) -> Value:
    """0, 1, ... along an axis."""
    size = x.tensor.shape[x.axes.index(node.axes[0])]
    first = frame.rows.start if frame.rows is not None and node.axes == ("query",) else 0
    data = torch.arange(first, first + size, dtype=torch.float64, device=frame.device)
    return Value(data, node.axes, finite=True)


def _set_size(node: Node, x: Value, frame: Frame) -> Value:
    """Number of a set's entries per KV head, among those that the head holds.

    The host knows how many the first or last entries are, if it knows how many are asked for.
    """
    alike = x.axes == ("token",) and frame.held_mask is None and frame.held_counts is None
    if alike and node.takes_an_end and frame.bound.static.needs(node.args[1]) is not None:
        return Value(counts.whole(frame.number(node.args[1]), frame.tokens))
    x = frame.present(x) if "token" in x.axes else x
    if "token" not in x.axes:
        return _both(operator.mul, x, frame.candidates())
    axes = tuple(axis for axis in x.axes if axis != "token")
    return Value(x.tensor.sum(x.axes.index("token")), axes)


def _both(apply: Callable[[Any, Any], Any], a: Value, b: Value) -> Value:
    """An operator applied to the data of two values that are present everywhere."""
    axes = union(a.axes, b.axes)
    return Value(apply(aligned(a.data, a.axes, axes), aligned(b.data, b.axes, axes)), axes)


def _over(number: Value, node: Node, frame: Frame) -> Value:
    """A number per KV head, summed over `kv` and `layer` where these compete."""
    for axis, size in (("kv", frame.bound.shape.kv_heads), ("layer", frame.bound.shape.layers)):
        if axis not in node.axes:
            continue
        if axis in number.axes:
            rest = tuple(name for name in number.axes if name != axis)
            number = Value(number.tensor.sum(number.axes.index(axis)), rest)
        else:
            number = Value(number.data * size, number.axes)
    return number


def missing(node: Node, frame: Frame, budget: Value, taken: Value) -> Value:
    """Number of entries that the budget still has room for."""
    room = _both(operator.sub, budget, _set_size(node.args[1], taken, frame))
    data = room.data.clamp(min=0) if isinstance(room.data, torch.Tensor) else max(0, room.data)
    return _over(Value(data, room.axes), node, frame)


def remaining(node: Node, frame: Frame, taken: Value) -> Value:
    """Number of candidates that are not taken."""
    number = _both(operator.sub, frame.candidates(), _set_size(node.args[0], taken, frame))
    return _over(number, node, frame)


def fill(node: Node, frame: Frame, x: Value, taken: Value, number: Value, left: Value) -> Value:
    """`taken` and the best of the rest; everything if everything fits."""
    known = not any(isinstance(value.data, torch.Tensor) for value in (number, left))
    if known and left.data <= number.data:
        data = torch.ones(frame.tokens, dtype=torch.bool, device=frame.device)
        return frame.present(Value(data, ("token",)))
    taken_set = as_tensor(taken.data, frame.device)
    free = frame.present(Value(~taken_set, taken.axes))
    chosen = _top(frame, mask(node, frame, x, free), number, node.axes)
    selection = _both(operator.or_, chosen, Value(taken_set, taken.axes))
    if known:
        return selection
    fits = _both(operator.le, left, number)
    return frame.present(
        _both(operator.or_, selection, Value(as_tensor(fits.data, frame.device), fits.axes))
    )
