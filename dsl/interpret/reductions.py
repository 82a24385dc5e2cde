"""Reductions of data where present, over dimensions; what is NaN counts as 0 afterwards."""

from __future__ import annotations

from typing import Any

import numpy as np

Dims = tuple[int, ...]


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
