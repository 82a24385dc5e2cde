"""Statistics of the mean of bounded values that are valid at any moment, however often one looks.

Two statistics of one stream of values in [0, upper]:

* an interval, from the predictable plug-in empirical-Bernstein confidence sequence (Waudby-Smith
  and Ramdas, "Estimating means of bounded random variables by betting", JRSS B 2024, Theorem 2);
* evidence for and against "the mean is above the margin", from the capital of bets on it (the same
  paper, section 4): a mixture over a fixed grid of bets, so that rare large values, which ruin a
  bet made for the usual ones, leave the smaller bets of the grid standing.

Everything is a sum over values, so the sums of several replicas add. If the mean moves, both refer
to the mean that each value had when it came: the interval to the weighted average of these means.

The running intersection of intervals would be narrower but is no sum, so it is not computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

# The paper recommends 1/2 or 3/4 as the largest bet of an interval. The larger one is better where
# nearly all values are alike; where the spread is large bets are smaller anyway.
LARGEST_BET = 0.75
TUNED_AT = 0.05  # alpha for which the bets of an interval are tuned; they are valid for any alpha

# Bets as shares of the largest bet that cannot lose everything. Where the mean is above the margin
# a bet gains with its size until a rare small value comes: the best bet may be anywhere. Where it
# is below, one value at `upper` loses nearly all: the best bet is large (no outliers) or middling.
ABOVE = tuple(0.002 * (0.98 / 0.002) ** (i / 15) for i in range(16))
BELOW = tuple(0.03 * (0.99 / 0.03) ** (i / 9) for i in range(10))


class BoundedMean:
    """Sums over a stream of values in [0, upper].

    Attributes:
        upper: largest value, above 0.
        margin: the mean against which bets are made, inside (0, upper); None for no bets.
        n: number of values.
        total: sum of the values.
    """

    def __init__(self, upper: float, margin: float | None = None) -> None:
        if not 0 < upper < math.inf:
            raise ValueError(f"upper is {upper}; it must be above 0 and finite")
        if margin is not None and not 0 < margin < upper:
            raise ValueError(f"margin is {margin}; it must be above 0 and below {upper}")
        self.upper = upper
        self.margin = margin
        self.n = 0
        self.total = 0.0
        # With y = x / upper: sums of bet * y, of bets, and of the cost of the spread; `squares`
        # sums the squared deviations that size the next bet.
        self.bet_values = 0.0
        self.bets = 0.0
        self.spread = 0.0
        self.squares = 0.0
        self.above = [0.0] * len(ABOVE) if margin is not None else []
        self.below = [0.0] * len(BELOW) if margin is not None else []

    def add(self, x: float) -> None:
        """Adds one value.

        Raises:
            ValueError: `x` is NaN or outside [0, upper].
        """
        if not 0 <= x <= self.upper:
            raise ValueError(f"{x} is not between 0 and {self.upper}")
        y = x / self.upper
        before = (0.5 + self.total / self.upper) / (self.n + 1)
        bet = next_bet(self.n, self.squares)
        self.bet_values += bet * y
        self.bets += bet
        self.spread += 4 * (y - before) ** 2 * bet_cost(bet)
        self.n += 1
        self.total += x
        after = (0.5 + self.total / self.upper) / (self.n + 1)
        self.squares += (y - after) ** 2
        if self.margin is not None:
            m = self.margin / self.upper
            for i, share in enumerate(ABOVE):
                self.above[i] += math.log1p(share / m * (y - m))
            for i, share in enumerate(BELOW):
                self.below[i] += math.log1p(share / (1 - m) * (m - y))

    @property
    def mean(self) -> float | None:
        """Mean of the values; None before the first."""
        return self.total / self.n if self.n else None

    def interval(self, alpha: float) -> tuple[float, float]:
        """Bounds that hold the mean at all moments together, with a chance of at least 1 - alpha.

        The chance that one side fails is at most alpha / 2.
        """
        if not self.bets:
            return 0.0, self.upper
        center = self.upper * self.bet_values / self.bets
        half = self.upper * (math.log(2 / alpha) + self.spread) / self.bets
        return max(0.0, center - half), min(self.upper, center + half)

    @property
    def log_e_above(self) -> float:
        """Log of the evidence that the mean is above the margin.

        While the mean is at most the margin, the chance that it ever reaches log(1 / a) is at most
        a (Ville's inequality). 0 without values or without a margin.
        """
        return log_mean_exp(self.above)

    @property
    def log_e_below(self) -> float:
        """Log of the evidence that the mean is below the margin, with the same guarantee."""
        return log_mean_exp(self.below)

    def as_document(self) -> dict[str, Any]:
        """The sums as a JSON value."""
        return {
            "upper": self.upper,
            "margin": self.margin,
            "n": self.n,
            "total": self.total,
            "bet_values": self.bet_values,
            "bets": self.bets,
            "spread": self.spread,
            "squares": self.squares,
            "above": list(self.above),
            "below": list(self.below),
        }

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> BoundedMean:
        """The sums of a JSON value.

        Raises:
            ValueError, KeyError, TypeError: `document` is not one of `as_document`.
        """
        mean = cls(document["upper"], document["margin"])
        mean.n = int(document["n"])
        for name in ("total", "bet_values", "bets", "spread", "squares"):
            setattr(mean, name, finite(document[name]))
        above = [finite(value) for value in document["above"]]
        below = [finite(value) for value in document["below"]]
        if (len(above), len(below)) != (len(mean.above), len(mean.below)):
            raise ValueError("the bets are of another version")
        mean.above, mean.below = above, below
        return mean

    @classmethod
    def pooled(cls, means: Sequence[BoundedMean]) -> BoundedMean:
        """The sums of several replicas.

        The product of the replicas' supermartingales is a supermartingale too. The bets on the
        margin are the same in all replicas, so adding their logs, one point of the grid at a time,
        gives the mixture that a single stream would have given. (Adding the replicas'
        `log_e_above` would be valid too, and weaker.)

        Raises:
            ValueError: `means` is empty, or their `upper` or `margin` differ.
        """
        if len({(mean.upper, mean.margin) for mean in means}) != 1:
            raise ValueError("only means with one bound and one margin can be pooled")
        pooled = cls(means[0].upper, means[0].margin)
        pooled.n = sum(mean.n for mean in means)
        for name in ("total", "bet_values", "bets", "spread", "squares"):
            setattr(pooled, name, sum(getattr(mean, name) for mean in means))
        pooled.above = [sum(column) for column in zip(*(mean.above for mean in means), strict=True)]
        pooled.below = [sum(column) for column in zip(*(mean.below for mean in means), strict=True)]
        return pooled


def next_bet(n: int, squares: float) -> float:
    """The bet of an interval on the value that follows n values (below Theorem 2 of the paper).

    Args:
        squares: sum over the n values of (y - mean so far)^2.
    """
    variance = (0.25 + squares) / (n + 1)
    raw = math.sqrt(2 * math.log(2 / TUNED_AT) / (variance * (n + 1) * math.log(n + 2)))
    return min(raw, LARGEST_BET)


def bet_cost(bet: float) -> float:
    """Cost of a bet per unit of 4 (y - mean so far)^2: psi_E of the paper."""
    return (-math.log1p(-bet) - bet) / 4


def log_mean_exp(logs: Iterable[float]) -> float:
    """Log of the mean of exp(logs), 0 for none."""
    values = list(logs)
    if not values:
        return 0.0
    largest = max(values)
    total = sum(math.exp(value - largest) for value in values)
    return largest + math.log(total / len(values))


def finite(value: object) -> float:
    """A JSON number as a float.

    Raises:
        ValueError: `value` is not a finite number.
    """
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no number")
    return float(value)
