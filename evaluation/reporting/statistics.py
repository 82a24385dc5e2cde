"""95 % intervals of mean scores and of their differences to full KV.

A unit is one sample: the mean score of its questions, since questions about one context are
correlated. Units come in strata, one per task and length.

In one stratum: if every unit is 0 or 1, the interval of the mean is Wilson's, and that of a paired
difference Newcombe's, which combines two of Wilson's (Statistics in Medicine 17, 1998, p. 2635,
method 10). Otherwise it is a seeded bootstrap over units. With fewer than FEW units, or units that
are all equal, a bootstrap is too narrow; then Wilson's and Newcombe's are used too, which are wider
than needed for scores between 0 and 1.

Over several strata the estimate is the mean of their means, so that no task weighs more because it
has more samples. The squared distance to each end of its interval is the sum of the squared
distances of the strata, divided by the squared number of strata (as for variances; Zou and Donner,
Statistics in Medicine 27, 2008, p. 1693). So a stratum of few samples widens the interval. Strata
that ask about the same contexts are correlated, and the products of their distances count too, with
the correlation of their units.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

import numpy as np
from kvpolicy.experiments.statistics.shares import wilson

FEW = 20  # units below which no bootstrap is used
DRAWS = 2000  # samples of a bootstrap
_DIGITS = 12  # decimals of the ends of intervals


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


class Contexts(NamedTuple):
    """The contexts that a stratum asks about.

    Attributes:
        source: equal for strata whose units of the same number are about the same context.
        numbers: int, the number of each unit, rising.
    """

    source: Hashable
    numbers: np.ndarray


def of_share(share: float, count: float) -> Estimate:
    """A share of `count` units; `count` need not be whole."""
    return Estimate(share, *wilson(share, count))


def mean_score(
    strata: Sequence[np.ndarray], seed: int = 0, contexts: Sequence[Contexts] | None = None
) -> Estimate:
    """The mean over strata of the mean score of their units.

    Args:
        strata: scores of the units, 0 to 1, a non-empty array per stratum.
        seed: seed of the bootstrap.
        contexts: the contexts of each stratum; None if no two strata share any.
    """
    parts = [_score(units, seed) for units in strata]
    return _together(parts, _correlations(strata, contexts))


def paired_difference(
    strata: Sequence[np.ndarray],
    full: Sequence[np.ndarray],
    seed: int = 0,
    contexts: Sequence[Contexts] | None = None,
) -> Estimate:
    """The mean over strata of score minus score with full KV, unit by unit.

    Args:
        strata, full: scores of the same units in the same order, 0 to 1, an array per stratum.
        seed, contexts: as in `mean_score`.
    """
    pairs = list(zip(strata, full, strict=True))
    parts = [_difference(*pair, seed) for pair in pairs]
    return _together(parts, _correlations([units - other for units, other in pairs], contexts))


def _score(units: np.ndarray, seed: int) -> Estimate:
    """The mean score of one stratum."""
    if _is_plain(units, units):
        return of_share(float(units.mean()), len(units))
    return _bootstrap(units, seed)


def _difference(units: np.ndarray, full: np.ndarray, seed: int) -> Estimate:
    """The mean paired difference of one stratum."""
    if _is_plain(units - full, np.concatenate((units, full))):
        first, second = (of_share(float(scores.mean()), len(scores)) for scores in (units, full))
        return newcombe(first, second, _correlation(units, full))
    return _bootstrap(units - full, seed)


def _is_plain(units: np.ndarray, scores: np.ndarray) -> bool:
    """Whether units are too few or all equal, or all scores are 0 or 1: no bootstrap then."""
    return len(units) < FEW or np.ptp(units) == 0 or bool(np.isin(scores, (0, 1)).all())


def _together(parts: Sequence[Estimate], correlations: np.ndarray) -> Estimate:
    """The mean of estimates that have these correlations."""
    mean, low, high = np.array(parts).T
    below, above = (
        float(np.sqrt(distances @ correlations @ distances)) / len(parts)
        for distances in (mean - low, high - mean)
    )
    middle = float(mean.mean())
    # An end at 0 is 0, not a rounding error beside it, which would count as a difference.
    low, high = (round(end, _DIGITS) + 0.0 for end in (middle - below, middle + above))
    return Estimate(middle, min(middle, low), max(middle, high))


def _correlations(strata: Sequence[np.ndarray], contexts: Sequence[Contexts] | None) -> np.ndarray:
    """Correlations of the means of strata: float64 [strata, strata]."""
    matrix = np.eye(len(strata))
    for (i, first), (j, second) in combinations(enumerate(contexts or ()), 2):
        if first.source == second.source:
            correlation = _of_means(strata[i], strata[j], first.numbers, second.numbers)
            matrix[i, j] = matrix[j, i] = correlation
    return matrix


def _of_means(
    first: np.ndarray, second: np.ndarray, numbers: np.ndarray, other_numbers: np.ndarray
) -> float:
    """The correlation of two means of units with these numbers; 0 if no number is in both.

    Where too few units tell, or all are equal, units of the same number count as equal: the
    interval is then too wide rather than too narrow.
    """
    shared, at, other_at = np.intersect1d(numbers, other_numbers, return_indices=True)
    units, other_units = first[at], second[other_at]
    correlation = 1.0
    if len(shared) >= FEW and np.ptp(units) > 0 and np.ptp(other_units) > 0:
        correlation = max(0.0, float(np.corrcoef(units, other_units)[0, 1]))
    return correlation * len(shared) / math.sqrt(len(first) * len(second))


def newcombe(first: Estimate, second: Estimate, correlation: float) -> Estimate:
    """The interval of `first - second` from the intervals of both and their correlation."""

    def half_width(below: float, above: float) -> float:
        return math.sqrt(max(0.0, below * below - 2 * correlation * below * above + above * above))

    mean = first.mean - second.mean
    low = half_width(first.mean - first.low, second.high - second.mean)
    high = half_width(second.mean - second.low, first.high - first.mean)
    return Estimate(mean, max(-1.0, mean - low), min(1.0, mean + high))


def quartiles(values: Sequence[float] | np.ndarray) -> Spread:
    """Median, first and third quartile (interpolated linearly) of at least one value."""
    low, median, high = np.percentile(np.asarray(values, dtype=float), (25, 50, 75))
    return Spread(float(median), float(low), float(high))


def _correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Newcombe's correlation, corrected for continuity if positive; 0 if one side is constant."""
    count = len(first)
    spread = count * first.std() * count * second.std()
    if spread == 0:
        return 0.0
    excess = count * float(first @ second) - first.sum() * second.sum()
    if excess > 0:
        excess = max(excess - count / 2, 0.0)
    return float(excess / spread)


@lru_cache(maxsize=32)
def _weights(count: int, seed: int) -> np.ndarray:
    """Number of times that each unit is drawn, divided by `count`: float64 [DRAWS, count]."""
    rng = np.random.default_rng([seed, count])
    return rng.multinomial(count, np.full(count, 1 / count), size=DRAWS) / count


def _bootstrap(units: np.ndarray, seed: int) -> Estimate:
    """The mean of units, with percentiles of the means of DRAWS bootstrap samples."""
    mean = float(units.mean())
    means = _weights(len(units), seed) @ units
    low, high = np.percentile(means, (2.5, 97.5))
    return Estimate(mean, min(mean, float(low)), max(mean, float(high)))
