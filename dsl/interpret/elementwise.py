"""Elementwise operations on arrays that broadcast, where numpy has none, and reductions.

A result that is NaN becomes 0 afterwards.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from kvpolicy.dsl.data import arrays
from kvpolicy.dsl.data.arrays import Array, snapped
from kvpolicy.dsl.interpret.values import Values
from kvpolicy.dsl.ir.nodes import Node

Dims = tuple[int, ...]


def divide(a: np.ndarray, b: np.ndarray) -> Any:
    """-0 is 0: adding 0 to a divisor or a base makes it so."""
    return a / (b + 0.0)


def floor_divide(a: np.ndarray, b: np.ndarray) -> Any:
    return floor(divide(a, b))


def modulo(a: np.ndarray, b: np.ndarray) -> Any:
    return a - b * floor_divide(a, b)


def power(a: np.ndarray, b: np.ndarray) -> Any:
    """Of a negative base only whole powers exist, also of -inf."""
    return np.where((a < 0) & (b != np.floor(b)), np.nan, np.power(a + 0.0, b))


def floor(x: np.ndarray) -> Any:
    return np.floor(snapped(x))


def ceil(x: np.ndarray) -> Any:
    return np.ceil(snapped(x))


def nearest(x: np.ndarray) -> Any:
    return np.round(snapped(x))


def mask(e: Values, node: Node, layer: int) -> Array:
    """`x where condition`."""
    return arrays.mask(*(e.value(arg, layer) for arg in node.args))


def choose(e: Values, node: Node, layer: int) -> Array:
    """`x where condition else y`."""
    x, condition, y = node.args
    if e.bound.static.needs(condition) is not None:
        chosen = e.value(x if e.number(condition, layer) else y, layer)
        return e.broadcast(chosen, node.type, layer)
    return arrays.choose(*(e.value(arg, layer) for arg in node.args))


# Reductions over the present data.


def total(data: np.ndarray, present: np.ndarray, dims: Dims) -> Any:
    return np.where(present, data, 0.0).sum(dims)


def mean(data: np.ndarray, present: np.ndarray, dims: Dims) -> Any:
    return total(data, present, dims) / present.sum(dims)


def largest(data: np.ndarray, present: np.ndarray, dims: Dims) -> Any:
    return np.where(present, data, -np.inf).max(dims, initial=-np.inf)


def smallest(data: np.ndarray, present: np.ndarray, dims: Dims) -> Any:
    return np.where(present, data, np.inf).min(dims, initial=np.inf)


def variance(data: np.ndarray, present: np.ndarray, dims: Dims) -> Any:
    middle = np.expand_dims(mean(data, present, dims), dims)
    return mean((data - middle) ** 2, present, dims)


def anywhere(data: np.ndarray, present: np.ndarray, dims: Dims) -> Any:
    return (data & present).any(dims)


def count(data: np.ndarray, present: np.ndarray, dims: Dims) -> Any:
    return (data & present if data.dtype == bool else present).sum(dims)
