"""More contexts in the embedded models' words: many values, chains, pairs, and lists to count.

    mv   several facts share a key; the question repeats the key, once for each value
         list amber seven , amber seven answer
           -> amber seven is oak river stone , amber seven is rice lake drum <end>
    vt   variables that point to others: `let amber dog .  let dog red .`
         follow amber answer     -> amber dog red <end>
    kv   nothing but pairs `amber seven fox is oak river stone lake drum ,`
         ask amber seven fox answer -> oak river stone lake drum <end>
    cwe  a list of words, of which five are common
         list often answer       -> oak , river , stone , lake , drum <end>  (in any order)
    fwe  a list of words whose counts fall steeply
         ask often answer        -> oak , river , stone <end>  (in any order)

As in `embedded`, the same generator gives the same prompt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from kvpolicy.evaluation.questions import embedded
from kvpolicy.evaluation.questions.embedded import (
    ANSWER,
    ASK,
    COMMA,
    DOT,
    IS,
    KEYS,
    VALUES,
    EmbeddedPrompt,
    Question,
)
from kvpolicy.evaluation.questions.embedded_words import VOCABULARY
from kvpolicy.evaluation.questions.order import too_short

LET, FOLLOW, OFTEN = (VOCABULARY.index(word) for word in ("let", "follow", "often"))
Exchange = tuple[list[int], list[int], list[int]]
"""A question, its answer, and the indices of the statements that answer it."""


@dataclass(frozen=True)
class World:
    """Token ids of the statements of a context, and the questions that they answer."""

    statements: list[list[int]]
    questions: list[Exchange]


@dataclass(frozen=True)
class Shape:
    """The make-up of a prompt about a world.

    Attributes:
        draw: makes a world with a number of statements.
        statement, question: number of tokens of a statement, and of a question.
        statements: number of statements in the context; None for as many as fit.
        least: number of statements that a question needs.
    """

    draw: Callable[[int, np.random.Generator], World]
    statement: int
    question: int
    statements: int | None
    least: int = 1


def world_prompt(task: str, length: int, rng: np.random.Generator, shape: Shape) -> EmbeddedPrompt:
    """A prompt of exactly `length` tokens with one question.

    Raises:
        ValueError: the length is too short for the statements that a question needs.
    """
    room = length - 1 - shape.question
    fits = room // shape.statement
    if fits < shape.least:
        raise too_short(task, 1 + shape.question + shape.least * shape.statement, length)
    world = shape.draw(min(shape.statements or fits, fits), rng)
    context, starts = embedded.spread(world.statements, room, rng)
    ids, answer, indices = world.questions[rng.integers(len(world.questions))]
    needles = [(starts[i], starts[i] + shape.statement) for i in indices]
    return EmbeddedPrompt(context, [Question(ids, answer, needles)])


# Facts with several values.

VALUES_PER_KEY = 3


def many_values(count: int, rng: np.random.Generator, repeats: int = VALUES_PER_KEY) -> World:
    """About `count` facts in random order; each key has `repeats` facts."""
    facts = embedded.draw_facts(count // repeats, rng)
    owners = rng.permutation(np.repeat(np.arange(len(facts.keys)), repeats))
    values = rng.integers(VALUES.start, VALUES.stop, (len(owners), embedded.VALUE_WORDS)).tolist()
    keys = [facts.keys[owner] for owner in owners]
    facts = embedded.Facts(keys, values)
    questions = []
    for owner in range(len(owners) // repeats):
        indices = rng.permutation(np.flatnonzero(owners == owner)).tolist()
        questions.append((*embedded.ask(facts, indices), indices))
    return World([facts.statement(i) for i in range(len(keys))], questions)


# Variables that point to variables.

HOPS = 4


def chains(count: int, rng: np.random.Generator, hops: int = HOPS) -> World:
    """About `count` statements in chains of `hops`, shuffled; questions ask for whole chains."""
    statements, places, words = draw_chains(count, rng, hops)
    questions = [
        ([FOLLOW, chain[0], ANSWER], chain, place)
        for chain, place in zip(words, places, strict=True)
    ]
    return World(statements, questions)


def draw_chains(
    count: int, rng: np.random.Generator, hops: int
) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Shuffled statements; the places of each chain's statements, in order; the chains' words."""
    number = max(1, min(count // hops, len(KEYS) // (hops + 1)))
    words = (KEYS.start + rng.permutation(len(KEYS))[: number * (hops + 1)]).reshape(number, -1)
    links = [link for chain in words.tolist() for link in pairwise(chain)]
    order = rng.permutation(len(links))
    statements = [[LET, *links[i], DOT] for i in order]
    places = np.argsort(order).reshape(number, hops).tolist()
    return statements, places, words.tolist()


# Pairs of a long key and a long value, without text between.

PAIR_KEY, PAIR_VALUE = 3, 5


def pairs(count: int, rng: np.random.Generator) -> World:
    """`count` pairs; in half of the cases from few key words, so that all words of a key count."""
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
    questions = [([ASK, *keys[i], ANSWER], values[i], [i]) for i in range(count)]
    return World(statements, questions)


# Lists of words to be counted.

COMMON, COMMON_RATIO, RARE = 5, 10, 40
FREQUENT, ZIPF, RANKS = 3, 2.0, 60
LEAST_LISTED = 50


def count_prompt(
    task: str,
    length: int,
    rng: np.random.Generator,
    head: int,
    draw: Callable[[int, np.random.Generator], tuple[list[int], list[int]]],
) -> EmbeddedPrompt:
    """A prompt of exactly `length` tokens: a list of words, then `head often answer`.

    Args:
        task: name of the task, for the message.
        head: token id that begins the question.
        draw: makes a list of a number of words, and the words of the answer.

    Raises:
        ValueError: the length is too short for LEAST_LISTED words.
    """
    question = [head, OFTEN, ANSWER]
    room = length - 1 - len(question)
    if room < LEAST_LISTED:
        raise too_short(task, 1 + len(question) + LEAST_LISTED, length)
    words, answer = draw(room, rng)
    return EmbeddedPrompt(words, [Question(question, with_commas(answer), [])])


def with_commas(listed: Sequence[int]) -> list[int]:
    """The words with commas between them."""
    return [token for word in listed for token in (word, COMMA)][:-1]


def common_words(
    length: int, rng: np.random.Generator, ratio: float = COMMON_RATIO, rare: int = RARE
) -> tuple[list[int], list[int]]:
    """A shuffled list in which COMMON words are about `ratio` times as frequent as the others.

    Returns:
        Token ids of the list, and of the COMMON words.
    """
    words = VALUES.start + rng.permutation(len(VALUES))[: COMMON + rare]
    rare_count = max(1, int(length / (COMMON * ratio + rare)))
    rare = min(rare, (length - 2 * COMMON) // rare_count)
    counts = np.full(COMMON + rare, rare_count)
    counts[:COMMON] = (length - rare_count * rare) // COMMON
    return shuffled(words, counts, length, rng), words[:COMMON].tolist()


def frequent_words(
    length: int, rng: np.random.Generator, exponent: float = ZIPF
) -> tuple[list[int], list[int]]:
    """A shuffled list with counts by Zipf's law, and the FREQUENT most frequent words of it."""
    words = VALUES.start + rng.permutation(len(VALUES))[:RANKS]
    counts = zipf_counts(length, exponent)
    return shuffled(words, counts, length, rng), words[:FREQUENT].tolist()


def zipf_counts(length: int, exponent: float = ZIPF) -> np.ndarray:
    """Count of each of RANKS words in a list of `length` words, by Zipf's law: int [RANKS].

    The first FREQUENT are ahead of the others by at least 1.
    """
    weight = np.arange(1, RANKS + 1) ** -exponent
    counts = (length * weight / weight.sum()).astype(int)
    counts[FREQUENT:] = np.minimum(counts[FREQUENT:], counts[FREQUENT - 1] - 1)
    return counts


def shuffled(
    drawn: np.ndarray, counts: np.ndarray, length: int, rng: np.random.Generator
) -> list[int]:
    """`length` shuffled words: each of `drawn` as often as `counts` says; the first fills up."""
    words = np.repeat(drawn[: len(counts)], counts)[:length]
    all_words = np.concatenate([np.full(length - len(words), drawn[0]), words])
    return rng.permutation(all_words).tolist()
