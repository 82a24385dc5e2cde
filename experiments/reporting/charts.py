"""Data of the charts of a report: rows with labels, for `pages/experiment.js`."""

from __future__ import annotations

from typing import Any

from kvpolicy.experiments.definition.metrics import METRICS
from kvpolicy.experiments.fleet.overview import Overview
from kvpolicy.experiments.replica.verdict import Verdict
from kvpolicy.experiments.reporting import words

NAMES = {
    "drift": "drift",
    "top1_disagreement": "other top candidate",
    "error_rate": "failed requests",
    "kv_bytes_per_prompt_token": "KV memory",
    "ttft_seconds": "time to the first token",
    "e2e_seconds": "time to the last token",
}
BYTES = "kv_bytes_per_prompt_token"
TIMES = ("ttft_seconds", "e2e_seconds")
_FEWEST, _MOST = -2.0, 4.0  # widest range of the chart of guardrails, in margins


def charts(overview: Overview) -> dict[str, dict[str, Any]]:
    """The charts that have rows, by name."""
    drawn = {
        "guardrails": _guardrails(overview),
        "memory": _memory(overview),
        **{metric: _times(overview, metric) for metric in TIMES},
        **{metric: _by_arm(overview, metric) for metric in ("drift", "top1_disagreement")},
    }
    return {name: chart for name, chart in drawn.items() if chart["rows"]}


def _guardrails(overview: Overview) -> dict[str, Any]:
    rows = [
        _interval(f"{NAMES[verdict.metric]}, {verdict.arm}", verdict, 1 / verdict.margin)
        for verdict in overview.guardrails
        if verdict.margin and verdict.low is not None and verdict.high is not None
    ]
    return {
        "kind": "intervals",
        "rows": rows,
        "low": max(_FEWEST, min([0.0, *(row["low"] for row in rows)])),
        "high": min(_MOST, max([1.5, *(row["high"] for row in rows)])),
        "label": "in margins: 0 is nothing lost, 1 is the margin",
        "lines": [{"at": 0, "margin": False}, {"at": 1, "margin": True}],
    }


def _by_arm(overview: Overview, metric: str) -> dict[str, Any]:
    """A metric of shadow requests in every arm, control included."""
    verdicts = overview.of_metric(metric)
    size = 100.0 if METRICS[metric].is_share else 1.0
    rows = [_interval(verdict.arm, verdict, size) for verdict in verdicts]
    control = overview.experiment.control.name
    for row, verdict in zip(rows, verdicts, strict=True):
        if verdict.arm == control:
            row["outcome"] = "control"
    margins = [size * verdict.margin for verdict in verdicts if verdict.margin is not None]
    means = [row["mean"] for row in rows if row["mean"] is not None]
    # Wide enough for means and margin; intervals of few samples are far wider.
    needed = max([1.2 * margin for margin in margins] + [1.5 * mean for mean in means], default=0.0)
    widest = max((row["high"] for row in rows), default=1.0)
    return {
        "kind": "intervals",
        "rows": rows,
        "low": 0,
        "high": max(needed, min(widest, 2 * needed)) or widest,
        "label": "percent of tokens" if size > 1 else METRICS[metric].unit,
        "lines": [{"at": margin, "margin": True} for margin in margins[:1]],
    }


def _interval(label: str, verdict: Verdict, size: float) -> dict[str, Any]:
    """A mean with its bounds.

    Args:
        size: factor that turns values into units of the chart.
    """
    assert verdict.low is not None
    assert verdict.high is not None
    mean = words.measured(verdict.metric, verdict.mean)
    bounds = words.interval(verdict.metric, verdict.low, verdict.high)
    return {
        "key": f"{verdict.metric}/{verdict.arm}",
        "label": f"{label}: {mean} ({bounds})",
        "low": size * verdict.low,
        "mean": None if verdict.mean is None else size * verdict.mean,
        "high": size * verdict.high,
        "outcome": verdict.outcome,
        "about": f"{label}\n{mean} ({bounds})\n{words.count(verdict.samples, 'sample')}",
    }


def _memory(overview: Overview) -> dict[str, Any]:
    rows = [
        _bar(number, row.arm, f"{row.arm}: {words.percent(row.kept)}", 100 * row.kept)
        for number, row in enumerate(overview.rows)
        if row.kept is not None
    ]
    return {"kind": "bars", "rows": rows, "label": "percent of full KV", "aside": False}


def _times(overview: Overview, metric: str) -> dict[str, Any]:
    control = overview.rows[0].means[metric]
    # Times of arms that share batches say nothing about their policies.
    aside = overview.experiment.design is None
    rows = []
    for number, row in enumerate(overview.rows):
        value = row.means[metric]
        if value is not None:
            less = f", {change(value / control)}" if number and control and not aside else ""
            rows.append(_bar(number, row.arm, f"{row.arm}: {words.number(value)}{less}", value))
    return {"kind": "bars", "rows": rows, "label": "seconds, mean", "aside": aside}


def _bar(number: int, arm: str, label: str, value: float) -> dict[str, Any]:
    return {"key": arm, "label": label, "value": value, "control": number == 0}


def change(ratio: float) -> str:
    """An arm's value divided by control's, in words: `50 % less`."""
    if abs(ratio - 1) < 0.0005:
        return "as control"
    share = words.percent(abs(ratio - 1))
    return f"{share} {'less' if ratio < 1 else 'more'} than control"
