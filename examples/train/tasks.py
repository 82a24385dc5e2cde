"""Retrieval questions over a closed vocabulary of 512 words (numpy only; nothing here needs torch).

A *fact* gives a key of two words a value of three words; a *question* asks for the value of a key:

    fact amber seven is oak river stone .   ...   ask amber seven answer   ->  oak river stone <end>

The facts lie in filler text. The tasks follow the retrieval families of RULER (Hsieh et al. 2024,
arXiv:2404.06654): a single needle, a needle among distractors, a context made of needles
(multi-key), and several needles asked at once (multi-query).

    import numpy as np, tasks
    sample = tasks.sample("mk", 512, np.random.default_rng(0))
    sample.prompt_ids    # exactly 512 ids; the next token is the first of the answer
    sample.answer_ids    # 3 ids; after them the model says <end> (tasks.END)
    sample.text          # the prompt as words; the tokenizer puts <s> before it
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import words

PAD, BOS, END, UNK, DOT, COMMA, FACT, IS, ASK, LIST, ANSWER = range(11)
KEYS = range(11, 139)
VALUES = range(139, 267)
FILLER = range(267, 512)
VOCABULARY_SIZE = 512

KEY_WORDS = 2
VALUE_WORDS = 3
FACT_LENGTH = 1 + KEY_WORDS + 1 + VALUE_WORDS + 1
QUESTION_LENGTH = 1 + KEY_WORDS + 1


@dataclass(frozen=True)
class Task:
    """What a sample is made of: facts in the context (None: as many as fit) and keys asked for."""

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


@dataclass
class Facts:
    """Keys, values and where each fact starts in the context."""

    keys: list[list[int]]
    values: list[list[int]]
    starts: list[int] = field(default_factory=list)

    def statement(self, i: int) -> list[int]:
        return [FACT, *self.keys[i], IS, *self.values[i], DOT]


def to_text(ids: Sequence[int]) -> str:
    """Ids as words separated by single spaces."""
    return " ".join(words.VOCABULARY[i] for i in ids)


def sample(task: str, length: int, rng: np.random.Generator) -> Sample:
    """A question of `task` whose prompt has exactly `length` tokens.

    Equal generators give equal samples. Raises ValueError for an unknown task or a length too short
    for one fact per key asked and its question.
    """
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; the tasks are {', '.join(TASKS)}")
    asked = TASKS[task].asked
    context = length - 1 - question_length(asked)
    fits = context // FACT_LENGTH
    if fits < asked:
        least = 1 + question_length(asked) + asked * FACT_LENGTH
        raise ValueError(f"a prompt of task {task!r} needs at least {least} tokens, got {length}")
    facts = draw_facts(min(TASKS[task].facts or fits, fits), rng)
    body = scatter(facts, context, rng)
    chosen = rng.choice(len(facts.keys), asked, replace=False).tolist()
    question, answer = ask(facts, chosen)
    spans = [(1 + facts.starts[i], 1 + facts.starts[i] + FACT_LENGTH) for i in chosen]
    return Sample(task, [BOS, *body, *question], answer, spans)


def question_length(asked: int) -> int:
    """Tokens from `ask` or `list` up to and with `answer`."""
    return 1 + asked * (KEY_WORDS + 1)


def answer_length(asked: int) -> int:
    """Tokens of the answer without the closing <end>."""
    if asked == 1:
        return VALUE_WORDS
    return asked * (KEY_WORDS + 1 + VALUE_WORDS + 1) - 1


def ask(facts: Facts, chosen: Sequence[int]) -> tuple[list[int], list[int]]:
    """The question for the chosen facts and its answer.

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
    """`count` facts with different keys.

    Half of the time the keys come from a narrow grid of words, so that many facts share one word
    of the key and only both words together tell them apart.
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


def scatter(facts: Facts, length: int, rng: np.random.Generator) -> list[int]:
    """The facts in order, with filler between them, `length` tokens; fills `facts.starts`."""
    context, facts.starts = spread(
        [facts.statement(i) for i in range(len(facts.keys))], length, rng
    )
    return context


def spread(
    statements: Sequence[list[int]], length: int, rng: np.random.Generator
) -> tuple[list[int], list[int]]:
    """The statements in order, with filler between them, `length` tokens; where each starts."""
    blank = length - sum(map(len, statements))
    text = filler(blank, rng).tolist()
    cuts = np.sort(rng.integers(0, blank + 1, len(statements))).tolist()
    context: list[int] = []
    starts: list[int] = []
    done = 0
    for statement, cut in zip(statements, cuts, strict=True):
        context += text[done:cut]
        starts.append(len(context))
        context += statement
        done = cut
    return context + text[done:], starts


def filler(length: int, rng: np.random.Generator) -> np.ndarray:
    """`length` filler tokens: even draws, one sentence repeated, or draws by Zipf's law."""
    kind = rng.random()
    if kind < 0.5:
        return rng.integers(FILLER.start, FILLER.stop, length)
    if kind < 0.75:
        sentence = rng.integers(FILLER.start, FILLER.stop, rng.integers(5, 25))
        return np.resize(sentence, length)
    rank = 1 / np.arange(1, len(FILLER) + 1)
    drawn = rng.choice(len(FILLER), length, p=rank / rank.sum())
    return FILLER.start + rng.permutation(len(FILLER))[drawn]


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
    # A fact asked over and over could be copied from the earlier answer: at most 3 times.
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


def lesson_needs(asked: int) -> int:
    """The shortest lesson with one fact per key asked."""
    exchange = question_length(asked) + answer_length(asked) + 1
    return 1 + asked * FACT_LENGTH + exchange


def lesson_facts(kind: str, fits: int, asked: int, rng: np.random.Generator) -> int:
    """How many facts the context holds, of the `fits` for which there is room."""
    if kind == "one fact":
        return 1
    if kind == "all facts" or rng.random() < 0.3:
        return fits
    return max(asked, int(fits * rng.random()), 1)


def copy_lesson(length: int, rng: np.random.Generator) -> Lesson:
    """A random segment and repeats of parts of it: the densest signal for copying."""
    alphabet_size = int(np.exp(rng.uniform(np.log(8), np.log(160))))
    alphabet = KEYS.start + rng.permutation(VOCABULARY_SIZE - KEYS.start)[:alphabet_size]
    size = int(rng.integers(6, max(7, length // 2 - 2)))
    segment = alphabet[rng.integers(0, alphabet_size, size)].tolist()
    result = Lesson()
    result.ids += [*segment, COMMA]
    while len(result.ids) + 4 < length:
        offset = 0 if rng.random() < 0.5 else int(rng.integers(0, max(1, size - 8)))
        part = segment[offset:][: length - len(result.ids) - 1]
        # From the middle of the segment, the first words do not tell yet where the copy is.
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
    """`count` lessons, drawn by `draw` with kinds by `mix`, which gives each kind's share.

    Returns ids [count, length] int64, padded with PAD, and is_answer, bool, alike.
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
