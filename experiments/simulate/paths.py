"""The statistics of `bounded_mean.py` and `sample_ratio.py` for many runs at once.

Each function gives the statistic after every value of every run, so that a simulation can look
after each. Shapes: R runs, here N values of each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from kvpolicy.experiments.statistics.bounded_mean import ABOVE, BELOW, LARGEST_BET, TUNED_AT
from kvpolicy.experiments.statistics.sample_ratio import CONCENTRATIONS

LIMIT = 700.0  # exp of more than about this overflows float64


class Sums(NamedTuple):
    """The parts of an interval after each value: float64 [R, N], in the unit of the values.

    An interval at alpha is center +- (spread + scale * log(2 / alpha)).
    """

    center: np.ndarray
    scale: np.ndarray
    spread: np.ndarray


def sums(values: np.ndarray, upper: float) -> Sums:
    """The intervals of `BoundedMean` for values [R, N] in [0, upper]."""
    y = values / upper
    n = np.arange(1, y.shape[1] + 1)
    running = np.cumsum(y, axis=1)
    after = (0.5 + running) / (n + 1)
    before = np.concatenate([np.full((len(y), 1), 0.5), after[:, :-1]], axis=1)
    squares = np.cumsum((y - after) ** 2, axis=1)
    squares = np.concatenate([np.zeros((len(y), 1)), squares[:, :-1]], axis=1)
    variance = (0.25 + squares) / n
    raw = np.sqrt(2 * math.log(2 / TUNED_AT) / (variance * n * np.log(n + 1)))
    bets = np.minimum(raw, LARGEST_BET)
    cost = (-np.log1p(-bets) - bets) / 4
    total = np.cumsum(bets, axis=1)
    spread = np.cumsum(4 * (y - before) ** 2 * cost, axis=1)
    return Sums(upper * np.cumsum(bets * y, axis=1) / total, upper / total, upper * spread / total)


def log_e_above(values: np.ndarray, upper: float, margin: float) -> np.ndarray:
    """Log of the evidence that the mean is above the margin, after each value: float64 [R, N]."""
    m = margin / upper
    return _mixture((values / upper - m), [share / m for share in ABOVE])


def log_e_below(values: np.ndarray, upper: float, margin: float) -> np.ndarray:
    """Log of the evidence that the mean is below the margin, after each value: float64 [R, N]."""
    m = margin / upper
    return _mixture((m - values / upper), [share / (1 - m) for share in BELOW])


def _mixture(gains: np.ndarray, bets: Sequence[float]) -> np.ndarray:
    return _log_mean_exp(gains.shape, (np.cumsum(np.log1p(bet * gains), axis=1) for bet in bets))


def _log_mean_exp(shape: tuple[int, ...], logs: Iterable[np.ndarray]) -> np.ndarray:
    """As `bounded_mean.log_mean_exp`, of logs cut at `LIMIT`, far beyond any decision."""
    total, number = np.zeros(shape), 0
    for values in logs:
        np.clip(values, -LIMIT, LIMIT, out=values)
        total += np.exp(values, out=values)
        number += 1
    return np.log(total / number)


def log_bayes_factors(arms: np.ndarray, shares: Sequence[float]) -> np.ndarray:
    """Log of the evidence of the sample-ratio test, after each key: float64 [R, N].

    Args:
        arms: index of the arm of each key, int [R, N].
        shares: shares that the weights give the arms, above 0, summing to 1.
    """
    before = np.zeros(arms.shape)  # keys of the same arm before each key
    expected = np.zeros(arms.shape)
    for index, share in enumerate(shares):
        mine = arms == index
        before = np.where(mine, np.cumsum(mine, axis=1) - 1, before)
        expected = np.where(mine, share, expected)
    keys = np.arange(arms.shape[1])
    predictions = ((c * expected + before) / (c + keys) for c in CONCENTRATIONS)
    factors = (np.cumsum(np.log(predicted / expected), axis=1) for predicted in predictions)
    return _log_mean_exp(arms.shape, factors)


def first_at_least(paths: np.ndarray, threshold: float) -> np.ndarray:
    """Number of values after which each run first reaches a threshold: int [R], 0 for never."""
    reached = paths >= threshold
    return np.where(reached.any(axis=1), reached.argmax(axis=1) + 1, 0)
