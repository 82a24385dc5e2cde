"""The tables of docs/results/quality.md."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from kvpolicy.evaluation.records import FULL, Record
from kvpolicy.evaluation.reporting.statistics import Estimate, mean_score
from kvpolicy.evaluation.reporting.summary import Summary
from kvpolicy.evaluation.reporting.summary_text import UNKNOWN, name, percent, scored, signed, table

from quality_parts.checks import in_full, off_budget
from quality_parts.orderings import Finding, Scores, Verdict, by_task, difference

TREE, EVICTED, COPY = "multiturn", "multiturn-evicted", "multiturn-copy"
TURNS = (TREE, EVICTED, COPY)
NEARLY = 0.05


def accuracy(summary: Summary) -> str:
    """A table for each budget, and one for policies without a budget."""
    series = summary.results.series
    budgets = sorted({b for _, b in series if b is not None}, reverse=True)
    parts = []
    for budget in (*budgets, None):
        chosen = [s for s in series if s[1] == budget and s[0] != FULL]
        if chosen:
            full = [s for s in series if s[0] == FULL]
            title = "Policies without a budget" if budget is None else f"{percent(budget)} kept"
            parts.append(f"### {title}\n\n{_accuracy(summary, [*full, *chosen])}")
    return "\n\n".join(parts)


def _accuracy(summary: Summary, series: Sequence[tuple[str, float | None]]) -> str:
    tasks = list(summary.results.tasks)
    rows = []
    for each in series:
        total = summary.row(each)
        cells = [scored(summary.row(each, task)) for task in tasks]
        label = name((each[0], None))
        shares = [percent(total.kept), percent(total.held)]
        rows.append([label, *shares, *cells, scored(total), signed(total.difference)])
    return table(["policy", "kept", "held", *tasks, "mean", "less full KV"], rows)


def second_turns(records: Sequence[Record]) -> str:
    """Accuracy of the second question, by the KV cache that it finds."""
    later = Scores(record for record in records if record.task in TURNS and record.turn > 0)
    first = Scores(record for record in records if record.task == TREE and record.turn == 0)
    rows = [
        [
            name(series),
            _mean(first, series, TREE),
            *(_mean(later, series, task) for task in TURNS),
            signed(_between(later, series, COPY, TREE)),
        ]
        for series in sorted(later.scores, key=lambda s: (s[0] != FULL, s[0], -(s[1] or 0)))
    ]
    head = ["policy", "first question", "full KV in the tree", "evicted", "in the compressed copy",
            "copy less tree"]  # fmt: skip
    return table(head, rows)


def _mean(scores: Scores, series: tuple[str, float | None], task: str) -> str:
    found = {s: v for s, v in scores.scores.get(series, {}).items() if s[0] == task}
    if not found:
        return UNKNOWN
    mean, low, high = (
        100 * v for v in mean_score(by_task(list(found), _array(list(found.values()))))
    )
    return f"{mean:.0f} ({low:.0f} to {high:.0f})"


def _between(
    scores: Scores, series: tuple[str, float | None], one: str, other: str
) -> Estimate | None:
    """Paired difference of two tasks that ask the same questions."""
    found = scores.scores[series]
    pairs = [(s, (other, *s[1:])) for s in found if s[0] == one and (other, *s[1:]) in found]
    if not pairs:
        return None
    left, right = (_array([found[pair[i]] for pair in pairs]) for i in (0, 1))
    return difference([s for s, _ in pairs], left, right)


def _array(values: Sequence[float]):
    import numpy as np

    return np.array(values)


def orderings(findings: Sequence[Finding]) -> str:
    """Orderings that papers report, with the differences found here."""
    parts = []
    for ordering, group in groupby(findings, key=lambda f: f.ordering):
        found = list(group)
        budgets = sorted({b for f in found for b in f.by_budget}, reverse=True)
        head = ["pair", *(f"at {percent(b)}" for b in budgets), "all of them", "", ""]
        rows = [
            [
                f"{f.better} / {f.worse}",
                *(signed(f.by_budget.get(b)) for b in budgets),
                signed(f.pooled),
                str(f.verdict),
                reason(f),
            ]
            for f in found
        ]
        counted = ", ".join(found[0].tasks) or "none that the model can do"
        kind = "better" if ordering.strict else "at least equal"
        about = f"{ordering.source}. Claimed: {kind}. Tasks: {counted}."
        parts.append(f"### {ordering.claim}\n\n{about}\n\n{table(head, rows)}")
    return "\n\n".join(parts)


def reason(finding: Finding) -> str:
    """The accuracies of a pair, and what they explain of the verdict."""
    one, other = finding.levels
    said = f"{100 * one:.0f} and {100 * other:.0f} of full KV's {100 * finding.full:.0f}"
    if min(one, other) > finding.full - NEARLY and finding.verdict is not Verdict.HOLDS:
        return f"{said}: both answer nearly as full KV, so nothing is left to tell apart"
    if max(one, other) < NEARLY:
        return f"{said}: both lose nearly everything"
    if finding.verdict is Verdict.FAILS and finding.pooled.high < 0:
        return f"{said}: the other way round"
    return said


def verdicts(findings: Sequence[Finding]) -> str:
    """A line per claim: its number of pairs by verdict."""
    rows = []
    for ordering, group in groupby(findings, key=lambda f: f.ordering):
        found = [f.verdict for f in group]
        counts = [f"{found.count(v)}" for v in Verdict]
        rows.append([ordering.claim, f"{len(found)}", *counts])
    return table(["reported", "pairs", *map(str, Verdict)], rows)


def remarks(records: Sequence[Record]) -> str:
    """List of policies off their budget, and of those that served questions with full KV."""
    lines = [
        f"* `{policy}` kept {100 * kept:.1f} % where {percent(budget)} was asked"
        for (policy, budget), kept in off_budget(records).items()
    ]
    for policy, (count, asked, why) in in_full(records).items():
        which = "all" if count == asked else f"{count} of {asked}"
        lines.append(f"* `{policy}` served {which} questions in full when they began (`{why}`)")
    return "\n".join(lines) or "* every policy kept its budget, within two points, of every prompt"
