"""The sections of a report on an experiment: titles, sentences, tables and places for charts."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from kvpolicy.experiments.definition.experiment import NO_POLICY, as_document
from kvpolicy.experiments.definition.fmt import format_text
from kvpolicy.experiments.fleet.overview import ArmRow, Overview
from kvpolicy.experiments.replica.scoring import OUTCOMES
from kvpolicy.experiments.replica.verdict import Verdict
from kvpolicy.experiments.reporting import words
from kvpolicy.experiments.reporting.charts import BYTES, NAMES, TIMES
from kvpolicy.experiments.reporting.headline import lacks
from kvpolicy.experiments.reporting.html_table import table
from kvpolicy.experiments.reporting.offline_page import figure
from kvpolicy.experiments.reporting.status import evidence, outcome
from kvpolicy.experiments.statistics.sample_ratio import ALARM

_SIGNS = "circle: cleared, diamond: undecided, cross: breached; dashed: the margin"


class Section(NamedTuple):
    """A part of the page; `body` is HTML, the rest plain text."""

    id: str
    title: str
    body: str


def sections(overview: Overview, charts: Collection[str]) -> list[Section]:
    """The sections in their order.

    Args:
        charts: names of the charts that have rows.
    """
    return [
        Section("sample-ratio", "Sample ratio", _sample_ratio(overview)),
        Section("guardrails", "Guardrails", _guardrails(overview, charts)),
        Section("memory", "Memory saved", _memory(overview, charts)),
        Section("time", "Time", _time(overview, charts)),
        Section("drift", "Drift from full KV", _drift(overview, charts)),
        Section("worst", "Worst requests", _worst(overview)),
        Section("shadow", "Shadow requests", _shadow(overview)),
        Section("changes", "Changes", _changes(overview)),
        Section("file", "The experiment", _file(overview)),
    ]


def _sample_ratio(overview: Overview) -> str:
    if overview.experiment.design is not None:
        return _about("Arms take turns by windows of time: keys have no arm, and no ratio.")
    rows = []
    for stage, ratio in overview.analysis.distinct.ratios.items():
        total = sum(ratio.counts)
        shares = [
            "-" if row.gone else f"{n:,} ({words.percent(n / total)})" if total else "0"
            for row, n in zip(overview.rows, ratio.counts, strict=True)
        ]
        word = "mismatch" if ratio.p_value < ALARM else "as wanted"
        rows.append([stage, *shares, words.probability(ratio.p_value), word])
    wanted = [f"{row.arm}, {_wanted(row)}" for row in overview.rows]
    return _about(
        "Distinct keys, each counted once, at three stages. If their shares are not those of the "
        f"weights, nothing else on this page can be believed; the alarm is at p below {ALARM:g}, "
        "however often one looks."
    ) + table("Distinct keys by stage and arm", ["Stage ", *wanted, "p", "Shares "], rows)


def _wanted(row: ArmRow) -> str:
    return "rolled back" if row.gone else f"{words.percent(row.wanted)} wanted"


def _guardrails(overview: Overview, charts: Collection[str]) -> str:
    if not overview.guardrails:
        return _about("No metric is a guardrail: nothing ends this experiment by itself.")
    head = ["Metric ", "Arm ", "Samples", "Mean", "Interval", "Margin", "Evidence", "Outcome "]
    rows = [
        [
            NAMES[verdict.metric],
            verdict.arm,
            f"{verdict.samples:,}",
            _mean(verdict),
            words.interval(verdict.metric, verdict.low, verdict.high),
            words.measured(verdict.metric, verdict.margin),
            evidence(overview, verdict),
            _decision(overview, verdict),
        ]
        for verdict in overview.guardrails
    ]
    alpha = overview.experiment.analysis.alpha
    text = (
        f"Intervals hold at all moments together, but for a chance of {words.percent(alpha)}. "
        "Beyond the margin a guardrail is breached, within it cleared, as soon as the evidence is "
        "enough. Failed requests are those of the arm minus control's."
    )
    figure = _figure(charts, "guardrails", "Intervals against margins", _SIGNS)
    return _about(text) + figure + table("Guardrails", head, rows)


def _mean(verdict: Verdict) -> str:
    return words.measured(verdict.metric, verdict.mean)


def _decision(overview: Overview, verdict: Verdict) -> str:
    word = outcome(overview, verdict)
    if verdict.arm in overview.rolled_back:
        return f"{word}, the arm is rolled back"
    open_yet = word == "undecided" and not overview.ended
    return f"{word}, lacks {lacks(overview, verdict)}" if open_yet else word


def _memory(overview: Overview, charts: Collection[str]) -> str:
    rows = [
        [row.arm, row.policy, words.percent(row.kept), words.number(row.means[BYTES])]
        for row in overview.rows
    ]
    verdicts = [
        verdict
        for verdict in overview.of_metric(BYTES)
        if verdict.mean is not None and verdict.low is not None
    ]
    sentences = [
        f"<p>{html.escape(verdict.arm)}: {_mean(verdict)} bytes per prompt token compared with "
        f"control, {words.interval(verdict.metric, verdict.low, verdict.high)}; "
        f"{outcome(overview, verdict)}.</p>"
        for verdict in verdicts
    ]
    head = ["Arm ", "Policy ", "Of full KV", "Bytes per prompt token"]
    return (
        _about(
            "KV cache that prompts of finished requests hold after compression: all bytes, as a "
            "share of what full KV takes; and bytes per prompt token, mean over requests, which "
            "short prompts change as much as long ones."
        )
        + _figure(charts, "memory", "KV memory by arm", "percent of full KV")
        + "".join(sentences)
        + table("KV memory by arm", head, rows)
    )


def _time(overview: Overview, charts: Collection[str]) -> str:
    figures = "".join(
        _figure(charts, metric, NAMES[metric].capitalize(), "mean of all finished requests")
        for metric in TIMES
    )
    rows = [
        [row.arm, *(words.number(row.means[metric]) for metric in TIMES)] for row in overview.rows
    ]
    head = ["Arm ", *(f"{NAMES[metric].capitalize()}, s" for metric in TIMES)]
    body = f'<div class="charts">{figures}</div>' + table("Mean times by arm", head, rows)
    if overview.experiment.design is None:
        return (
            '<p class="note"><strong>Not causal.</strong> Arms of one server share its batches, so '
            "a slow arm slows the others too, and a difference between arms says nothing about "
            "their policies. Hold these means against absolute objectives only; "
            "<code>design: switchback</code> compares them.</p>"
        ) + body
    compared = [
        [
            NAMES[verdict.metric],
            verdict.arm,
            f"{verdict.samples:,}",
            _mean(verdict),
            words.interval(verdict.metric, verdict.low, verdict.high),
            _decision(overview, verdict),
        ]
        for verdict in overview.verdicts
        if verdict.metric in TIMES
    ]
    head = ["Metric ", "Arm ", "Windows", "Arm minus control, s", "Interval", "Outcome "]
    text = "Arms take turns by windows of time; each window is one value, its burn-in left out."
    return _about(text) + (table("Times compared", head, compared) if compared else "") + body


def _drift(overview: Overview, charts: Collection[str]) -> str:
    experiment = overview.experiment
    if experiment.shadow is None:
        return _about("Nothing is scored again: the experiment has no shadow.")
    control = experiment.control
    floor = (
        "Control has full KV on both sides: what it shows is noise "
        "of kernels, and the floor for every other arm."
        if control.policy == NO_POLICY
        else f"Control serves {html.escape(control.policy)}: its drift is what that policy loses."
    )
    figures = "".join(
        _figure(charts, metric, title, "square: control; dashed: the margin")
        for metric, title in (
            ("drift", "Drift by arm"),
            ("top1_disagreement", "Tokens with another top candidate, by arm"),
        )
    )
    rows = [
        [
            row.arm,
            f"{row.shadowed:,}",
            f"{row.shadowed_tokens:,}",
            *(
                text
                for metric in ("drift", "top1_disagreement")
                for text in (
                    words.measured(metric, row.means[metric]),
                    _bounds(overview, metric, row.arm),
                )
            ),
        ]
        for row in overview.rows
    ]
    head = [
        "Arm ",
        "Requests",
        "Tokens",
        "Drift, nats",
        "Interval",
        "Other top candidate",
        "Interval",
    ]
    return (
        '<p class="about">Sampled requests are scored again with full KV: KL(policy || full) on '
        f"the tokens that were generated, in nats per token. {floor}</p>"
        f'<div class="charts">{figures}</div>' + table("Drift by arm", head, rows)
    )


def _bounds(overview: Overview, metric: str, arm: str) -> str:
    for verdict in overview.of_metric(metric):
        if verdict.arm == arm:
            return words.interval(metric, verdict.low, verdict.high)
    return "-"


def _worst(overview: Overview) -> str:
    several = len(overview.answers) > 1
    rows = [
        [
            f"{request['number']}",
            *([name] if several else []),
            str(request["arm"]),
            words.number(request["drift"]),
            f"{request['tokens']:,}",
        ]
        for name, request in overview.worst
    ]
    if not rows:
        return _about("No request has been scored again yet.")
    head = ["Number", *(["Replica "] if several else []), "Arm ", "Drift, nats", "Tokens"]
    text = (
        "The scored requests with the largest drift. The number counts the scored requests of a "
        "server; no text is kept of them."
    )
    return _about(text) + table("Worst requests", head, rows)


def _shadow(overview: Overview) -> str:
    if overview.experiment.shadow is None:
        return _about("Nothing is scored again: the experiment has no shadow.")
    rows = [
        [
            row.arm,
            words.percent(None if row.compared is None else row.compared.requests),
            words.percent(None if row.compared is None else row.compared.tokens),
            *(f"{overview.shadow[row.arm][name]:,}" for name in OUTCOMES),
        ]
        for row in overview.rows
    ]
    head = ["Arm ", "Requests compared", "Tokens compared"]
    head += [name.replace("_", " ").capitalize() for name in OUTCOMES]
    text = (
        "What became of the requests that were sampled to be scored again. Where few are compared, "
        "as long ones are not, the drift on this page is not that of what is served."
    )
    return _about(text) + table("Shadow requests by outcome", head, rows)


def _changes(overview: Overview) -> str:
    several = len(overview.answers) > 1
    rows = [[time, *([name] if several else []), what] for time, name, what in overview.log]
    head = ["Time ", *(["Replica "] if several else []), "What "]
    return table("Changes of the experiment", head, rows)


def _file(overview: Overview) -> str:
    text = format_text(json.dumps(as_document(overview.experiment), ensure_ascii=False))
    return (
        '<pre tabindex="0" role="region" aria-label="The experiment as YAML"><code>'
        f"{html.escape(text)}</code></pre>"
    )


def _about(text: str) -> str:
    return f'<p class="about">{prose(text)}</p>'


def prose(text: str) -> str:
    """A sentence as HTML, with text in backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))


def _figure(charts: Collection[str], name: str, title: str, small: str) -> str:
    return figure(name, title, small) if name in charts else ""


def facts(overview: Overview) -> Sequence[tuple[str, str]]:
    """The names and values below the verdict."""
    experiment = overview.experiment
    coverage = ", ".join(
        words.percent(share) + (f" at {names}" if len(overview.values("coverage")) > 1 else "")
        for share, names in overview.values("coverage")
    )
    arms = ", ".join(
        f"{row.arm} ({row.policy}) {'gone' if row.gone else words.percent(row.wanted)}"
        for row in overview.rows
    )
    requests = sum(row.requests for row in overview.rows)
    design = experiment.design
    lines = [
        ("Arms", arms),
        ("Coverage", f"{coverage} of the keys"),
        ("Design", "request" if design is None else "switchback"),
        ("Requests", f"{requests:,} assigned"),
        (
            "Running for",
            words.duration(max(seconds for seconds, _ in overview.values("elapsed_seconds"))),
        ),
        ("Revision", experiment.revision),
        ("Replicas", ", ".join(answer.name for answer in overview.answers)),
    ]
    return lines
