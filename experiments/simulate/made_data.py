"""Random values with a known mean, as skewed as those of live traffic."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

OUTLIERS = 0.005  # largest share of the values of `lognormal_with_outliers` set to `upper`
SIGMA = 1.2  # deviation of the logarithm: the largest of 100 values is some 15 times the median
ZEROS = 0.8  # largest share of zeros in `mostly_zero`

Sampler = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]


def lognormal_with_outliers(mean: float, upper: float) -> Sampler:
    """Lognormal values cut at `upper`, and a few outliers at `upper`; all together have this mean.

    The outliers make up at most half of the mean: with a small mean they are fewer.
    """
    share = min(OUTLIERS, mean / upper / 2)
    rest = (mean - share * upper) / (1 - share)
    location = _solved(lambda mu: _cut_lognormal_mean(mu, upper), rest, -40.0, 20.0)

    def draw(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
        values = np.minimum(rng.lognormal(location, SIGMA, shape), upper)
        values[rng.random(shape) < share] = upper
        return values

    return draw


def mostly_zero(mean: float, upper: float) -> Sampler:
    """Zeros, and exponential values cut at `upper`; all together have this mean."""
    zeros = min(ZEROS, 1 - mean / upper)
    rest = mean / (1 - zeros)
    scale = math.exp(_solved(lambda t: _cut_exponential_mean(t, upper), rest, -40.0, 40.0))

    def draw(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
        values = np.minimum(rng.exponential(scale, shape), upper)
        values[rng.random(shape) < zeros] = 0.0
        return values

    return draw


def all_or_nothing(mean: float, upper: float) -> Sampler:
    """Values 0 and `upper`: the largest spread that values with this mean can have."""

    def draw(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
        return np.where(rng.random(shape) < mean / upper, upper, 0.0)

    return draw


KINDS: dict[str, Callable[[float, float], Sampler]] = {
    "lognormal, 0.5 % outliers": lognormal_with_outliers,
    "mostly zero": mostly_zero,
    "all or nothing": all_or_nothing,
}


def _cut_lognormal_mean(mu: float, upper: float) -> float:
    """Mean of min(X, upper), where log X is normal with mean mu and deviation SIGMA."""
    cut = (math.log(upper) - mu) / SIGMA
    return math.exp(mu + SIGMA**2 / 2) * _normal(cut - SIGMA) + upper * (1 - _normal(cut))


def _cut_exponential_mean(log_scale: float, upper: float) -> float:
    scale = math.exp(log_scale)
    return -scale * math.expm1(-upper / scale)


def _normal(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


def _solved(mean: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    """Argument in [low, high] at which an increasing function is `wanted`, by bisection."""
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if mean(middle) < wanted else (low, middle)
    return low
