"""Whether an arm may get all requests: what speaks against it in what was seen."""

from __future__ import annotations

from collections.abc import Mapping

from kvpolicy.experiments.replica.analysis import Analysis


def incomparable(analysis: Analysis, rolled_back: Mapping[str, str], arm: str) -> str | None:
    """Why nothing that was seen can speak for an arm; None if it can.

    Args:
        rolled_back: arms that are rolled back -> why.
    """
    if arm in rolled_back:
        return f"arm `{arm}` was rolled back: {rolled_back[arm]}"
    for alarm in analysis.alarms():
        if alarm.untrue or alarm.one_sided:
            return f"arms cannot be compared: {alarm}"
    return None


def not_cleared(analysis: Analysis, arm: str) -> str | None:
    """Which guardrails of an arm are not cleared; None if all are.

    An arm that gets no requests has no verdicts, so none of its guardrails is.
    """
    cleared = {
        verdict.metric
        for verdict in analysis.verdicts()
        if verdict.arm == arm and verdict.outcome == "cleared"
    }
    left = [
        metric.metric
        for metric in analysis.experiment.metrics
        if metric.role == "guardrail" and metric.metric not in cleared
    ]
    return f"arm `{arm}` is not cleared of {', '.join(left)} yet" if left else None
