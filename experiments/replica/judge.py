"""Verdicts from sums: which guardrails are breached, and which are cleared.

Breaches share alpha: with m pairs of guardrail and arm, each pair may raise a false alarm with a
chance of alpha / m, so that the chance of any false alarm is at most alpha. Clearing an arm needs
all its guardrails, so an arm is wrongly cleared only if a guardrail that it fails is: each
guardrail has the whole alpha.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from kvpolicy.experiments.definition.experiment import Experiment, Metric
from kvpolicy.experiments.definition.metrics import Role
from kvpolicy.experiments.replica.arm_record import ArmRecord
from kvpolicy.experiments.replica.verdict import Outcome, Verdict
from kvpolicy.experiments.replica.windows import Windows
from kvpolicy.experiments.statistics.bounded_mean import BoundedMean
from kvpolicy.experiments.statistics.difference import PairedDifference


def breach_threshold(experiment: Experiment) -> float:
    """Log of the evidence at which a guardrail is breached: log(m / alpha)."""
    guardrails = sum(metric.role == "guardrail" for metric in experiment.metrics)
    arms = sum(arm.weight > 0 for arm in experiment.arms[1:])
    return math.log(max(1, guardrails * arms) / experiment.analysis.alpha)


def clear_threshold(experiment: Experiment) -> float:
    """Log of the evidence at which a guardrail is cleared: log(1 / alpha)."""
    return -math.log(experiment.analysis.alpha)


def judge(
    experiment: Experiment, records: Mapping[str, ArmRecord], windows: Windows
) -> list[Verdict]:
    """A verdict for each metric and arm of a weight above 0, in the order of the file.

    Control has verdicts only on metrics that are compared with a margin, and, with
    `design: request`, on latencies.
    """
    case = _Case(experiment, records, windows)
    verdicts = [
        case.verdict(metric, arm.name)
        for metric in experiment.metrics
        for arm in experiment.arms
        if arm.weight > 0
    ]
    return [verdict for verdict in verdicts if verdict is not None]


class _Case:
    """What was seen of an experiment, and the rules by which it is judged."""

    def __init__(
        self, experiment: Experiment, records: Mapping[str, ArmRecord], windows: Windows
    ) -> None:
        self.experiment = experiment
        self.records = records
        self.windows = windows

    def verdict(self, metric: Metric, arm: str) -> Verdict | None:
        """The verdict on an arm; None for control on a metric that is compared with control."""
        name, record = metric.metric, self.records[arm]
        if name in record.means:
            role: Role = "info" if arm == self.experiment.control.name else metric.role
            return self._judged(metric, role, arm, record.means[name])
        if arm == self.experiment.control.name:
            return None
        if name in record.differences:
            return self._judged(metric, metric.role, arm, record.differences[name])
        if name in self.windows.differences:
            return self._judged(metric, metric.role, arm, self.windows.differences[name][arm])
        return self._unbounded(metric, arm)

    def _judged(
        self, metric: Metric, role: Role, arm: str, seen: BoundedMean | PairedDifference
    ) -> Verdict:
        """The verdict on values with a bound."""
        guardrail = role == "guardrail"
        below = seen.log_e_below if seen.margin is not None else None
        above = seen.log_e_above if guardrail else None
        low, high = seen.interval(self.experiment.analysis.alpha)
        outcome = self._outcome(above, below, self._requests(metric, arm, seen.n))
        absolute = isinstance(seen, BoundedMean)
        return Verdict(
            metric.metric, role, arm, seen.n, seen.mean,
            low, high, above, below, seen.margin, outcome, absolute,
        )  # fmt: skip

    def _requests(self, metric: Metric, arm: str, n: int) -> int:
        """The number held against `min_samples`: of requests if the values are windows, else n."""
        if metric.metric not in self.windows.differences or not n:
            return n
        control = self.experiment.control.name
        return min(self.records[name].finished for name in (arm, control))

    def _unbounded(self, metric: Metric, arm: str) -> Verdict:
        """The verdict on values without a bound: the difference of the means, without interval."""
        mine, control = (
            self.records[name].tallies[metric.metric]
            for name in (arm, self.experiment.control.name)
        )
        value = None
        if mine.mean is not None and control.mean is not None:
            value = mine.mean - control.mean
        return Verdict(
            metric.metric, metric.role, arm, min(mine.n, control.n), value,
            None, None, None, None, None, "undecided", absolute=False,
        )  # fmt: skip

    def _outcome(self, above: float | None, below: float | None, seen: int) -> Outcome:
        if seen < self.experiment.analysis.min_samples:
            return "undecided"
        if above is not None and above >= breach_threshold(self.experiment):
            return "breached"
        if below is not None and below >= clear_threshold(self.experiment):
            return "cleared"
        return "undecided"
