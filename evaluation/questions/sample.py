"""A question as data: what is asked, turn by turn, and what a right answer names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class History(StrEnum):
    """What a later turn of a sample finds of the earlier ones."""

    SHARED = "shared"
    """Nothing: every turn is asked of the context alone, whose prefix the turns share."""
    TREE = "tree"
    """The conversation so far, with its full KV still in the radix cache."""
    EVICTED = "evicted"
    """The conversation so far, after the radix cache has been emptied."""
    COPY = "copy"
    """What the policy left of the first turn: the conversation goes on in the compressed copy."""


@dataclass(frozen=True)
class Turn:
    """One question.

    Attributes:
        prompt: the question, as it follows the context or the conversation so far.
        reference: a right answer, which stands in the conversation that later turns see, so that
            they are the same for every policy.
        expected: the items that a right answer names.
        most_tokens: tokens to generate at most.
        judge: from the text of the answer to its score, 0 to 1.
    """

    prompt: str
    reference: str
    expected: tuple[str, ...]
    most_tokens: int
    judge: Callable[[str], float]


@dataclass(frozen=True)
class Sample:
    """One context with its questions; the same arguments give the same sample.

    Attributes:
        task: name of its task.
        length: tokens that context and first question were made for.
        index: which sample of the task and length, from 0.
        context: the text before the first question.
        turns: in order; one for most tasks.
        history: what the second and later turns find.
        depth: where in the context the (first) answer stands, 0 to 1; None if nowhere.
        asked: [start, stop) characters of the context that hold the answers of the first turn.
    """

    task: str
    length: int
    index: int
    context: str
    turns: tuple[Turn, ...]
    history: History = History.TREE
    depth: float | None = None
    asked: tuple[tuple[int, int], ...] = ()
