"""Operations of the torch program across layers."""

from __future__ import annotations

import torch
from kvpolicy.dsl import counts
from kvpolicy.dsl.ir import Node, When
from kvpolicy.dsl.torch_values import Frame, Value, as_tensor, snapped, union

# Across layers: `x` holds all layers, its first axis being `layer`.


def past(node: Node, frame: Frame, x: Value, number: Value) -> Value:
    """The values of this layer and those before it."""
    layers = frame.bound.shape.layers
    size = counts.whole(float(number.data), layers)
    layer = torch.arange(layers, device=frame.device)[:, None]
    wanted = layer - size + 1 + torch.arange(size, device=frame.device)
    axes = ("layer", "past", *x.axes[1:])
    there, there_axes = wanted >= 0, ("layer", "past")
    index_ = wanted.clamp(min=0)
    if x.mask is not None:
        own = x.mask[index_] if "layer" in x.mask_axes else x.mask
        own_axes = union(x.mask_axes, ("past",)) if "layer" in x.mask_axes else x.mask_axes
        there, there_axes = frame.conjunction(there, there_axes, own, own_axes)
    return Value(x.data[index_], axes, there, there_axes, finite=x.finite)


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
    if x.mask is not None:
        own = x.mask[index_] if "layer" in x.mask_axes else x.mask
        there, there_axes = frame.conjunction(there, there_axes, own, x.mask_axes)
    return Value(x.data[index_], x.axes, there, there_axes, finite=x.finite)


def _listed(node: Node, x: Value, frame: Frame) -> list:
    """A scalar's value at every layer, exact where it is known before the prefill."""
    layers = range(frame.bound.shape.layers)
    if frame.bound.static.needs(node) is not None:
        return [frame.bound.number(node, frame.tokens, layer) for layer in layers]
    listed = x.data.tolist() if isinstance(x.data, torch.Tensor) else x.data
    return listed if isinstance(listed, list) else [listed for _ in layers]


def split(node: Node, frame: Frame, *args: Value) -> Value:
    """Integers for the layers that add up to the total."""
    lists = [_listed(each, x, frame) for each, x in zip(node.args, args, strict=True)]
    most = lists[2] if len(lists) == 3 else None
    parts = counts.split(lists[0][0], lists[1], most, cascade=node.op == "cascade")
    data = torch.tensor(parts, dtype=torch.float64, device=frame.device)
    return Value(data, ("layer",), finite=True)


def cluster(node: Node, frame: Frame, x: Value, number: Value) -> Value:
    """Labels of the layers' values."""
    labels = counts.cluster(
        _listed(node.args[0], x, frame), counts.whole(float(number.data), frame.bound.shape.layers)
    )
    data = torch.tensor(labels, dtype=torch.float64, device=frame.device)
    return Value(data, ("layer",), finite=True)
