"""Operations along an axis that give a value at each of its places.

Dimensions: G KV heads, M candidates of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from kvpolicy.dsl.data.arrays import Array, named, order
from kvpolicy.dsl.interpret.values import Values
from kvpolicy.dsl.ir import counts
from kvpolicy.dsl.ir.nodes import Node

Form = Callable[[Values, Node, int], Array]


def _along(function: Callable[[Array, Sequence[str]], Array]) -> Form:
    """An operation on a value along the axes that it names, of all layers if `layer` is one."""

    def operation(e: Values, node: Node, layer: int) -> Array:
        x = function(e.gathered(node.args[0], node.axes, layer), node.axes)
        return e.own(x, node.axes, layer)

    return operation


@_along
def rank(x: Array, axes: Sequence[str]) -> Array:
    """1 for the highest along `axes`; absent values have none."""
    places = named(*order(x, axes))
    return Array.of(places.axes, places.data + 1, x.present)


@_along
def cumsum(x: Array, axes: Sequence[str]) -> Array:
    """Sums of the present values along one axis, up to each; absent values add nothing."""
    with np.errstate(all="ignore"):
        total = np.where(x.present, x.data, 0.0).cumsum(x.axes.index(axes[0]))
    return Array.of(x.axes, np.where(np.isnan(total), 0.0, total), x.present)


@_along
def sort(x: Array, axes: Sequence[str]) -> Array:
    """The present values, ascending along one axis, at the places that have one."""
    dim = x.axes.index(axes[0])
    ascending = np.sort(np.where(x.present, x.data, np.inf), dim)
    nth = np.maximum(x.present.cumsum(dim) - 1, 0)
    return Array.of(x.axes, np.take_along_axis(ascending, nth, dim), x.present)


def index(e: Values, node: Node, layer: int) -> Array:
    x = e.value(node.args[0], layer)
    return Array.of(node.axes, np.arange(x.data.shape[x.axes.index(node.axes[0])]))


def pool(e: Values, node: Node, layer: int) -> Array:
    """The maximum, or sum divided by the width, of the present neighbours along `token`, centred.

    Where KV heads hold different entries, neighbours are a head's own.
    """
    largest = node.op == "maxpool"
    width = max(1, counts.whole(e.number(node.args[1], layer), 2**31))
    x, masks = e.value(node.args[0], layer), e.layers[layer].held
    token_dim = x.axes.index("token")
    data, present = np.moveaxis(x.data, token_dim, -1), np.moveaxis(x.present, token_dim, -1)
    filled = np.where(present, data, -np.inf if largest else 0.0)
    if "kv" not in x.axes or not e.layers[layer].ragged:
        result = _pooled(filled, width, largest)
    else:
        result, kv_dim = np.zeros_like(filled), x.axes.index("kv")
        rows = zip(
            np.moveaxis(filled, kv_dim, 0), np.moveaxis(result, kv_dim, 0), masks, strict=True
        )
        for values, out, held in rows:
            out[..., held] = _pooled(values[..., held], width, largest)
    result = np.where(present, result, 0.0)
    return Array.of(x.axes, np.moveaxis(result, -1, token_dim), np.moveaxis(present, -1, token_dim))


def _pooled(filled: np.ndarray, width: int, largest: bool) -> np.ndarray:
    half = (width - 1) // 2
    result = np.empty_like(filled)
    for i in range(filled.shape[-1]):
        near = filled[..., max(0, i - half) : i - half + width]
        result[..., i] = near.max(-1) if largest else near.sum(-1) / width
    return result
