"""The figures of a run: a row per policy, budget, task and length, with totals over both."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from kvpolicy.evaluation.questions.catalog import contexts_of
from kvpolicy.evaluation.records import FULL, Record
from kvpolicy.evaluation.reporting.cells import FIGURES, Cell, both, cell, figure, reasons
from kvpolicy.evaluation.reporting.results import Results, Series
from kvpolicy.evaluation.reporting.statistics import (
    Contexts,
    Estimate,
    Spread,
    mean_score,
    paired_difference,
    quartiles,
)


class Turns(StrEnum):
    """The questions of the samples that a row counts."""

    ALL = "all"
    FIRST = "first"
    LATER = "later"


@dataclass(frozen=True)
class SummaryRow:
    """The figures of one policy and budget; None where not known.

    Attributes:
        policy, budget: as in `Record`.
        task, length: None for all.
        turns: the questions that are counted.
        asked, answered: number of questions in the plan, and number with an answer.
        score: mean score, 0 to 1; each task and length has the same weight.
        difference: `score` minus that of full KV, over the questions that both answered.
        paired: number of these questions.
        kept, held, kv_bytes, output_tokens: means over all answers, as in `Record`.
        ttft, tpot: seconds, over all answers.
        in_full: reason -> number of prompts served in full although a policy was asked for.
    """

    policy: str
    budget: float | None
    task: str | None
    length: int | None
    turns: Turns
    asked: int
    answered: int
    score: Estimate | None
    difference: Estimate | None
    paired: int
    kept: float | None
    held: float | None
    kv_bytes: float | None
    ttft: Spread | None
    tpot: Spread | None
    output_tokens: float | None
    in_full: dict[str, int]

    @property
    def series(self) -> Series:
        return (self.policy, self.budget)

    @property
    def complete(self) -> bool:
        return self.answered >= self.asked


class Summary:
    """All rows of a run.

    Attributes:
        results: the run.
        rows: (series, task, length, turns) -> row.
    """

    def __init__(self, results: Results) -> None:
        self.results = results
        by_place: dict[tuple, list[Record]] = {}
        for record in results.records:
            place = (record.policy, record.budget, record.task, record.length)
            by_place.setdefault(place, []).append(record)
        self._full = next((s for s in results.series if s[0] == FULL), None)
        self._cells = {
            (*place, turns): part
            for place, records in by_place.items()
            for turns, part in _parts(cell(records))
        }
        self.rows = {self._key(row): row for row in self._rows()}

    @staticmethod
    def _key(row: SummaryRow) -> tuple:
        return (row.series, row.task, row.length, row.turns)

    def row(
        self, series: Series, task: str | None = None, length: int | None = None,
        turns: Turns = Turns.ALL,
    ) -> SummaryRow:  # fmt: skip
        """The row of a series; None for all tasks or lengths.

        If the plan has a single length, the row of all lengths is that of the length.
        """
        if length is not None and len(self.results.lengths) == 1:
            length = None
        return self.rows[series, task, length, turns]

    def prominent(self, most: int) -> list[str]:
        """The `most` policies with the best mean scores, best first; without full KV.

        Policies without a budget come last, since most of them keep nearly everything.
        """
        scores: dict[str, list[float]] = {}
        for series in self.results.series:
            score = self.row(series).score
            if series[0] != FULL and score is not None:
                scores.setdefault(series[0], []).append(score.mean)
        budgeted = {policy for policy, budget in self.results.series if budget is not None}
        return sorted(scores, key=lambda p: (p not in budgeted, -float(np.mean(scores[p]))))[:most]

    def telling_budget(self) -> float | None:
        """The budget at which the policies' scores differ most; None without budgets."""
        scores: dict[float, list[float]] = {}
        for series in self.results.series:
            score = self.row(series).score
            if series[1] is not None and score is not None:
                scores.setdefault(series[1], []).append(score.mean)
        return max(scores, key=lambda b: (float(np.std(scores[b])), b), default=None)

    def _rows(self) -> Iterable[SummaryRow]:
        tasks: list[str | None] = [*self.results.tasks]
        lengths: list[int | None] = [*self.results.lengths]
        for series in self.results.series:
            for task in [None, *tasks] if len(tasks) != 1 else [None, tasks[0]]:
                for length in [None, *lengths] if len(lengths) > 1 else [None]:
                    yield self._row(series, task, length, Turns.ALL)
            for task in self.results.conversations():
                for turns in (Turns.FIRST, Turns.LATER):
                    for length in [None, *lengths] if len(lengths) > 1 else [None]:
                        yield self._row(series, task, length, turns)

    def _row(
        self, series: Series, task: str | None, length: int | None, turns: Turns
    ) -> SummaryRow:
        places = [
            (t, n)
            for t in ([task] if task else self.results.tasks)
            for n in ([length] if length else self.results.lengths)
        ]
        keys = [(*series, *place, turns) for place in places]
        cells = [self._cells[key] for key in keys if key in self._cells]
        contexts = [_contexts(key, self._cells[key]) for key in keys if key in self._cells]
        units = [answers.units for answers in cells]
        score = mean_score(units, contexts=contexts) if cells else None
        difference, paired = self._difference(series, places, turns)
        mean = {name: _mean(figure(cells, name)) for name in FIGURES}
        times = {name: figure(cells, name) for name in ("ttft", "tpot")}
        return SummaryRow(
            *series, task, length, turns,
            asked=sum(self._asked(series, place, turns) for place in places),
            answered=sum(map(len, cells)),
            score=score, difference=difference, paired=paired,
            kept=mean["kept"], held=mean["held"], kv_bytes=mean["kv_bytes"],
            ttft=quartiles(times["ttft"]) if len(times["ttft"]) else None,
            tpot=quartiles(times["tpot"]) if len(times["tpot"]) else None,
            output_tokens=mean["output_tokens"], in_full=reasons(cells),
        )  # fmt: skip

    def _asked(self, series: Series, place: tuple[str, int], turns: Turns) -> int:
        samples, questions = self.results.asked(series, *place)
        return {Turns.ALL: questions, Turns.FIRST: samples, Turns.LATER: questions - samples}[turns]

    def _difference(
        self, series: Series, places: Sequence[tuple[str, int]], turns: Turns
    ) -> tuple[Estimate | None, int]:
        """The difference to full KV, and the number of questions that both answered."""
        if self._full is None or series[0] == FULL:
            return None, 0
        policy_units, full_units, contexts, paired = [], [], [], 0
        for place in places:
            keys = (*series, *place, turns), (*self._full, *place, turns)
            if not all(key in self._cells for key in keys):
                continue
            policy_cell, full_cell = both(*(self._cells[key] for key in keys))
            if len(policy_cell):
                paired += len(policy_cell)
                policy_units.append(policy_cell.units)
                full_units.append(full_cell.units)
                contexts.append(_contexts(keys[0], policy_cell))
        if not policy_units:
            return None, 0
        return paired_difference(policy_units, full_units, contexts=contexts), paired


def _contexts(key: tuple, answers: Cell) -> Contexts:
    """The contexts that a cell with this key asks about."""
    _, _, task, length, _ = key
    return Contexts((contexts_of(task), length), answers.samples)


def _parts(answers: Cell) -> Iterator[tuple[Turns, Cell]]:
    """All answers; with several turns also those of the first, and those of the later turns."""
    yield Turns.ALL, answers
    if answers.turn.any():
        for turns in (Turns.FIRST, Turns.LATER):
            part = answers.where((answers.turn == 0) == (turns is Turns.FIRST))
            if len(part):
                yield turns, part


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None


COSTS: dict[str, Callable[[SummaryRow], float | None]] = {
    "kv_bytes": lambda row: row.kv_bytes,
    "ttft": lambda row: row.ttft and row.ttft.median,
    "tpot": lambda row: row.tpot and row.tpot.median,
}
"""What a score is set against: bytes, seconds, seconds."""


def point(row: SummaryRow, cost: str) -> tuple[float, float] | None:
    """Cost and mean score of a row; None if either is not known."""
    amount = COSTS[cost](row)
    return None if row.score is None or amount is None else (amount, row.score.mean)


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points (cost, score) on the Pareto front, equal points included.

    No other point costs at most as much and scores at least as much, unless it is equal.
    """
    best: list[int] = []
    for i in sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1])):
        if not best or points[i][1] > points[best[-1]][1] or points[i] == points[best[-1]]:
            best.append(i)
    return sorted(best)


ALIKE = 1.03  # largest ratio of costs that count as nearly the same


def named(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points of the front to name, by cost: the best of those that cost alike."""
    best = sorted(front(points), key=lambda i: points[i])
    nexts = [*best[1:], None]
    return [
        i
        for i, next_i in zip(best, nexts, strict=True)
        if next_i is None or points[next_i][0] > ALIKE * points[i][0] or points[next_i] == points[i]
    ]


COLUMNS = (
    "policy", "budget", "task", "length", "turns", "asked", "answered",
    "score", "score_low", "score_high", "difference", "difference_low", "difference_high", "paired",
    "kept", "held", "kv_bytes", "ttft", "ttft_q1", "ttft_q3", "tpot", "tpot_q1", "tpot_q3",
    "output_tokens", "in_full", "reasons",
)  # fmt: skip
"""Of summary.csv; scores and shares 0 to 1, times in seconds, empty where nothing is known."""


def values(row: SummaryRow) -> dict[str, object]:
    """Name in COLUMNS -> value of a row."""

    def three(estimate: tuple | None) -> tuple:
        return tuple(estimate) if estimate is not None else (None,) * 3

    reason_counts = "; ".join(f"{reason} {count}" for reason, count in row.in_full.items())
    column_values = (
        row.policy, row.budget, row.task or "all", row.length or "all", str(row.turns),
        row.asked, row.answered, *three(row.score), *three(row.difference), row.paired,
        row.kept, row.held, row.kv_bytes, *three(row.ttft), *three(row.tpot),
        row.output_tokens, sum(row.in_full.values()), reason_counts,
    )  # fmt: skip
    return dict(zip(COLUMNS, column_values, strict=True))


def csv_text(summary: Summary) -> str:
    """All rows as CSV, in the order of policies, tasks and lengths."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in summary.rows.values():
        cells = values(row)
        writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in cells.items()})
    return out.getvalue()
