"""Checks of an evaluation before its figures are published, and remarks to publish with them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvpolicy.evaluation.records import FULL, Record
from kvpolicy.evaluation.reporting.results import Results
from kvpolicy.evaluation.reporting.statistics import Estimate, newcombe, of_share

NEAR = 0.02
"""How far what is kept may be from the budget without being mentioned."""
SELDOM = 3.29 / 1.96
"""By how much a 99.9 % interval is wider than one of 95 %."""
_CELL = re.compile(r"\s*(\d+) \((\d+)-(\d+)\)\s*")
_NAME = re.compile(r"`([\w-]+)`")


class Doubtful(Exception):
    """The figures must not be published; one sentence says why."""


def stated(model: Path, length: int) -> dict[str, Estimate]:
    """Accuracy by task that the model's MODEL.md states for a prompt length; empty without one."""
    path = model / "MODEL.md"
    found: dict[str, Estimate] = {}
    column = None
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            column = None
        elif cells[0] == "task":
            column = cells.index(f"{length}") if f"{length}" in cells else None
        elif column is not None and (name := _NAME.search(cells[0])):
            if cell := _CELL.fullmatch(cells[column]):
                found[name[1]] = Estimate(*(int(figure) / 100 for figure in cell.groups()))
    return found


def exact(records: Iterable[Record], task: str, length: int) -> Estimate | None:
    """Share of first questions that full KV answers without a fault; None if none was asked."""
    scores = [
        record.score
        for record in records
        if (record.policy, record.task, record.length) == (FULL, task, length) and not record.turn
    ]
    return (
        of_share(sum(score == 1 for score in scores) / len(scores), len(scores)) if scores else None
    )


def check_full_kv(results: Results, model: Path) -> list[str]:
    """Compares full KV with the model's card; returns a line per task and length.

    Accuracy may exceed the card's, which may also require that an answer ends in time.

    Raises:
        Doubtful: accuracy is below the card's, beyond a 99.9 % interval.
    """
    lines = []
    for length in results.lengths:
        card = stated(model, length)
        for task in results.tasks:
            found = exact(results.records, task, length)
            if task not in card or found is None:
                continue
            apart = newcombe(found, card[task], 0)
            figures = f"{percent(found)} here, {percent(card[task])} in MODEL.md"
            if apart.mean + SELDOM * (apart.high - apart.mean) < 0:
                raise Doubtful(f"full KV answers less of {task} at {length} tokens: {figures}")
            said = ", where more is asked of an answer" if apart.low > 0 else ""
            lines.append(f"full KV, `{task}` at {length} tokens: {figures}{said}")
    return lines


def check_complete(folder: Path, results: Results) -> None:
    """Checks that every question of the plan has an answer.

    Raises:
        Doubtful: some have no answer.
    """
    failed = folder / "errors.jsonl"
    asked = [(p["policy"], p["budget"]) for p in results.plan["policies"]]
    questions: dict[tuple, set] = {series: set() for series in asked}
    for record in results.records:
        questions[record.policy, record.budget].add(record.question)
    every = set().union(*questions.values())
    least = len(results.tasks) * len(results.lengths) * results.plan["samples"]
    short = [series for series in asked if questions[series] != every or len(every) < least]
    if short:
        policy, budget = short[0]
        why = ""
        if failed.exists() and failed.stat().st_size:
            first = json.loads(failed.read_text(encoding="utf-8").partition("\n")[0])
            why = f"; the first of {failed}: {first.get('error', first)}"
        raise Doubtful(
            f"{len(short)} of {len(asked)} policies lack answers, {policy} at {budget} first{why}"
        )


def off_budget(records: Sequence[Record]) -> dict[tuple[str, float], float]:
    """(Policy, budget) -> mean share kept, where it is more than NEAR off the budget."""
    kept: dict[tuple[str, float], list[float]] = {}
    for record in records:
        if record.budget is not None and record.kept is not None and not record.uncompressed:
            kept.setdefault((record.policy, record.budget), []).append(record.kept)
    means = {series: sum(found) / len(found) for series, found in kept.items()}
    return {series: mean for series, mean in means.items() if abs(mean - series[1]) > NEAR}


def in_full(records: Sequence[Record]) -> dict[str, tuple[int, int, str]]:
    """Policy -> (questions served with full KV, questions asked, commonest reason), if any."""
    asked: dict[str, list[str | None]] = {}
    for record in records:
        if record.policy != FULL:
            asked.setdefault(record.policy, []).append(record.uncompressed)
    found = {}
    for policy, reasons in asked.items():
        given = [reason for reason in reasons if reason]
        if given:
            commonest = max(set(given), key=given.count)
            found[policy] = (len(given), len(reasons), commonest)
    return found


def percent(estimate: Estimate) -> str:
    """`97 (92-99)`."""
    return "{:.0f} ({:.0f}-{:.0f})".format(*(100 * figure for figure in estimate[:3]))
