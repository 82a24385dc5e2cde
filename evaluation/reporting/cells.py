"""Answers as arrays: those of one policy and budget to the questions of one task and length."""

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
    """B answers, in the order of samples and turns.

    Attributes:
        index, turn: [B] of which sample, and which of its questions.
        figures: [B] by the names of FIGURES, as in `Record`; NaN where nothing is known.
        reasons: [B] why a prompt was served in full, None elsewhere.
    """

    index: np.ndarray
    turn: np.ndarray
    figures: dict[str, np.ndarray]
    reasons: np.ndarray

    def __len__(self) -> int:
        return len(self.index)

    def where(self, mask: np.ndarray) -> Cell:
        """Some of the answers."""
        figures = {name: values[mask] for name, values in self.figures.items()}
        return Cell(self.index[mask], self.turn[mask], figures, self.reasons[mask])

    @cached_property
    def units(self) -> np.ndarray:
        """Mean score of each sample, in the order of their indices."""
        _, sample = np.unique(self.index, return_inverse=True)
        return np.bincount(sample, self.figures["score"]) / np.bincount(sample)


def cell(records: Iterable[Record]) -> Cell:
    """The arrays of some records."""
    ordered = sorted(records, key=lambda record: (record.index, record.turn))
    return Cell(
        np.array([r.index for r in ordered], dtype=int),
        np.array([r.turn for r in ordered], dtype=int),
        {name: np.array([getattr(r, name) for r in ordered], dtype=float) for name in FIGURES},
        np.array([r.uncompressed for r in ordered], dtype=object),
    )


def both(first: Cell, second: Cell) -> tuple[Cell, Cell]:
    """The answers of each to the questions that both answered, in the same order."""
    if np.array_equal(first.index, second.index) and np.array_equal(first.turn, second.turn):
        return first, second
    turns = 1 + max(int(each.turn.max(initial=0)) for each in (first, second))
    mine, theirs = (each.index * turns + each.turn for each in (first, second))
    return first.where(np.isin(mine, theirs)), second.where(np.isin(theirs, mine))


def figure(cells: Sequence[Cell], name: str) -> np.ndarray:
    """What is known of a figure in all cells."""
    values = np.concatenate([each.figures[name] for each in cells]) if cells else np.empty(0)
    return values[~np.isnan(values)]


def reasons(cells: Iterable[Cell]) -> dict[str, int]:
    """How many prompts were served in full, by reason."""
    counts = Counter(reason for each in cells for reason in each.reasons if reason)
    return dict(sorted(counts.items()))
