"""More questions over the same 512 words, for the larger model: many values, chains, pairs, counts.

They follow RULER (Hsieh et al. 2024, arXiv:2404.06654) and InfiniteBench's key-value retrieval
(Zhang et al. 2024, arXiv:2402.13718); `kvpolicy.evaluation.questions.embedded_worlds` defines their
form. `sample` draws a question of these tasks or of `tasks.TASKS`, `right` tells whether an answer
is right, `share` which share of it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import tasks
from kvpolicy.evaluation.questions.embedded import ANSWER, ASK, COMMA, LIST, EmbeddedPrompt
from kvpolicy.evaluation.questions.embedded_words import VOCABULARY
from kvpolicy.evaluation.questions.embedded_worlds import (
    HOPS,
    World,
    common_words,
    count_prompt,
    draw_chains,
    frequent_words,
    world_prompt,
)
from kvpolicy.evaluation.tasks import kv, mv, vt
from tasks import Sample

BEYOND = VOCABULARY.index("beyond")


@dataclass(frozen=True)
class Task:
    """A task; `draw` makes a prompt from its name, a length and a generator."""

    title: str
    draw: Callable[[str, int, np.random.Generator], EmbeddedPrompt]


TASKS = {
    "mv": Task(
        "multi-value: a key with 3 values among 24 facts", partial(world_prompt, shape=mv.SHAPE)
    ),
    "vt": Task(
        "variable tracking: a chain of 4 hops among 6", partial(world_prompt, shape=vt.SHAPE)
    ),
    "kv": Task("key-value: the context is all pairs", partial(world_prompt, shape=kv.SHAPE)),
    "cwe": Task("common words: 5 of 45", partial(count_prompt, head=LIST, draw=common_words)),
    "fwe": Task(
        "frequent words: 3 by Zipf's law", partial(count_prompt, head=ASK, draw=frequent_words)
    ),
}
ANY_ORDER = ("mv", "cwe", "fwe")
TITLES = {name: task.title for name, task in {**tasks.TASKS, **TASKS}.items()}


def sample(task: str, length: int, rng: np.random.Generator) -> Sample:
    """A question of `task` whose prompt has exactly `length` tokens; see `tasks.sample`."""
    if task in tasks.TASKS:
        return tasks.sample(task, length, rng)
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; the tasks are {', '.join(TITLES)}")
    return tasks.sample_of(task, TASKS[task].draw(task, length, rng))


def two_hops(count: int, rng: np.random.Generator, hops: int = HOPS) -> World:
    """As `chains`, asking for the word two steps on: `beyond amber answer` -> `amber red`.

    Only for lessons, not a task, as the model does not learn it.
    """
    statements, places, drawn = draw_chains(count, rng, hops)
    questions = [
        ([BEYOND, chain[i], ANSWER], [chain[i], chain[i + 2]], place[i : i + 2])
        for chain, place in zip(drawn, places, strict=True)
        for i in range(hops - 1)
    ]
    return World(statements, questions)


def right(sample: Sample, answer: Sequence[int]) -> bool:
    """Whether `answer`, without <end>, is right; tasks in ANY_ORDER may list in any order."""
    if sample.task in ANY_ORDER:
        return items(answer) == items(sample.answer_ids)
    return list(answer) == sample.answer_ids


def items(answer: Sequence[int]) -> list[str]:
    """The items of an answer, which commas separate, sorted."""
    return sorted(" ".join(map(str, answer)).split(f" {COMMA} "))


def share(sample: Sample, answer: Sequence[int]) -> float:
    """Share of the expected items that `answer` names, scored as in RULER.

    In `mv`, `cwe`, `fwe` and `mq`, commas separate items, in any order; in other tasks the items
    are words, each in its place.
    """
    if sample.task in (*ANY_ORDER, "mq"):
        expected, said = items(sample.answer_ids), set(items(answer))
        return sum(item in said for item in expected) / len(expected)
    named = sum(word == said for word, said in zip(sample.answer_ids, answer, strict=False))
    return named / len(sample.answer_ids)
