"""What can be said of a mean at any moment, however often one looks, if values have a bound.

Two statistics of one stream of values in [0, upper]:

* an interval, from the predictable plug-in empirical-Bernstein confidence sequence (Waudby-Smith
  and Ramdas, "Estimating means of bounded random variables by betting", JRSS B 2024, Theorem 2);
* evidence for and against "the mean is above the margin", from the capital of bets on it (the same
  paper, section 4): a mixture over a fixed grid of bets, so that rare large values, which ruin a
  bet made for the usual ones, leave the smaller bets of the grid standing.

Everything is a sum over values, so several replicas pool by adding. If the mean moves, both speak
of the mean that each value had when it came: the interval of their weighted average.

The running intersection of intervals would be narrower but is no sum: it is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

# The paper recommends 1/2 or 3/4 as the largest bet of an interval. The larger one is better where
# nearly all values are alike; where the spread is large bets are smaller anyway.
LARGEST_BET = 0.75
TUNED_AT = 0.05  # the alpha for which the bets of an interval are made; they are valid for any

# Bets as shares of the largest one that cannot lose everything. Above the margin what is won grows
# with the bet until a rare small value; the best bet may be anywhere. Below it one value at the
# upper end loses nearly all, so the best bet is large (no outliers) or a middling one.
ABOVE = tuple(0.002 * (0.98 / 0.002) ** (i / 15) for i in range(16))
BELOW = tuple(0.03 * (0.99 / 0.03) ** (i / 9) for i in range(10))


class BoundedMean:
    """Sums over a stream of values in [0, upper].

    Attributes:
        upper: largest value, above 0.
        margin: the mean against which bets are made, inside (0, upper); None bets nothing.
        n: number of values.
        total: their sum.
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
        # Of y = x / upper: sums of bet * y, of bets, and of what the spread costs; and the squares
        # from which the next bet is made. A pooled sum has no next bet of its own.
        self.bet_values = 0.0
        self.bets = 0.0
        self.spread = 0.0
        self.squares = 0.0
        self.above = [0.0] * len(ABOVE) if margin is not None else []
        self.below = [0.0] * len(BELOW) if margin is not None else []

    def add(self, x: float) -> None:
        """Takes one value.

        Raises:
            ValueError: it is outside [0, upper], or no number.
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
        """Mean of the values, None before the first."""
        return self.total / self.n if self.n else None

    def interval(self, alpha: float) -> tuple[float, float]:
        """Bounds that hold the mean, at all moments together, but for a chance of alpha.

        Each side alone fails with a chance of alpha / 2 at most.
        """
        if not self.bets:
            return 0.0, self.upper
        center = self.upper * self.bet_values / self.bets
        half = self.upper * (math.log(2 / alpha) + self.spread) / self.bets
        return max(0.0, center - half), min(self.upper, center + half)

    @property
    def log_e_above(self) -> float:
        """Log of the evidence that the mean is above the margin.

        While the mean is at most the margin it ever reaches log(1 / a) with a chance of a at most
        (Ville's inequality). 0 without values or margin.
        """
        return log_mean_exp(self.above)

    @property
    def log_e_below(self) -> float:
        """Log of the evidence that the mean is below the margin."""
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
            ValueError, KeyError, TypeError: it is none of `as_document`.
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
        """Sums of several replicas, as if one had seen all values.

        The product of the replicas' supermartingales is one again; as the bets on the margin are
        the same in all of them, adding their logs grid point by grid point gives the very mixture
        that one stream would have given. (To add `log_e_above` of replicas is valid too, and
        weaker.)

        Raises:
            ValueError: there is none, or bound or margin differ.
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
    """The bet of an interval on the value after n values (below Theorem 2 of the paper).

    Args:
        squares: sum over the values of (y - mean so far)^2.
    """
    variance = (0.25 + squares) / (n + 1)
    raw = math.sqrt(2 * math.log(2 / TUNED_AT) / (variance * (n + 1) * math.log(n + 2)))
    return min(raw, LARGEST_BET)


def bet_cost(bet: float) -> float:
    """What one unit of squared distance costs a bet: psi_E of the paper."""
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
        ValueError: it is no number, or not finite.
    """
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no number")
    return float(value)
