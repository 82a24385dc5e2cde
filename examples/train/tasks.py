"""Retrieval questions over a closed vocabulary of 512 words (numpy only; nothing here needs torch).

A *fact* gives a key of two words a value of three words; a *question* asks for the value of a key:

    fact amber seven is oak river stone .   ...   ask amber seven answer   ->  oak river stone <end>

The facts lie in filler text. The tasks follow the retrieval families of RULER (Hsieh et al. 2024,
arXiv:2404.06654): a single needle, a needle among distractors, a context made of needles
(multi-key), and several needles asked at once (multi-query).

    import numpy as np, tasks
    sample = tasks.sample("mk", 512, np.random.default_rng(0))
    sample.prompt_ids    # exactly 512 ids; the next token is the first of the answer
    sample.answer_ids    # 3 ids; after them the model says <end>
    sample.text          # the prompt as words; the tokenizer puts <s> before it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from kvpolicy.evaluation.questions.embedded import (
    BOS,
    COMMA,
    END,
    FACT_LENGTH,
    KEY_WORDS,
    KEYS,
    PAD,
    VALUE_WORDS,
    EmbeddedPrompt,
    ask,
    draw_facts,
    facts_prompt,
    question_length,
    scatter,
    to_text,
)
from kvpolicy.evaluation.questions.embedded_words import VOCABULARY


@dataclass(frozen=True)
class Task:
    """Numbers of facts in the context (None: as many as fit) and of keys asked for."""

    title: str
    facts: int | None
    asked: int = 1


TASKS = {
    "niah": Task("single needle", facts=1),
    "distractors": Task("needle among 7 others", facts=8),
    "mk": Task("multi-key: the context is all needles", facts=None),
    "mq": Task("multi-query: 3 of 24 needles asked at once", facts=24, asked=3),
}


@dataclass(frozen=True)
class Sample:
    """One question at the end of a context.

    `needles` are the [start, stop) positions in the prompt of the facts asked for, in the order
    asked; the value's words are the last three before the closing dot.
    """

    task: str
    prompt_ids: list[int]
    answer_ids: list[int]
    needles: list[tuple[int, int]]

    @property
    def text(self) -> str:
        """The prompt in words, without the <s> that the tokenizer adds."""
        return to_text(self.prompt_ids[1:])

    @property
    def answer_text(self) -> str:
        return to_text(self.answer_ids)


def sample(task: str, length: int, rng: np.random.Generator) -> Sample:
    """A question of `task` whose prompt has exactly `length` tokens.

    Equal generators give equal samples. Raises ValueError for an unknown task or a length too short
    for one fact per key asked and its question.
    """
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; the tasks are {', '.join(TASKS)}")
    kind = TASKS[task]
    return sample_of(task, facts_prompt(task, length, rng, kind.facts, kind.asked))


def sample_of(task: str, prompt: EmbeddedPrompt) -> Sample:
    """The prompt's first question as a sample."""
    question = prompt.questions[0]
    # <s> precedes the context.
    needles = [(start + 1, stop + 1) for start, stop in question.needles]
    return Sample(task, prompt.ids, question.answer, needles)


# Training sequences: a context, then as many questions as fit.

MIX = {"some facts": 0.42, "all facts": 0.24, "one fact": 0.08, "several asked": 0.22, "copy": 0.04}


@dataclass
class Lesson:
    """A training sequence; the loss counts the tokens in `answers`, [start, stop) spans."""

    ids: list[int] = field(default_factory=lambda: [BOS])
    answers: list[tuple[int, int]] = field(default_factory=list)

    def ask(self, question: list[int], answer: list[int]) -> None:
        start = len(self.ids) + len(question)
        self.ids += [*question, *answer, END]
        self.answers.append((start, len(self.ids)))


def lesson(kind: str, length: int, rng: np.random.Generator) -> Lesson:
    """A sequence of at most `length` tokens; `kind` is a key of MIX."""
    if kind == "copy":
        return copy_lesson(length, rng)
    asked = int(rng.integers(2, 5)) if kind == "several asked" else 1
    while asked > 2 and lesson_needs(asked) > length:
        asked -= 1
    exchange = question_length(asked) + answer_length(asked) + 1
    context = min(length - 1 - exchange, int((length - 1) * rng.uniform(0.45, 0.9)))
    context = max(context, asked * FACT_LENGTH)
    facts = draw_facts(lesson_facts(kind, context // FACT_LENGTH, asked, rng), rng)
    result = Lesson()
    result.ids += scatter(facts, context, rng)
    count = len(facts.keys)
    # A fact is asked for at most 3 times, as later answers could be copied from earlier ones.
    order = np.concatenate([rng.permutation(count) for _ in range(3)]).tolist()
    for turn in range((length - len(result.ids)) // exchange):
        if asked > 1:
            chosen = rng.choice(count, asked, replace=False).tolist()
        elif turn < len(order):
            chosen = [order[turn]]
        else:
            break
        result.ask(*ask(facts, chosen))
    return result


def answer_length(asked: int) -> int:
    """Number of tokens of the answer, without <end>."""
    if asked == 1:
        return VALUE_WORDS
    return asked * (KEY_WORDS + 1 + VALUE_WORDS + 1) - 1


def lesson_needs(asked: int) -> int:
    """Length of the shortest lesson with one fact per key asked for."""
    exchange = question_length(asked) + answer_length(asked) + 1
    return 1 + asked * FACT_LENGTH + exchange


def lesson_facts(kind: str, fits: int, asked: int, rng: np.random.Generator) -> int:
    """Number of facts in the context, at most the `fits` for which there is room."""
    if kind == "one fact":
        return 1
    if kind == "all facts" or rng.random() < 0.3:
        return fits
    return max(asked, int(fits * rng.random()), 1)


def copy_lesson(length: int, rng: np.random.Generator) -> Lesson:
    """A random segment and repeats of parts of it: the densest signal for copying."""
    alphabet_size = int(np.exp(rng.uniform(np.log(8), np.log(160))))
    alphabet = KEYS.start + rng.permutation(len(VOCABULARY) - KEYS.start)[:alphabet_size]
    size = int(rng.integers(6, max(7, length // 2 - 2)))
    segment = alphabet[rng.integers(0, alphabet_size, size)].tolist()
    result = Lesson()
    result.ids += [*segment, COMMA]
    while len(result.ids) + 4 < length:
        offset = 0 if rng.random() < 0.5 else int(rng.integers(0, max(1, size - 8)))
        part = segment[offset:][: length - len(result.ids) - 1]
        # In the middle of the segment, the first words do not identify the place to copy.
        start = len(result.ids) + (0 if offset == 0 else min(3, len(part)))
        result.answers.append((start, len(result.ids) + len(part)))
        result.ids += [*part, COMMA]
    return result


def batch(
    count: int,
    length: int,
    rng: np.random.Generator,
    mix: Mapping[str, float] = MIX,
    draw: Callable[[str, int, np.random.Generator], Lesson] = lesson,
) -> tuple[np.ndarray, np.ndarray]:
    """`count` lessons drawn by `draw`; `mix` gives the share of each kind.

    Returns:
        ids, int64 [count, length], padded with PAD; is_answer, bool [count, length].
    """
    ids = np.full((count, length), PAD, np.int64)
    is_answer = np.zeros((count, length), bool)
    kinds = rng.choice(list(mix), count, p=list(mix.values()))
    for row, kind in enumerate(kinds):
        drawn = draw(str(kind), length, rng)
        ids[row, : len(drawn.ids)] = drawn.ids[:length]
        for start, stop in drawn.answers:
            is_answer[row, start:stop] = True
    return ids, is_answer
