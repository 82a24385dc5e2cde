"""How sure a mean score is, and how sure its difference to full KV: 95 % intervals.

A *unit* is one sample: the mean score of its questions, since questions about one context rise and
fall together. Units come in *strata*, one per task and length.

Of one stratum: where every unit is 0 or 1 the interval is Wilson's, and that of a paired difference
Newcombe's, which is made of two such (Statistics in Medicine 17, 1998, p. 2635, method 10).
Elsewhere samples are drawn again with replacement (a seeded bootstrap). Below FEW units, and where
units do not differ at all, a bootstrap is too narrow; Wilson's and Newcombe's are taken there too,
which for scores between 0 and 1 are wider than need be.

Over several strata the mean of their means is taken, so that no task weighs more because it has
more samples. Its distances to the ends of its interval are those of the strata, squared, added up
and divided by the number of strata squared (as variances are; Zou and Donner, Statistics in
Medicine 27, 2008, p. 1693): a stratum of few samples makes it wide, as it should.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

Z = 1.959964  # of the normal distribution, 2.5 % beyond it
FEW = 20
DRAWS = 2000


class Estimate(NamedTuple):
    """A mean with its 95 % interval."""

    mean: float
    low: float
    high: float


class Spread(NamedTuple):
    """Median and quartiles."""

    median: float
    low: float
    high: float


def wilson(share: float, count: float) -> Estimate:
    """Wilson's interval of a share of `count` units; `count` need not be whole."""
    middle = (share + Z * Z / (2 * count)) / (1 + Z * Z / count)
    half = Z * math.sqrt(share * (1 - share) / count + Z * Z / (4 * count**2)) / (1 + Z * Z / count)
    # At 0 and 1 the interval ends there; rounding may miss it by a hair.
    return Estimate(share, min(share, max(0.0, middle - half)), max(share, min(1.0, middle + half)))


def mean_score(strata: Sequence[np.ndarray], seed: int = 0) -> Estimate:
    """The mean over strata of the units' scores.

    Args:
        strata: scores 0 to 1 of the units, an array per stratum; none of them empty.
    """
    return _together([_score(units, seed) for units in strata])


def paired_difference(
    strata: Sequence[np.ndarray], full: Sequence[np.ndarray], seed: int = 0
) -> Estimate:
    """The mean over strata of score less score with full KV, unit by unit.

    Args:
        strata, full: scores 0 to 1 of the same units in the same order, an array per stratum.
    """
    return _together([_difference(*pair, seed) for pair in zip(strata, full, strict=True)])


def _score(units: np.ndarray, seed: int) -> Estimate:
    """Of one stratum."""
    if _is_plain(units, units):
        return wilson(float(units.mean()), len(units))
    return _bootstrap(units, seed)


def _difference(units: np.ndarray, full: np.ndarray, seed: int) -> Estimate:
    """Of one stratum."""
    if _is_plain(units - full, np.concatenate((units, full))):
        own, whole = (wilson(float(scores.mean()), len(scores)) for scores in (units, full))
        return newcombe(own, whole, _correlation(units, full))
    return _bootstrap(units - full, seed)


def _is_plain(units: np.ndarray, scores: np.ndarray) -> bool:
    """Whether units are too few or too much alike for a bootstrap, or scores are 0 and 1."""
    return len(units) < FEW or np.ptp(units) == 0 or bool(np.isin(scores, (0, 1)).all())


def _together(parts: Sequence[Estimate]) -> Estimate:
    """The mean of independent estimates."""
    mean, low, high = np.array(parts).T
    count = len(parts)
    below = np.sqrt(np.sum((mean - low) ** 2)) / count
    above = np.sqrt(np.sum((high - mean) ** 2)) / count
    middle = float(mean.mean())
    return Estimate(middle, float(middle - below), float(middle + above))


def newcombe(first: Estimate, second: Estimate, correlation: float) -> Estimate:
    """The interval of `first - second` from the intervals of both and their correlation."""

    def half(one: float, other: float) -> float:
        return math.sqrt(max(0.0, one * one - 2 * correlation * one * other + other * other))

    mean = first.mean - second.mean
    low = half(first.mean - first.low, second.high - second.mean)
    high = half(second.mean - second.low, first.high - first.mean)
    return Estimate(mean, max(-1.0, mean - low), min(1.0, mean + high))


def quartiles(values: Sequence[float] | np.ndarray) -> Spread:
    """Median, first and third quartile (interpolated linearly) of at least one value."""
    low, median, high = np.percentile(np.asarray(values, dtype=float), (25, 50, 75))
    return Spread(float(median), float(low), float(high))


def _correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Newcombe's, with his correction of a positive one by half a pair; 0 where one is constant."""
    count = len(first)
    spread = count * first.std() * count * second.std()
    if spread == 0:
        return 0.0
    excess = count * float(first @ second) - first.sum() * second.sum()
    if excess > 0:
        excess = max(excess - count / 2, 0.0)
    return float(excess / spread)


@lru_cache(maxsize=64)
def _weights(count: int, seed: int) -> np.ndarray:
    """[DRAWS, count]: how often each unit is drawn, divided by their number."""
    rng = np.random.default_rng([seed, count])
    return (rng.multinomial(count, np.full(count, 1 / count), size=DRAWS) / count).astype(
        np.float32
    )


def _bootstrap(units: np.ndarray, seed: int) -> Estimate:
    """Percentiles of the mean over drawn units."""
    mean = float(units.mean())
    drawn = _weights(len(units), seed) @ units.astype(np.float32)
    low, high = np.percentile(drawn, (2.5, 97.5))
    return Estimate(mean, min(mean, float(low)), max(mean, float(high)))
