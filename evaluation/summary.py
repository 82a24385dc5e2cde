"""The figures of a run: a row per policy, budget, task and length, with totals over both."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from kvpolicy.evaluation.records import FULL, Record
from kvpolicy.evaluation.results import Results, Series
from kvpolicy.evaluation.statistics import (
    Estimate,
    Spread,
    mean_score,
    paired_difference,
    quartiles,
)


class Turns(StrEnum):
    """Which questions of the samples a row is of."""

    ALL = "all"
    FIRST = "first"
    LATER = "later"

    def holds(self, turn: int) -> bool:
        return self is Turns.ALL or (self is Turns.FIRST) == (turn == 0)


@dataclass(frozen=True)
class Row:
    """One row; None where nothing is known.

    Attributes:
        task, length: None: over all of them, each task and length with the same weight.
        asked, answered: questions that the plan has, and those with an answer.
        score: mean score; `difference` to full KV, over the `paired` questions that both answered.
        kept, held, kv_bytes, output_tokens: means over the questions, as in `Record`.
        ttft, tpot: seconds.
        in_full: how many were served in full although a policy was asked for, by reason.
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


Scores = dict[tuple[int, int], float]  # by index and turn


class Summary:
    """All rows of a run, found by what they are of."""

    def __init__(self, results: Results) -> None:
        self.results = results
        self._cells: dict[tuple, list[Record]] = {}
        turns: Counter[str] = Counter()
        for record in results.records:
            cell = (record.policy, record.budget, record.task, record.length)
            self._cells.setdefault(cell, []).append(record)
            turns[record.task] = max(turns[record.task], record.turn + 1)
        self.turns = {task: turns[task] for task in results.tasks}
        self._full = next((s for s in results.series if s[0] == FULL), None)
        self._bytes = (results.plan.get("server") or {}).get("bytes_per_token")
        self.rows = {self._key(row): row for row in self._rows()}

    @staticmethod
    def _key(row: Row) -> tuple:
        return (row.series, row.task, row.length, row.turns)

    def row(
        self, series: Series, task: str | None = None, length: int | None = None,
        turns: Turns = Turns.ALL,
    ) -> Row:  # fmt: skip
        """The row; with one length in the plan that of all lengths is that of the length."""
        if length is not None and len(self.results.lengths) == 1:
            length = None
        return self.rows[series, task, length, turns]

    def conversations(self) -> list[str]:
        """Tasks whose samples have several questions."""
        return [task for task, count in self.turns.items() if count > 1]

    def prominent(self, most: int) -> list[str]:
        """The policies with the best scores over everything, best first; without full KV."""
        scores: dict[str, list[float]] = {}
        for series in self.results.series:
            score = self.row(series).score
            if series[0] != FULL and score is not None:
                scores.setdefault(series[0], []).append(score.mean)
        return sorted(scores, key=lambda policy: -float(np.mean(scores[policy])))[:most]

    def _rows(self) -> Iterable[Row]:
        tasks: list[str | None] = [*self.results.tasks]
        lengths: list[int | None] = self.results.lengths
        for series in self.results.series:
            for task in [None, *tasks] if len(tasks) != 1 else [None, tasks[0]]:
                for length in [None, *lengths] if len(lengths) > 1 else [None]:
                    yield self._row(series, task, length, Turns.ALL)
            for task in self.conversations():
                for turns in (Turns.FIRST, Turns.LATER):
                    for length in [None, *lengths] if len(lengths) > 1 else [None]:
                        yield self._row(series, task, length, turns)

    def _row(self, series: Series, task: str | None, length: int | None, turns: Turns) -> Row:
        cells = [
            (t, n)
            for t in ([task] if task else self.results.tasks)
            for n in ([length] if length else self.results.lengths)
        ]
        found = [
            record
            for cell in cells
            for record in self._cells.get((*series, *cell), ())
            if turns.holds(record.turn)
        ]
        score, difference, paired = self._scores(series, cells, turns)
        return Row(
            *series, task, length, turns,
            asked=sum(self._asked(t, turns) for t, _ in cells), answered=len(found),
            score=score, difference=difference, paired=paired,
            kept=_mean(_kept(r) for r in found), held=_mean(r.held for r in found),
            kv_bytes=_mean(self._kv_bytes(r) for r in found),
            ttft=_spread(r.ttft for r in found), tpot=_spread(r.tpot for r in found),
            output_tokens=_mean(r.output_tokens for r in found),
            in_full=dict(sorted(Counter(r.uncompressed for r in found if r.uncompressed).items())),
        )  # fmt: skip

    def _asked(self, task: str, turns: Turns) -> int:
        """Questions of one length; a task that nobody answered yet counts one per sample."""
        count = sum(turns.holds(turn) for turn in range(max(1, self.turns[task])))
        return count * self.results.plan["samples"]

    def _scores(
        self, series: Series, cells: Sequence[tuple[str, int]], turns: Turns
    ) -> tuple[Estimate | None, Estimate | None, int]:
        own, policy, full, paired = [], [], [], 0
        for cell in cells:
            scores = self._by_question(series, cell, turns)
            if scores:
                own.append(_units(scores))
            other = self._by_question(self._full, cell, turns) if self._full else {}
            both = [question for question in scores if question in other]
            if both and series[0] != FULL:
                paired += len(both)
                policy.append(_units({question: scores[question] for question in both}))
                full.append(_units({question: other[question] for question in both}))
        score = mean_score(own) if own else None
        return score, paired_difference(policy, full) if policy else None, paired

    def _by_question(self, series: Series, cell: tuple[str, int], turns: Turns) -> Scores:
        found = self._cells.get((*series, *cell), ())
        return {(r.index, r.turn): r.score for r in found if turns.holds(r.turn)}

    def _kv_bytes(self, record: Record) -> float | None:
        if record.kv_bytes is None and record.policy == FULL and self._bytes:
            return self._bytes * record.prompt_tokens
        return record.kv_bytes


def _kept(record: Record) -> float | None:
    """Of a prompt that was served in full, everything."""
    whole = record.policy == FULL or record.uncompressed
    return 1.0 if record.kept is None and whole else record.kept


def _units(scores: Scores) -> np.ndarray:
    """Mean score of each sample, in the order of their indices."""
    found: dict[int, list[float]] = {}
    for (index, _), score in sorted(scores.items()):
        found.setdefault(index, []).append(score)
    return np.array([sum(values) / len(values) for values in found.values()])


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _spread(values: Iterable[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    return quartiles(known) if known else None


COSTS: dict[str, Callable[[Row], float | None]] = {
    "kv_bytes": lambda row: row.kv_bytes,
    "ttft": lambda row: row.ttft and row.ttft.median,
    "tpot": lambda row: row.tpot and row.tpot.median,
}
"""What a score is set against: bytes, seconds, seconds."""


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Which points (cost, score) no other beats: none costs less and scores as much, or more."""
    best: list[int] = []
    for i in sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1])):
        if not best or points[i][1] > points[best[-1]][1] or points[i] == points[best[-1]]:
            best.append(i)
    return sorted(best)


COLUMNS = (
    "policy", "budget", "task", "length", "turns", "asked", "answered",
    "score", "score_low", "score_high", "difference", "difference_low", "difference_high", "paired",
    "kept", "held", "kv_bytes", "ttft", "ttft_q1", "ttft_q3", "tpot", "tpot_q1", "tpot_q3",
    "output_tokens", "in_full", "reasons",
)  # fmt: skip
"""Of summary.csv; scores and shares 0 to 1, times in seconds, empty where nothing is known."""


def values(row: Row) -> dict[str, object]:
    """A row by the names of COLUMNS."""

    def three(estimate: tuple | None) -> tuple:
        return tuple(estimate) if estimate is not None else (None,) * 3

    reasons = "; ".join(f"{reason} {count}" for reason, count in row.in_full.items())
    found = (
        row.policy, row.budget, row.task or "all", row.length or "all", str(row.turns),
        row.asked, row.answered, *three(row.score), *three(row.difference), row.paired,
        row.kept, row.held, row.kv_bytes, *three(row.ttft), *three(row.tpot),
        row.output_tokens, sum(row.in_full.values()), reasons,
    )  # fmt: skip
    return dict(zip(COLUMNS, found, strict=True))


def csv_text(summary: Summary) -> str:
    """All rows, in the order of policies, tasks and lengths."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in summary.rows.values():
        cells = values(row)
        writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in cells.items()})
    return out.getvalue()
