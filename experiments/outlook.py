"""How many samples are missing before a guardrail is decided, if values go on as they did."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvpolicy.experiments.analysis import Analysis
from kvpolicy.experiments.bounded_mean import BoundedMean, log_mean_exp
from kvpolicy.experiments.judge import breach_threshold, clear_threshold
from kvpolicy.experiments.verdict import Verdict

_FEWEST = 20  # samples from which something is foretold
_FARTHEST = 1e6  # times the samples there are: beyond it nothing is foretold


@dataclass(frozen=True)
class Outlook:
    """What a guardrail is coming to.

    Attributes:
        outcome: the decision that the evidence grows towards.
        missing: samples until then, about.
    """

    outcome: Literal["breached", "cleared"]
    missing: int


def outlook(analysis: Analysis, verdict: Verdict) -> Outlook | None:
    """What an undecided guardrail is coming to; None if it is decided, or not to be told yet.

    The evidence of as many samples again is taken to be as much again. It is no promise: values
    change, and a share of 0 failures says little of the next one.
    """
    if verdict.outcome != "undecided" or verdict.samples < _FEWEST:
        return None
    experiment, seen = analysis.experiment, _statistics(analysis, verdict)
    clear = _times(seen.below, clear_threshold(experiment))
    breach = _times(seen.above, breach_threshold(experiment))
    times = min(clear, breach)
    if times > _FARTHEST:
        return None
    missing = max(math.ceil(verdict.samples * (times - 1)), 1)
    if not by_window(analysis, verdict):  # there it is the requests of windows that count
        missing = max(missing, experiment.analysis.min_samples - verdict.samples)
    return Outlook("cleared" if clear <= breach else "breached", missing)


def by_window(analysis: Analysis, verdict: Verdict) -> bool:
    """Whether the samples of a verdict are windows of a switchback."""
    return verdict.metric in analysis.windows.differences


def _statistics(analysis: Analysis, verdict: Verdict) -> BoundedMean:
    """The sums that a guardrail is judged by."""
    record = analysis.records[verdict.arm]
    if verdict.absolute:
        return record.means[verdict.metric]
    if by_window(analysis, verdict):
        return analysis.windows.differences[verdict.metric][verdict.arm].shifted
    return record.differences[verdict.metric].shifted


def _times(logs: Sequence[float], threshold: float) -> float:
    """How many times the samples there are take evidence to a threshold; infinite for never.

    Args:
        logs: of the capital of each bet, which grows with the samples.
    """
    if log_mean_exp(logs) >= threshold:
        return 1.0
    low, high = 1.0, 2.0
    while log_mean_exp(high * log for log in logs) < threshold:
        low, high = high, 2 * high
        if low > _FARTHEST:
            return math.inf
    while high - low > 1e-3 * low:
        middle = (low + high) / 2
        if log_mean_exp(middle * log for log in logs) < threshold:
            low = middle
        else:
            high = middle
    return high
