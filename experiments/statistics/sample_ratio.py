"""Whether keys arrive in the arms as the weights say, tested after every key.

The sequential multinomial test of Lindon and Malek ("Anytime-valid inference for multinomial count
data", NeurIPS 2022): a Bayes factor of "some other shares" against "the shares of the weights". The
prior of the other shares is a Dirichlet distribution around the weights. A sharp prior finds small
mismatches, a flat one finds at once that all keys land in one arm; the prior here is a mixture.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvpolicy.experiments.statistics.bounded_mean import log_mean_exp

# Weights of the priors of the mixture, in keys: a larger weight expects shares nearer the weights.
CONCENTRATIONS = (10.0, 100.0, 1_000.0, 10_000.0)
ALARM = 0.001  # p-value below which the shares count as a mismatch


class SampleRatio:
    """Counts of keys by arm, and the evidence against the weights.

    Attributes:
        shares: share of each arm by the weights.
        counts: distinct keys of each arm.
        p_value: smallest so far. If the shares are those of the weights, the chance that it ever
            falls below a is at most a, however often one looks.
    """

    def __init__(self, weights: Sequence[float], counts: Sequence[int] | None = None) -> None:
        """Begins without keys, or with counts of keys whose order is not known.

        Args:
            weights: weight of each arm, at least 0, not all 0.
            counts: number of keys of each arm; None for 0.
        """
        total = math.fsum(weights)
        self.shares = [weight / total for weight in weights]
        self.counts = [0] * len(self.shares)
        self.p_value = 1.0
        self._logs = [0.0] * len(CONCENTRATIONS)
        if counts is not None:
            self.counts = list(counts)
            self._logs = [self._log_factor(c) for c in CONCENTRATIONS]
            self._look()

    def add(self, arm: int) -> None:
        """Counts a key of the arm with the index `arm`."""
        share, before = self.shares[arm], sum(self.counts)
        if share:
            for i, c in enumerate(CONCENTRATIONS):
                predicted = (c * share + self.counts[arm]) / (c + before)
                self._logs[i] += math.log(predicted / share)
        self.counts[arm] += 1
        self._look()

    @property
    def log_bayes_factor(self) -> float:
        """Log of the evidence against the weights; infinite if an arm of weight 0 has a key."""
        if any(n and not share for n, share in zip(self.counts, self.shares, strict=True)):
            return math.inf
        return log_mean_exp(self._logs)

    def _look(self) -> None:
        self.p_value = min(self.p_value, math.exp(-max(0.0, self.log_bayes_factor)))

    def _log_factor(self, concentration: float) -> float:
        """Log of the Bayes factor of one prior, from the counts alone."""
        log = math.lgamma(concentration) - math.lgamma(concentration + sum(self.counts))
        for share, n in zip(self.shares, self.counts, strict=True):
            if share:
                prior = concentration * share
                log += math.lgamma(prior + n) - math.lgamma(prior) - n * math.log(share)
        return log
