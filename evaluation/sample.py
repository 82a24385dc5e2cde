"""A question as data: what is asked, turn by turn, and what a right answer names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    """One question of a conversation.

    Attributes:
        prompt: what is added to the conversation before the model answers; the first turn's holds
            the context.
        expected: the items that a right answer names.
        most_tokens: tokens to generate at most.
        judge: from the text of the answer to its score, 0 to 1.
    """

    prompt: str
    expected: tuple[str, ...]
    most_tokens: int
    judge: Callable[[str], float]


@dataclass(frozen=True)
class Sample:
    """A conversation about one context; the same arguments give the same sample.

    Attributes:
        task: name of its task.
        length: tokens that the first turn's prompt was made for.
        index: which sample of the task and length, from 0.
        turns: in order; one for most tasks.
        depth: where in the context the (first) answer stands, 0 to 1; None if nowhere.
    """

    task: str
    length: int
    index: int
    turns: tuple[Turn, ...]
    depth: float | None = None
