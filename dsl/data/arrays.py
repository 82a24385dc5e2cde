"""Arrays with named axes and absent values: the values of the interpreter.

Data are float64; where order decides they are rounded to float32 (see `ir/counts.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from kvpolicy.dsl.ir.nodes import AXES
from kvpolicy.dsl.ops.host import SNAP

ORDER = ("layer", *AXES)


@dataclass(frozen=True)
class Array:
    """Values along named axes.

    Attributes:
        axes: names in the order of `ORDER`, one per dimension of `data`.
        data: float64 or bool; 0 or false where absent.
        present: bool, the shape of `data`.
    """

    axes: tuple[str, ...]
    data: np.ndarray
    present: np.ndarray

    @classmethod
    def of(cls, axes: Sequence[str], data: object, present: object = True) -> Array:
        """An array from values; `present` is broadcast."""
        values = np.asarray(data)
        if values.dtype != np.bool_:
            values = values.astype(np.float64)
        presence = np.broadcast_to(np.asarray(present, dtype=np.bool_), values.shape)
        return cls(tuple(axes), np.where(presence, values, np.zeros((), values.dtype)), presence)

    def to(self, axes: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Data and presence with a dimension for each of `axes`, of size 1 where it has none."""
        index = tuple(slice(None) if axis in self.axes else None for axis in axes)
        return self.data[index], self.present[index]


def union(*arrays: Array) -> tuple[str, ...]:
    """All axes of the arrays, in order."""
    names = {axis for array in arrays for axis in array.axes}
    return tuple(axis for axis in ORDER if axis in names)


def elementwise(function: Callable[..., np.ndarray], *arrays: Array) -> Array:
    """A function of arrays aligned by axis names; absent where one is absent; NaN is 0."""
    axes = union(*arrays)
    parts = [array.to(axes) for array in arrays]
    present = np.logical_and.reduce(np.broadcast_arrays(*(presence for _, presence in parts)))
    with np.errstate(all="ignore"):
        data = function(*(values for values, _ in parts))
    if data.dtype != np.bool_:
        data = np.where(np.isnan(data), 0.0, data)
    return Array.of(axes, np.broadcast_to(data, present.shape), present)


def stack(axis: str, arrays: Sequence[Array]) -> Array:
    """One array with a new axis in its place in `ORDER`, broadcast by name."""
    axes = union(*arrays)
    sizes = {a: n for x in arrays for a, n in zip(x.axes, x.data.shape, strict=True)}
    shape = tuple(sizes[name] for name in axes)
    parts = [x.to(axes) for x in arrays]
    data = np.stack([np.broadcast_to(values, shape) for values, _ in parts])
    present = np.stack([np.broadcast_to(presence, shape) for _, presence in parts])
    return Array.of((axis, *axes), data, present)


def join(axis: str, first: Array, second: Array) -> Array:
    """The values of `first` along an axis, then those of `second`, broadcast by name elsewhere."""
    axes = union(first, second)
    parts = [x.to(axes) for x in (first, second)]
    dim, shapes = axes.index(axis), [data.shape for data, _ in parts]
    rest = np.broadcast_shapes(*((*shape[:dim], 1, *shape[dim + 1 :]) for shape in shapes))
    sizes = [(*rest[:dim], shape[dim], *rest[dim + 1 :]) for shape in shapes]
    data, present = (
        np.concatenate(
            [np.broadcast_to(x, size) for x, size in zip(pieces, sizes, strict=True)], dim
        )
        for pieces in zip(*parts, strict=True)
    )
    return Array.of(axes, data, present)


def last(x: Array, axis: str, number: int) -> Array:
    """The last `number` values along an axis."""
    index = tuple(slice(-number, None) if name == axis else slice(None) for name in x.axes)
    return Array.of(x.axes, x.data[index], x.present[index])


def compare(function: Callable[..., np.ndarray], a: Array, b: Array) -> Array:
    """A comparison in float32; false where either side is absent."""
    result = elementwise(lambda x, y: function(np.float32(x), np.float32(y)), a, b)
    return Array.of(result.axes, result.data & result.present)


def mask(x: Array, condition: Array) -> Array:
    """`x where condition`."""
    axes = union(x, condition)
    data, presence = x.to(axes)
    holds, condition_presence = condition.to(axes)
    data, present = np.broadcast_arrays(data, presence & holds & condition_presence)
    return Array.of(axes, data, present)


def choose(x: Array, condition: Array, y: Array) -> Array:
    """`x where condition else y`."""
    axes = union(x, condition, y)
    (a, in_a), (c, in_c), (b, in_b) = x.to(axes), condition.to(axes), y.to(axes)
    chosen = c & in_c
    data, present = np.broadcast_arrays(np.where(chosen, a, b), np.where(chosen, in_a, in_b))
    return Array.of(axes, data, present)


def snapped(x: np.ndarray) -> np.ndarray:
    """`snap` of `ops/host.py` for arrays."""
    with np.errstate(all="ignore"):
        nearest = np.round(2 * x) / 2
        close = np.abs(x - nearest) <= SNAP * np.maximum(1.0, np.abs(x))
    return np.where(close, nearest, x)


def reduce(function: Callable[..., np.ndarray], x: Array, axes: Sequence[str]) -> Array:
    """A reduction over named axes; `function` takes data, presence and dimensions to reduce."""
    rest = tuple(axis for axis in x.axes if axis not in axes)
    with np.errstate(all="ignore"):
        data = function(x.data, x.present, tuple(x.axes.index(axis) for axis in axes))
    return Array.of(rest, data if data.dtype == np.bool_ else np.where(np.isnan(data), 0.0, data))


def order(x: Array, axes: Sequence[str]) -> tuple[tuple[str, ...], np.ndarray]:
    """Places of values among those that compete: 0 for the highest, present ones first.

    Equal float32 values come in the order of `axes` as written, lower index first.

    Returns:
        The axes of the result, competing ones last and as written, and int64 places.
    """
    rest = tuple(axis for axis in x.axes if axis not in axes)
    permutation = [x.axes.index(axis) for axis in (*rest, *axes)]
    data = x.data.transpose(permutation).astype(np.float32)
    absent = ~x.present.transpose(permutation)
    flat = (*data.shape[: len(rest)], int(np.prod(data.shape[len(rest) :], dtype=np.int64)))
    sorted_indices = np.lexsort((-data.reshape(flat), absent.reshape(flat)), axis=-1)
    places = np.argsort(sorted_indices, axis=-1, kind="stable")
    return (*rest, *axes), places.reshape(data.shape)


def named(axes: Sequence[str], data: np.ndarray) -> Array:
    """An array from values with a name for each dimension, in any order."""
    permutation = sorted(range(len(axes)), key=lambda i: ORDER.index(axes[i]))
    return Array.of([axes[i] for i in permutation], np.asarray(data).transpose(permutation))


def top(x: Array, count: Array, axes: Sequence[str]) -> Array:
    """The `count` highest along `axes`; absent values are never chosen."""
    places = named(*order(x, axes))
    number = np.maximum(np.floor(snapped(count.data)), 0)
    limit = Array.of(count.axes, number, count.present)
    chosen = elementwise(np.less, places, limit)
    winners = elementwise(np.logical_and, chosen, Array.of(x.axes, x.present))
    return Array.of(winners.axes, winners.data & winners.present)
