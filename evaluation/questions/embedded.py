"""Facts and questions in the 512 words of the embedded models (numpy only).

A fact gives a key of two words a value of three words; a question asks for the value of a key:

    fact amber seven is oak river stone .   ...   ask amber seven answer   ->  oak river stone <end>

The facts are in filler text. Prompts are made as token ids, and every token is a word, so lengths
are exact. The same generator gives the same prompt; the models were trained on the same draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from kvpolicy.evaluation.questions.embedded_words import VOCABULARY
from kvpolicy.evaluation.questions.order import too_short

PAD, BOS, END, UNK, DOT, COMMA, FACT, IS, ASK, LIST, ANSWER = range(11)
KEYS = range(11, 139)
VALUES = range(139, 267)
FILLER = range(267, 512)

KEY_WORDS = 2
VALUE_WORDS = 3
FACT_LENGTH = 1 + KEY_WORDS + 1 + VALUE_WORDS + 1


@dataclass(frozen=True)
class Question:
    """A question about a context.

    Attributes:
        ids: token ids of the question, from `ask`, `list` or the like to `answer`, inclusive.
        answer: token ids of the answer, without <end>.
        needles: [start, stop) positions in the context of the statements that answer it.
    """

    ids: list[int]
    answer: list[int]
    needles: list[tuple[int, int]]


@dataclass(frozen=True)
class EmbeddedPrompt:
    """Token ids of a context, without the <s> before it, and the questions about it."""

    context: list[int]
    questions: list[Question]

    @property
    def ids(self) -> list[int]:
        """Token ids of the prompt with the first question, <s> included."""
        return [BOS, *self.context, *self.questions[0].ids]


@dataclass
class Facts:
    """Token ids of keys and values, and the start of each fact in the context."""

    keys: list[list[int]]
    values: list[list[int]]
    starts: list[int] = field(default_factory=list)

    def statement(self, i: int) -> list[int]:
        return [FACT, *self.keys[i], IS, *self.values[i], DOT]


def to_text(ids: Sequence[int]) -> str:
    """Ids as words separated by single spaces."""
    return " ".join(VOCABULARY[i] for i in ids)


def question_length(asked: int) -> int:
    """Number of tokens of a question for `asked` keys, from `ask` or `list` to `answer`."""
    return 1 + asked * (KEY_WORDS + 1)


def ask(facts: Facts, chosen: Sequence[int]) -> tuple[list[int], list[int]]:
    """Token ids of the question for the chosen facts, and of its answer.

    One key: `ask k k answer` -> `v v v`. Several: `list k k , k k answer` ->
    `k k is v v v , k k is v v v`.
    """
    if len(chosen) == 1:
        return [ASK, *facts.keys[chosen[0]], ANSWER], list(facts.values[chosen[0]])
    question, answer = [], []
    for i in chosen:
        question += [*facts.keys[i], COMMA]
        answer += [*facts.keys[i], IS, *facts.values[i], COMMA]
    return [LIST, *question[:-1], ANSWER], answer[:-1]


def draw_facts(count: int, rng: np.random.Generator) -> Facts:
    """Draws `count` facts with different keys.

    In half of the cases the keys come from a small grid of words: many facts share one word of the
    key, so that only both words together identify a fact.
    """
    if rng.random() < 0.5:
        side = min(len(KEYS), max(3, math.ceil(math.sqrt(1.5 * count))))
    else:
        side = len(KEYS)
    first, second = (KEYS.start + rng.permutation(len(KEYS))[:side] for _ in range(2))
    cells = rng.choice(side * side, count, replace=False)
    keys = [[int(first[cell // side]), int(second[cell % side])] for cell in cells]
    values = rng.integers(VALUES.start, VALUES.stop, (count, VALUE_WORDS)).tolist()
    return Facts(keys, values)


def spread(
    statements: Sequence[list[int]], length: int, rng: np.random.Generator
) -> tuple[list[int], list[int]]:
    """`length` tokens with the statements in order between filler, and each statement's start."""
    blank = length - sum(map(len, statements))
    text = filler(blank, rng).tolist()
    cuts = np.sort(rng.integers(0, blank + 1, len(statements))).tolist()
    context: list[int] = []
    starts: list[int] = []
    last_cut = 0
    for statement, cut in zip(statements, cuts, strict=True):
        context += text[last_cut:cut]
        starts.append(len(context))
        context += statement
        last_cut = cut
    return context + text[last_cut:], starts


def filler(length: int, rng: np.random.Generator) -> np.ndarray:
    """`length` filler tokens: uniform draws, one sentence repeated, or draws by Zipf's law."""
    kind = rng.random()
    if kind < 0.5:
        return rng.integers(FILLER.start, FILLER.stop, length)
    if kind < 0.75:
        sentence = rng.integers(FILLER.start, FILLER.stop, rng.integers(5, 25))
        return np.resize(sentence, length)
    weight = 1 / np.arange(1, len(FILLER) + 1)
    ranks = rng.choice(len(FILLER), length, p=weight / weight.sum())
    return FILLER.start + rng.permutation(len(FILLER))[ranks]


def scatter(facts: Facts, length: int, rng: np.random.Generator) -> list[int]:
    """`length` tokens with the facts in order between filler; sets `facts.starts`."""
    context, facts.starts = spread(
        [facts.statement(i) for i in range(len(facts.keys))], length, rng
    )
    return context


def facts_prompt(
    task: str,
    length: int,
    rng: np.random.Generator,
    facts: int | None = None,
    asked: int = 1,
    turns: int = 1,
) -> EmbeddedPrompt:
    """A prompt of exactly `length` tokens with the first question, whose context has facts.

    Args:
        task: name of the task, for the message.
        facts: number of facts in the context; None, or more than fit, for as many as fit.
        asked: number of facts in each question.
        turns: number of questions, all about different facts.

    Raises:
        ValueError: the length is too short for the facts asked for.
    """
    context = length - 1 - question_length(asked)
    fits = context // FACT_LENGTH
    if fits < asked * turns:
        least = 1 + question_length(asked) + asked * turns * FACT_LENGTH
        raise too_short(task, least, length)
    all_facts = draw_facts(min(facts or fits, fits), rng)
    body = scatter(all_facts, context, rng)
    indices = rng.choice(len(all_facts.keys), asked * turns, replace=False).tolist()
    questions = []
    for first in range(0, len(indices), asked):
        question_indices = indices[first : first + asked]
        starts = [all_facts.starts[i] for i in question_indices]
        questions.append(
            Question(
                *ask(all_facts, question_indices),
                [(start, start + FACT_LENGTH) for start in starts],
            )
        )
    return EmbeddedPrompt(body, questions)
