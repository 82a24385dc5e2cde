"""Answers as arrays: of one policy and budget to the questions of one task and length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from kvpolicy.evaluation.records import Record

FIGURES = ("score", "kept", "held", "kv_bytes", "ttft", "tpot", "output_tokens")


@dataclass(frozen=True)
class Cell:
    """Answers in the order of samples and turns; arrays have one value per answer.

    Attributes:
        index, turn: int, the sample, and the question in it.
        figures: name in FIGURES -> float64, as in `Record`; NaN where not known.
        reasons: why a prompt was served in full; None if it was not.
    """

    index: np.ndarray
    turn: np.ndarray
    figures: dict[str, np.ndarray]
    reasons: np.ndarray

    def __len__(self) -> int:
        return len(self.index)

    def where(self, mask: np.ndarray) -> Cell:
        """The answers that a bool mask selects."""
        figures = {name: values[mask] for name, values in self.figures.items()}
        return Cell(self.index[mask], self.turn[mask], figures, self.reasons[mask])

    @cached_property
    def samples(self) -> np.ndarray:
        """The numbers of the samples, rising: int [samples]."""
        return np.unique(self.index)

    @cached_property
    def units(self) -> np.ndarray:
        """Mean score of each of `samples`: float64 [samples]."""
        sample = np.searchsorted(self.samples, self.index)
        return np.bincount(sample, self.figures["score"]) / np.bincount(sample)


def cell(records: Iterable[Record]) -> Cell:
    """The cell of some records."""
    ordered = sorted(records, key=lambda record: (record.index, record.turn))
    return Cell(
        np.array([r.index for r in ordered], dtype=int),
        np.array([r.turn for r in ordered], dtype=int),
        {name: np.array([getattr(r, name) for r in ordered], dtype=float) for name in FIGURES},
        np.array([r.uncompressed for r in ordered], dtype=object),
    )


def both(first: Cell, second: Cell) -> tuple[Cell, Cell]:
    """The answers of both cells to the questions that both have answered, in the same order."""
    if np.array_equal(first.index, second.index) and np.array_equal(first.turn, second.turn):
        return first, second
    turns = 1 + max(int(answers.turn.max(initial=0)) for answers in (first, second))
    keys, other_keys = (answers.index * turns + answers.turn for answers in (first, second))
    return first.where(np.isin(keys, other_keys)), second.where(np.isin(other_keys, keys))


def figure(cells: Sequence[Cell], name: str) -> np.ndarray:
    """The known values of a figure in all cells: float64."""
    values = np.concatenate([answers.figures[name] for answers in cells]) if cells else np.empty(0)
    return values[~np.isnan(values)]


def reasons(cells: Iterable[Cell]) -> dict[str, int]:
    """Reason -> number of prompts that were served in full."""
    counts = Counter(reason for answers in cells for reason in answers.reasons if reason)
    return dict(sorted(counts.items()))
