"""What a task file is asked for: one sample, of a length, from a generator of random numbers.

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
    """What is to be made.

    Attributes:
        task: the task's name.
        length: tokens of context and first question.
        index: which sample, from 0.
        rng: the only source of chance; seeded by what identifies the sample.
        depth: where the first needle should lie, 0 to 1, where a task can choose.
        count: tokens of a text, those included that the tokenizer adds.
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
    """What to raise where a prompt of `task` needs `least` tokens and `length` were ordered."""
    return ValueError(f"a prompt of task {task!r} needs at least {least} tokens, got {length}")
