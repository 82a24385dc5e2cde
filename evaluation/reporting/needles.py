"""Scores by depth of the answer in the prompt and by length."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from kvpolicy.evaluation.reporting.results import Results, Series

FINE, COARSE = 10, 5
ENOUGH = 50  # samples per length for FINE steps of depth


@dataclass(frozen=True)
class Needles:
    """Scores of a task's first questions.

    Attributes:
        score: policy and budget -> mean scores, float64 [depth, length]; depth 0 is the beginning
            of the prompt. NaN where nothing was answered.
        count: policy and budget -> numbers of answers, float64 [depth, length].
    """

    score: dict[Series, np.ndarray]
    count: dict[Series, np.ndarray]


def needles(results: Results) -> dict[str, Needles]:
    """Task -> scores; without tasks whose answers have no depth."""
    steps = FINE if results.plan["samples"] >= ENOUGH else COARSE
    column = {length: i for i, length in enumerate(results.lengths)}
    sums: dict[str, dict[Series, np.ndarray]] = {}
    for record in results.records:
        if record.depth is None or record.turn > 0:
            continue
        row = min(steps - 1, max(0, int(record.depth * steps)))
        empty = np.zeros((2, steps, len(column)))
        of_task = sums.setdefault(record.task, {})
        cells = of_task.setdefault((record.policy, record.budget), empty)
        cells[:, row, column[record.length]] += (record.score, 1)
    by_task = {}
    for task in results.tasks:
        if task in sums:
            count = {series: cells[1] for series, cells in sums[task].items()}
            with np.errstate(invalid="ignore"):
                score = {series: cells[0] / cells[1] for series, cells in sums[task].items()}
            by_task[task] = Needles(score, count)
    return by_task
