"""The results of simulated runs, as tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from kvpolicy.experiments.definition.experiment import Experiment
from kvpolicy.experiments.reporting.text_table import table
from kvpolicy.experiments.simulate.simulation import RunsOutcome


def lines(experiment: Experiment, rows: Sequence[RunsOutcome], width: int) -> Iterator[str]:
    """A table for each metric, below lines about the experiment and the runs.

    Args:
        rows: result of `simulation.simulate`.
        width: characters of a line.
    """
    yield f"{experiment.name}, revision {experiment.revision}, alpha {experiment.analysis.alpha:g}"
    runs = sorted({row.runs for row in rows}, reverse=True)
    yield f"{' or '.join(f'{number:,}' for number in runs)} runs, looked at after every value"
    yield "HALF, 90 %: values in an arm until as many of the runs were decided"
    head = ["QUESTION ", "VALUES ", "SHARE", "BOUND", "HALF", "90 %"]
    for metric, group in groupby(rows, key=lambda row: row.metric):
        yield from ("", f"{metric}:", *table(head, [_cells(row) for row in group], width, (1,)))


def _cells(row: RunsOutcome) -> list[str]:
    return [
        row.question,
        row.data,
        f"{100 * row.share:.3g} %",
        "-" if row.bound is None else f"{100 * row.bound:.3g} %",
        "-" if row.median is None else f"{row.median:,}",
        "-" if row.ninety is None else f"{row.ninety:,}",
    ]
