"""Training sequences of the larger model: lessons of `tasks`, and the tasks of `more_tasks`."""

from __future__ import annotations

from collections.abc import Mapping

import more_tasks
import numpy as np
import tasks
from kvpolicy.evaluation.questions import embedded, embedded_worlds
from kvpolicy.evaluation.questions.embedded import ANSWER, ASK, BOS, COMMA, LIST
from kvpolicy.evaluation.questions.embedded_worlds import COMMON, OFTEN, World
from tasks import Lesson

# For stages before the listing layer is put in: two hops, and lists without commas (bare).
MIX = {
    "some facts": 0.14,
    "all facts": 0.12,
    "one fact": 0.04,
    "several asked": 0.10,
    "copy": 0.04,
    "mv": 0.12,
    "vt": 0.12,
    "two hops": 0.10,
    "kv": 0.10,
    "bare cwe": 0.06,
    "bare fwe": 0.06,
}
# Looking up one thing is learned first; counting and hops take longer.
LATER_MIX = {
    "some facts": 0.10,
    "all facts": 0.08,
    "one fact": 0.04,
    "several asked": 0.10,
    "copy": 0.02,
    "mv": 0.12,
    "vt": 0.14,
    "two hops": 0.12,
    "kv": 0.08,
    "bare cwe": 0.10,
    "bare fwe": 0.10,
}
COUNTING_MIX = {
    "some facts": 0.05,
    "all facts": 0.05,
    "several asked": 0.06,
    "mv": 0.08,
    "vt": 0.06,
    "two hops": 0.15,
    "kv": 0.05,
    "bare cwe": 0.25,
    "bare fwe": 0.25,
}
LONG_MIX = {
    "some facts": 0.18,
    "all facts": 0.16,
    "one fact": 0.04,
    "several asked": 0.20,
    "mv": 0.08,
    "vt": 0.16,
    "kv": 0.18,
}
# For stages with the listing layer.
LISTING_MIX = {
    "some facts": 0.06,
    "all facts": 0.06,
    "several asked": 0.08,
    "mv": 0.25,
    "vt": 0.08,
    "kv": 0.07,
    "cwe": 0.20,
    "fwe": 0.20,
}
COUNTING_LISTS_MIX = {
    "some facts": 0.06,
    "all facts": 0.06,
    "several asked": 0.06,
    "mv": 0.12,
    "vt": 0.06,
    "kv": 0.06,
    "cwe": 0.24,
    "fwe": 0.34,
}
LAST_MIX = {
    "some facts": 0.10,
    "all facts": 0.10,
    "one fact": 0.02,
    "several asked": 0.14,
    "mv": 0.14,
    "vt": 0.13,
    "kv": 0.17,
    "cwe": 0.10,
    "fwe": 0.10,
}

STATEMENT = {"mv": embedded.FACT_LENGTH, "vt": 4, "two hops": 4, "kv": 10}


def lesson(kind: str, length: int, rng: np.random.Generator) -> Lesson:
    """A sequence of at most `length` tokens; `kind` is a key of a mix."""
    if kind in tasks.MIX:
        return tasks.lesson(kind, length, rng)
    if kind not in STATEMENT:
        return count_lesson(kind, length, rng)
    statement = STATEMENT[kind]
    room = int((length - 1) * rng.uniform(0.45, 0.8))
    fits = max(1, room // statement)
    count = fits if kind == "kv" or rng.random() < 0.3 else max(1, int(fits * rng.random()))
    world = draw_world(kind, count, rng)
    body, _ = embedded.spread(world.statements, max(room, statement * len(world.statements)), rng)
    result = Lesson([BOS, *body])
    for at in rng.permutation(len(world.questions)):
        question, answer, _ = world.questions[at]
        if len(result.ids) + len(question) + len(answer) + 1 <= length:
            result.ask(question, answer)
    return result


def draw_world(kind: str, count: int, rng: np.random.Generator) -> World:
    """A world of about `count` statements, with lists and chains of random lengths."""
    if kind == "mv":
        repeats = int(rng.integers(2, 5))
        return embedded_worlds.many_values(max(count, repeats), rng, repeats)
    if kind in ("vt", "two hops"):
        hops = int(rng.integers(2, 6))
        draw = embedded_worlds.chains if kind == "vt" else more_tasks.two_hops
        return draw(max(count, hops), rng, hops)
    return embedded_worlds.pairs(count, rng)


def count_lesson(kind: str, length: int, rng: np.random.Generator) -> Lesson:
    """A lesson with one question, as a second one could be copied from the first answer.

    Bare lessons have no commas in the answer, and less distinct counts.
    """
    bare = kind.startswith("bare ")
    room = length - 1 - 3 - (COMMON if bare else 2 * COMMON - 1) - 1
    if kind.endswith("cwe"):
        ratio, rare = ((3, 12), (10, 80)) if bare else ((6, 14), (10, 60))
        listed, answer = embedded_worlds.common_words(
            room, rng, rng.uniform(*ratio), int(rng.integers(*rare))
        )
        asks, answer = LIST, rng.permutation(answer).tolist()
    else:
        exponent = rng.uniform(1.2, 2.2) if bare else rng.uniform(1.7, 2.5)
        asks, (listed, answer) = ASK, embedded_worlds.frequent_words(room, rng, exponent)
    result = Lesson([BOS, *listed])
    result.ask([asks, OFTEN, ANSWER], answer if bare else embedded_worlds.with_commas(answer))
    return result


def batch(
    count: int, length: int, rng: np.random.Generator, mix: Mapping[str, float] = MIX
) -> tuple[np.ndarray, np.ndarray]:
    """`count` lessons of the kinds in `mix`, as `tasks.batch`."""
    return tasks.batch(count, length, rng, mix, lesson)


MOST_ALSO = 4


def also_right(ids: np.ndarray, is_answer: np.ndarray) -> np.ndarray:
    """Words that are also right in place of those in `ids` [B, T], as lists have any order.

    At the beginning of an item, these are the first words of items listed later in the same answer.
    In lists of facts an item begins with its value, as all have the same key.

    Returns:
        int64 [B, T, MOST_ALSO]; -1 for none.
    """
    also = np.full((*ids.shape, MOST_ALSO), -1)
    for row, tokens in enumerate(ids):
        places = np.flatnonzero(is_answer[row])
        for part in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1):
            if len(part) == 0 or tokens[part[-1]] != embedded.END:
                continue
            begins = beginnings(tokens, part)
            for turn, at in enumerate(begins[:-1]):
                later = tokens[begins[turn + 1 :]][:MOST_ALSO]
                also[row, at, : len(later)] = later
    return also


def beginnings(tokens: np.ndarray, answer: np.ndarray) -> list[int]:
    """Places where the items of the answer at places `answer` begin; empty if order matters."""
    commas = answer[tokens[answer] == COMMA].tolist()
    starts = [int(answer[0]), *(at + 1 for at in commas)]
    if tokens[answer[0] - 2] == OFTEN:
        return starts
    keys = {tuple(tokens[at : at + embedded.KEY_WORDS]) for at in starts}
    if commas and len(keys) == 1:
        return [at + embedded.KEY_WORDS + 1 for at in starts]
    return []
