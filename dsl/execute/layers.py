"""Operations of the torch program across layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from kvpolicy.dsl.execute.kernels import LARGEST_SPLIT, MOST_LAYERS
from kvpolicy.dsl.execute.values import (
    HOST,
    Frame,
    Value,
    aligned,
    as_tensor,
    sent,
    snapped,
    union,
)
from kvpolicy.dsl.ir import counts
from kvpolicy.dsl.ir.nodes import Node, When

# Reductions over `past` that a kernel makes of the layers' values where they lie.
_OF_LAYERS = {"var": "var_of_layers", "any": "any_of_layers"}


def reduces_past(node: Node) -> bool:
    """Whether a node reduces `past(...)` by an operation that there is a kernel for."""
    return node.op in _OF_LAYERS and node.axes == ("past",) and node.args[0].op == "past"


def over_past(node: Node, frame: Frame) -> bool:
    """Whether a node reduces `past(...)` by a kernel that is at hand."""
    return reduces_past(node) and _OF_LAYERS[node.op] in frame.kernels


def of_layers(node: Node, frame: Frame, values: Sequence[Value], layer: int) -> Value | None:
    """A reduction of the values of this layer and those before it by a kernel; None: by torch.

    Args:
        node: as `over_past` wants it.
        values: this layer's last; those below layer 0 stand for nothing.
    """
    kernel, own = frame.kernels[_OF_LAYERS[node.op]], values[-1]
    kind = torch.bool if node.op == "any" else torch.float64
    numbers = [x.data for x in values if isinstance(x.data, torch.Tensor)]
    if len(values) > MOST_LAYERS or len(numbers) < len(values):
        return None
    if any((x.dtype, x.shape) != (kind, numbers[-1].shape) for x in numbers):
        return None
    if any(x.axes != own.axes for x in values):
        return None
    there = None
    if any(x.mask is not None for x in values):
        there = [_present(x) for x in values]
    made = kernel(numbers, there, max(0, len(values) - 1 - layer))
    return Value(made, own.axes, finite=all(x.finite for x in values))


def _present(x: Value) -> torch.Tensor:
    """Where a value is present, in its own shape."""
    if x.mask is None:
        return torch.ones_like(x.tensor, dtype=torch.bool)
    return aligned(x.mask, x.mask_axes, x.axes).expand(x.tensor.shape)


# Across layers: `x` holds all layers, its first axis being `layer`.


def past(node: Node, frame: Frame, x: Value, number: Value) -> Value:
    """The values of this layer and those before it."""
    layers = frame.bound.shape.layers
    size = counts.whole(float(number.data), layers)
    layer = torch.arange(layers, device=frame.device)[:, None]
    wanted = layer - size + 1 + torch.arange(size, device=frame.device)
    axes = ("layer", "past", *x.axes[1:])
    there = wanted >= 0
    there_axes: tuple[str, ...] = ("layer", "past")
    index_ = wanted.clamp(min=0)
    if x.mask is not None:
        own = x.mask[index_] if "layer" in x.mask_axes else x.mask
        own_axes = union(x.mask_axes, ("past",)) if "layer" in x.mask_axes else x.mask_axes
        there, there_axes = frame.conjunction(there, there_axes, own, own_axes)
    return Value(x.tensor[index_], axes, there, there_axes, finite=x.finite)


def at(node: Node, frame: Frame, wanted: Value, x: Value) -> Value:
    """The value at another layer, absent where there is none or it is not reached yet."""
    layers = frame.bound.shape.layers
    layer = torch.arange(layers, device=frame.device)
    place = snapped(as_tensor(wanted.data, frame).double()).expand(layers)
    reached = layer if node.when <= When.LAYER else torch.full_like(layer, layers - 1)
    there = (place == place.floor()) & (place >= 0) & (place <= reached)
    # Where a model's tensors hold NaN nothing is decided, but nothing may be read outside either.
    index_ = place.nan_to_num(0.0).clamp(0, layers - 1).long()
    there_axes: tuple[str, ...] = ("layer",)
    if wanted.mask is not None:
        there, there_axes = frame.conjunction(there, there_axes, wanted.mask, wanted.mask_axes)
    if x.mask is not None:
        own = x.mask[index_] if "layer" in x.mask_axes else x.mask
        there, there_axes = frame.conjunction(there, there_axes, own, x.mask_axes)
    return Value(x.tensor[index_], x.axes, there, there_axes, finite=x.finite)


def _listed(node: Node, x: Value, frame: Frame) -> list:
    """A scalar's value at every layer, exact where it is known before the prefill."""
    layers = range(frame.bound.shape.layers)
    if frame.bound.static.needs(node) is not None:
        return [frame.bound.number(node, frame.tokens, layer) for layer in layers]
    listed = x.data.tolist() if isinstance(x.data, torch.Tensor) else x.data
    return listed if isinstance(listed, list) else [listed for _ in layers]


def split(node: Node, frame: Frame, *args: Value) -> Value:
    """Integers for the layers that add up to the total."""
    static = [frame.bound.static.needs(x) is not None for x in node.args]
    if static == [True, False, True][: len(args)]:
        known = [_listed(x, args[i], frame) for i, x in enumerate(node.args) if i != 1]
        made = divided(node, frame, args[1], *known)
        if made is not None:
            return Value(made, ("layer",), finite=True)
    lists = [_listed(each, x, frame) for each, x in zip(node.args, args, strict=True)]
    most = lists[2] if len(lists) == 3 else None
    parts = counts.split(lists[0][0], lists[1], most, cascade=node.op == "cascade")
    data = sent(torch.tensor(parts, dtype=torch.float64, device=HOST), frame.device)
    return Value(data, ("layer",), finite=True)


def divided(
    node: Node, frame: Frame, weights: Value, total: Sequence, maxima: Sequence | None = None
) -> torch.Tensor | None:
    """`split` or `cascade` by a kernel, without waiting for the device; None: not one for it.

    Args:
        weights: computed, with the axis `layer` alone.
        total, maxima: numbers of the host, per layer; the kernel knows one maximum for all.
    """
    kernel = frame.kernels.get("split")
    whole = counts.whole(total[0], LARGEST_SPLIT + 1)
    limits = {counts.whole(x, 2**62) for x in maxima or ()}
    fits = whole <= LARGEST_SPLIT and len(limits) <= 1 and weights.axes == ("layer",)
    if kernel is None or not fits:
        return None
    limit = limits.pop() if limits else None
    return kernel(whole, weights.tensor.double(), limit, cascade=node.op == "cascade")


def cluster(node: Node, frame: Frame, x: Value, number: Value) -> Value:
    """Labels of the layers' values."""
    labels = counts.cluster(
        _listed(node.args[0], x, frame), counts.whole(float(number.data), frame.bound.shape.layers)
    )
    data = sent(torch.tensor(labels, dtype=torch.float64, device=HOST), frame.device)
    return Value(data, ("layer",), finite=True)
