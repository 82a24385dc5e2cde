"""Mean of an arm minus mean of control, valid at any moment.

Values of both are paired as they come: the mean of the arm's values and the mean of control's since
the last pair make one difference in [-upper, upper]; `bounded_mean.py` takes these differences. A
pair is closed as soon as both sides have a value, which depends on when values come and not on how
large they are. Both sides come from the same minutes, so what moves both arms (an overload, a bad
hour) cancels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpolicy.experiments.statistics.bounded_mean import BoundedMean, finite


class PairedDifference:
    """Sums over pairs of an arm's and control's values in [0, upper].

    Attributes:
        upper: largest value.
        margin: the difference against which bets are made, in [0, upper); None for no bets.
        shifted: statistics of difference + upper, which is in [0, 2 * upper].
        waiting: by side, number and sum of the values since the last pair.
    """

    def __init__(self, upper: float, margin: float | None = None) -> None:
        self.upper = upper
        self.margin = margin
        self.shifted = BoundedMean(2 * upper, None if margin is None else margin + upper)
        self.waiting = {"arm": [0.0, 0.0], "control": [0.0, 0.0]}

    def add(self, side: str, x: float) -> None:
        """Adds one value of a side, "arm" or "control".

        Raises:
            ValueError: `x` is NaN or outside [0, upper].
        """
        if not 0 <= x <= self.upper:
            raise ValueError(f"{x} is not between 0 and {self.upper}")
        self.waiting[side][0] += 1
        self.waiting[side][1] += x
        self._pair()

    def _pair(self) -> None:
        (n, total), (control_n, control_total) = self.waiting["arm"], self.waiting["control"]
        if n and control_n:
            shifted = total / n - control_total / control_n + self.upper
            self.shifted.add(min(max(shifted, 0.0), 2 * self.upper))  # rounding may exceed bounds
            self.waiting = {"arm": [0.0, 0.0], "control": [0.0, 0.0]}

    @property
    def n(self) -> int:
        """Number of pairs."""
        return self.shifted.n

    @property
    def mean(self) -> float | None:
        """Mean of the differences; None before the first pair."""
        return None if self.shifted.mean is None else self.shifted.mean - self.upper

    def interval(self, alpha: float) -> tuple[float, float]:
        """Bounds that hold the mean difference, as those of `BoundedMean.interval`."""
        low, high = self.shifted.interval(alpha)
        return low - self.upper, high - self.upper

    @property
    def log_e_above(self) -> float:
        """Log of the evidence that the difference is above the margin, as in `BoundedMean`."""
        return self.shifted.log_e_above

    @property
    def log_e_below(self) -> float:
        """Log of the evidence that the difference is below the margin."""
        return self.shifted.log_e_below

    def as_document(self) -> dict[str, Any]:
        """The sums as a JSON value."""
        return {"waiting": self.waiting, "shifted": self.shifted.as_document()}

    def take(self, documents: Sequence[dict[str, Any]]) -> None:
        """Adds the sums of replicas; values that wait in one replica may be paired with another's.

        Raises:
            ValueError, KeyError, TypeError: a document is not one of `as_document`.
        """
        means = [BoundedMean.from_document(document["shifted"]) for document in documents]
        self.shifted = BoundedMean.pooled([self.shifted, *means])
        for document in documents:
            for side, sums in self.waiting.items():
                n, total = document["waiting"][side]
                self.waiting[side] = [sums[0] + finite(n), sums[1] + finite(total)]
        self._pair()
