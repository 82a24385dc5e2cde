"""How sure a mean score is, and how sure its difference to full KV: 95 % intervals.

A *unit* is one sample: the mean score of its questions, since questions about one context rise and
fall together. Units come in *strata*, one per task and length; what is averaged over several strata
is the mean of their means, so that no task weighs more because it has more samples.

Where every unit is 0 or 1 the intervals are Wilson's, and for paired differences Newcombe's
(Statistics in Medicine 17, 1998, p. 2635, method 10), which is made of them. Elsewhere samples are
drawn again with replacement (a seeded bootstrap). Below FEW units, and where units do not differ
at all, a bootstrap is too narrow; Wilson's and Newcombe's are taken there too, which for scores
between 0 and 1 are wider than need be.
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
    units = np.concatenate(strata)
    mean = _mean(strata)
    if _binary(units) or len(units) < FEW or np.ptp(units) == 0:
        return wilson(mean, _effective(strata))
    return _bootstrap(strata, mean, seed)


def paired_difference(
    strata: Sequence[np.ndarray], full: Sequence[np.ndarray], seed: int = 0
) -> Estimate:
    """The mean over strata of score less score with full KV, unit by unit.

    Args:
        strata, full: scores 0 to 1 of the same units in the same order, an array per stratum.
    """
    first, second = np.concatenate(strata), np.concatenate(full)
    apart = [a - b for a, b in zip(strata, full, strict=True)]
    every = first - second
    if (_binary(first) and _binary(second)) or len(every) < FEW or np.ptp(every) == 0:
        count = _effective(strata)
        return newcombe(
            wilson(_mean(strata), count), wilson(_mean(full), count), _correlation(first, second)
        )
    return _bootstrap(apart, _mean(apart), seed)


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


def _mean(strata: Sequence[np.ndarray]) -> float:
    return float(np.mean([stratum.mean() for stratum in strata]))


def _binary(units: np.ndarray) -> bool:
    return bool(np.isin(units, (0, 1)).all())


def _effective(strata: Sequence[np.ndarray]) -> float:
    """Units of one stratum that would give the mean of the strata's means its variance."""
    return len(strata) ** 2 / sum(1 / len(stratum) for stratum in strata)


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


def _bootstrap(strata: Sequence[np.ndarray], mean: float, seed: int) -> Estimate:
    """Percentiles of the mean over drawn units; each stratum is drawn on its own."""
    drawn = np.zeros(DRAWS)
    for number, stratum in enumerate(strata):
        # Strata of one size share the draws; turned, so that they are not drawn alike.
        drawn += np.roll(_weights(len(stratum), seed) @ stratum.astype(np.float32), 97 * number)
    low, high = np.percentile(drawn / len(strata), (2.5, 97.5))
    return Estimate(mean, min(mean, float(low)), max(mean, float(high)))
