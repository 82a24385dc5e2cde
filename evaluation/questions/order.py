"""The order for one sample that a task file gets: a length and a generator of random numbers.

Every file of `tasks/` has a TITLE and two functions from an `Order` to a `Sample`: `embedded`, in
the 512 words of the embedded models, and `words`, in English for any tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from kvpolicy.evaluation.questions.sample import History, Sample, Turn


@dataclass(frozen=True)
class Order:
    """An order for one sample.

    Attributes:
        task: name of the task.
        length: tokens of context and first question.
        index: number of the sample, from 0.
        rng: the only source of randomness; seeded by what identifies the sample.
        depth: wanted depth of the first needle, 0 to 1, for tasks that can choose it.
        count: function from a text to its number of tokens, with those that the tokenizer adds.
    """

    task: str
    length: int
    index: int
    rng: np.random.Generator
    depth: float
    count: Callable[[str], int]

    def sample(
        self,
        context: str,
        turns: Sequence[Turn],
        depth: float | None = None,
        history: History = History.TREE,
        asked: Sequence[tuple[int, int]] = (),
    ) -> Sample:
        """The sample that answers this order; arguments as in `Sample`."""
        return Sample(
            self.task,
            self.length,
            self.index,
            context,
            tuple(turns),
            history,
            depth,
            tuple(asked),
        )


def too_short(task: str, least: int, length: int) -> ValueError:
    """The error for an order of `length` tokens if a prompt of `task` needs at least `least`."""
    return ValueError(f"a prompt of task {task!r} needs at least {least} tokens, got {length}")
