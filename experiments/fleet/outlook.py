"""How many samples a guardrail lacks until it is decided, if values go on as they did."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvpolicy.experiments.replica.analysis import Analysis
from kvpolicy.experiments.replica.judge import breach_threshold, clear_threshold
from kvpolicy.experiments.replica.verdict import Verdict
from kvpolicy.experiments.statistics.bounded_mean import BoundedMean, log_mean_exp

_FEWEST = 20  # samples needed for a forecast
_FARTHEST = 1e6  # largest forecast, as a multiple of the present number of samples


@dataclass(frozen=True)
class Outlook:
    """Forecast of a guardrail's decision.

    Attributes:
        outcome: the decision that the evidence grows towards.
        missing: approximate number of samples until then.
    """

    outcome: Literal["breached", "cleared"]
    missing: int


def outlook(analysis: Analysis, verdict: Verdict) -> Outlook | None:
    """Forecast of an undecided guardrail's decision; None if it is decided, or none is possible.

    The log-capital of each bet is assumed to grow in proportion to the samples. Values may change,
    and no failure so far says little about the next one.
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
    if not by_window(analysis, verdict):  # for windows `min_samples` counts requests
        missing = max(missing, experiment.analysis.min_samples - verdict.samples)
    return Outlook("cleared" if clear <= breach else "breached", missing)


def by_window(analysis: Analysis, verdict: Verdict) -> bool:
    """Whether the samples of a verdict are windows of a switchback."""
    return verdict.metric in analysis.windows.differences


def _statistics(analysis: Analysis, verdict: Verdict) -> BoundedMean:
    """The statistics that a guardrail is judged by."""
    record = analysis.records[verdict.arm]
    if verdict.absolute:
        return record.means[verdict.metric]
    if by_window(analysis, verdict):
        return analysis.windows.differences[verdict.metric][verdict.arm].shifted
    return record.differences[verdict.metric].shifted


def _times(logs: Sequence[float], threshold: float) -> float:
    """Multiple of the present samples at which the evidence reaches a threshold; inf for never.

    Args:
        logs: log of the capital of each bet, assumed to grow in proportion to the samples.
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
