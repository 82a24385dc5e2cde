"""A sample as data: a context, its questions turn by turn, and what right answers name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class History(StrEnum):
    """What a later turn of a sample finds of the earlier turns."""

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
        prompt: text of the question, which follows the context or the conversation so far.
        reference: a right answer. Later turns see it in the conversation instead of the model's
            answer, so that they are the same for every policy.
        expected: the items that a right answer names.
        most_tokens: largest number of tokens to generate.
        judge: function from the text of an answer to its score, 0 to 1.
    """

    prompt: str
    reference: str
    expected: tuple[str, ...]
    most_tokens: int
    judge: Callable[[str], float]


@dataclass(frozen=True)
class Sample:
    """One context with its questions.

    Attributes:
        task: name of the task.
        length: tokens that were ordered for context and first question.
        index: number of the sample of the task and length, from 0.
        context: text before the first question.
        turns: the questions in order; one for most tasks.
        history: what the second and later turns find of the earlier ones.
        depth: depth of the first answer in the context, 0 to 1; None if it has none.
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
