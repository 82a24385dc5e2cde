"""More questions over the same 512 words, for the larger model: many values, chains, pairs, counts.

They follow RULER (Hsieh et al. 2024, arXiv:2404.06654) and InfiniteBench's key-value retrieval
(Zhang et al. 2024, arXiv:2402.13718), in words that this model can learn:

    mv   several facts have one key; the key is asked for as often as it has values
         list amber seven , amber seven answer
           -> amber seven is oak river stone , amber seven is rice lake drum <end>
    vt   variables that point to each other: `let amber dog .  let dog red .`
         follow amber answer     -> amber dog red <end>
    kv   nothing but pairs `amber seven fox is oak river stone lake drum ,`
         ask amber seven fox answer -> oak river stone lake drum <end>
    cwe  a list of words, of which five are common
         list often answer       -> oak , river , stone , lake , drum <end>, in any order
    fwe  a list of words whose counts fall steeply
         ask often answer        -> oak , river , stone <end>: the three most frequent, in any order

`sample` gives a question of these and of `tasks.TASKS`, `right` says whether an answer is right,
`share` how much of it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import tasks
import words
from tasks import ANSWER, ASK, BOS, COMMA, DOT, IS, KEYS, LIST, VALUES, Sample

LET, FOLLOW, BEYOND, OFTEN = (
    words.VOCABULARY.index(word) for word in ("let", "follow", "beyond", "often")
)
Exchange = tuple[list[int], list[int], list[int]]
"""A question, its answer, and the indices of the statements that answer it."""


@dataclass(frozen=True)
class World:
    """Statements of a context and the questions that they answer, each to be asked once."""

    statements: list[list[int]]
    questions: list[Exchange]


# Facts with several values.

VALUES_PER_KEY = 3


def many_values(count: int, rng: np.random.Generator, repeats: int = VALUES_PER_KEY) -> World:
    """`count` facts, of which each `repeats` share one key, in random order."""
    facts = tasks.draw_facts(count // repeats, rng)
    owners = rng.permutation(np.repeat(np.arange(len(facts.keys)), repeats))
    drawn = rng.integers(VALUES.start, VALUES.stop, (len(owners), tasks.VALUE_WORDS)).tolist()
    keys = [facts.keys[owner] for owner in owners]
    facts = tasks.Facts(keys, drawn)
    questions = []
    for owner in range(len(owners) // repeats):
        chosen = rng.permutation(np.flatnonzero(owners == owner)).tolist()
        questions.append((*tasks.ask(facts, chosen), chosen))
    return World([facts.statement(i) for i in range(len(keys))], questions)


# Variables that point to variables.

HOPS = 4


def chains(count: int, rng: np.random.Generator, hops: int = HOPS) -> World:
    """`count` statements in chains of `hops`, all in random order; asked for whole chains."""
    statements, places, drawn = draw_chains(count, rng, hops)
    questions = [
        ([FOLLOW, chain[0], ANSWER], chain, place)
        for chain, place in zip(drawn, places, strict=True)
    ]
    return World(statements, questions)


def two_hops(count: int, rng: np.random.Generator, hops: int = HOPS) -> World:
    """As `chains`, asked for the word two steps on: `beyond amber answer` -> `amber red`.

    Only a lesson: the model does not learn it.
    """
    statements, places, drawn = draw_chains(count, rng, hops)
    questions = [
        ([BEYOND, chain[i], ANSWER], [chain[i], chain[i + 2]], place[i : i + 2])
        for chain, place in zip(drawn, places, strict=True)
        for i in range(hops - 1)
    ]
    return World(statements, questions)


def draw_chains(
    count: int, rng: np.random.Generator, hops: int
) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Shuffled statements; per chain the places of its statements, in order; the chains."""
    number = max(1, min(count // hops, len(KEYS) // (hops + 1)))
    drawn = (KEYS.start + rng.permutation(len(KEYS))[: number * (hops + 1)]).reshape(number, -1)
    links = [link for chain in drawn.tolist() for link in pairwise(chain)]
    order = rng.permutation(len(links))
    statements = [[LET, *links[i], DOT] for i in order]
    places = np.argsort(order).reshape(number, hops).tolist()
    return statements, places, drawn.tolist()


# Pairs of a long key and a long value, without text between.

PAIR_KEY, PAIR_VALUE = 3, 5


def pairs(count: int, rng: np.random.Generator) -> World:
    """`count` pairs; half of the time from few key words, so that all words of a key count."""
    side = len(KEYS)
    if rng.random() < 0.5:
        side = min(side, max(3, math.ceil((3 * count) ** (1 / PAIR_KEY))))
    alphabets = [KEYS.start + rng.permutation(len(KEYS))[:side] for _ in range(PAIR_KEY)]
    cells = rng.choice(side**PAIR_KEY, count, replace=False)
    keys = [
        [int(alphabet[cell // side**i % side]) for i, alphabet in enumerate(alphabets)]
        for cell in cells
    ]
    values = rng.integers(VALUES.start, VALUES.stop, (count, PAIR_VALUE)).tolist()
    statements = [[*k, IS, *v, COMMA] for k, v in zip(keys, values, strict=True)]
    asked = [([ASK, *keys[i], ANSWER], values[i], [i]) for i in range(count)]
    return World(statements, asked)


# Lists of words to be counted.

COMMON, COMMON_RATIO, RARE = 5, 10, 40
FREQUENT, ZIPF, RANKS = 3, 2.0, 60


def common_words(
    length: int, rng: np.random.Generator, ratio: float = COMMON_RATIO, rare: int = RARE
) -> tuple[list[int], list[int]]:
    """A shuffled list in which COMMON words stand `ratio` times as often as the others."""
    drawn = VALUES.start + rng.permutation(len(VALUES))[: COMMON + rare]
    each = max(1, int(length / (COMMON * ratio + rare)))
    rare = min(rare, (length - 2 * COMMON) // each)
    counts = np.full(COMMON + rare, each)
    counts[:COMMON] = (length - each * rare) // COMMON
    return shuffled(drawn, counts, length, rng), drawn[:COMMON].tolist()


def frequent_words(
    length: int, rng: np.random.Generator, exponent: float = ZIPF
) -> tuple[list[int], list[int]]:
    """A shuffled list with counts by Zipf's law; FREQUENT words are clearly ahead."""
    drawn = VALUES.start + rng.permutation(len(VALUES))[:RANKS]
    weight = np.arange(1, RANKS + 1) ** -exponent
    counts = (length * weight / weight.sum()).astype(int)
    counts[FREQUENT:] = np.minimum(counts[FREQUENT:], counts[FREQUENT - 1] - 1)
    return shuffled(drawn, counts, length, rng), drawn[:FREQUENT].tolist()


def shuffled(
    drawn: np.ndarray, counts: np.ndarray, length: int, rng: np.random.Generator
) -> list[int]:
    """Each word of `drawn` as often as `counts` says, `length` words; the first fills up."""
    listed = np.repeat(drawn[: len(counts)], counts)[:length]
    filled = np.concatenate([np.full(length - len(listed), drawn[0]), listed])
    return rng.permutation(filled).tolist()


# Tasks.


@dataclass(frozen=True)
class Task:
    """A family as a test: how many statements the context holds (None: as many as fit)."""

    title: str
    draw: Callable[[int, np.random.Generator], World]
    statement: int
    question: int
    statements: int | None
    least: int = 1


@dataclass(frozen=True)
class CountTask:
    title: str
    draw: Callable[[int, np.random.Generator], tuple[list[int], list[int]]]
    asks: int
    least: int


TASKS: dict[str, Task | CountTask] = {
    "mv": Task(
        "multi-value: a key with 3 values among 24 facts",
        many_values,
        tasks.FACT_LENGTH,
        tasks.question_length(VALUES_PER_KEY),
        24,
        VALUES_PER_KEY,
    ),
    "vt": Task("variable tracking: a chain of 4 hops among 6", chains, 4, 3, 24, HOPS),
    "kv": Task("key-value: the context is all pairs", pairs, PAIR_KEY + PAIR_VALUE + 2, 5, None),
    "cwe": CountTask("common words: 5 of 45", common_words, LIST, 50),
    "fwe": CountTask("frequent words: 3 by Zipf's law", frequent_words, ASK, 50),
}
ANY_ORDER = ("mv", "cwe", "fwe")
TITLES = {name: task.title for name, task in {**tasks.TASKS, **TASKS}.items()}


def sample(task: str, length: int, rng: np.random.Generator) -> Sample:
    """A question of `task` whose prompt has exactly `length` tokens; see `tasks.sample`."""
    if task in tasks.TASKS:
        return tasks.sample(task, length, rng)
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; the tasks are {', '.join(TITLES)}")
    kind = TASKS[task]
    if isinstance(kind, CountTask):
        return count_sample(task, kind, length, rng)
    room = length - 1 - kind.question
    fits = room // kind.statement
    if fits < kind.least:
        least = 1 + kind.question + kind.least * kind.statement
        raise ValueError(f"a prompt of task {task!r} needs at least {least} tokens, got {length}")
    world = kind.draw(min(kind.statements or fits, fits), rng)
    body, starts = tasks.spread(world.statements, room, rng)
    question, answer, used = world.questions[rng.integers(len(world.questions))]
    spans = [(1 + starts[i], 1 + starts[i] + kind.statement) for i in used]
    return Sample(task, [BOS, *body, *question], answer, spans)


def count_sample(task: str, kind: CountTask, length: int, rng: np.random.Generator) -> Sample:
    question = [kind.asks, OFTEN, ANSWER]
    room = length - 1 - len(question)
    if room < kind.least:
        least = 1 + len(question) + kind.least
        raise ValueError(f"a prompt of task {task!r} needs at least {least} tokens, got {length}")
    listed, answer = kind.draw(room, rng)
    return Sample(task, [BOS, *listed, *question], with_commas(answer), [])


def with_commas(listed: Sequence[int]) -> list[int]:
    return [token for word in listed for token in (word, COMMA)][:-1]


def right(sample: Sample, answer: Sequence[int]) -> bool:
    """Whether `answer`, without <end>, is right; tasks in ANY_ORDER may list in any order."""
    if sample.task in ANY_ORDER:
        return items(answer) == items(sample.answer_ids)
    return list(answer) == sample.answer_ids


def items(answer: Sequence[int]) -> list[str]:
    """The things that an answer lists, sorted: what stands between commas."""
    return sorted(" ".join(map(str, answer)).split(f" {COMMA} "))


def share(sample: Sample, answer: Sequence[int]) -> float:
    """Share of the expected things that `answer` names, as RULER scores.

    Things are what stands between commas in `mv`, `cwe`, `fwe` and `mq`, in any order; elsewhere
    they are words, each in its place.
    """
    if sample.task in (*ANY_ORDER, "mq"):
        expected, said = items(sample.answer_ids), set(items(answer))
        return sum(item in said for item in expected) / len(expected)
    named = sum(word == said for word, said in zip(sample.answer_ids, answer, strict=False))
    return named / len(sample.answer_ids)
