"""Makes samples from prompts in the words of the embedded models.

Between two turns is the <end> with which a model closes its answer, as in the sequences that the
models were trained on.
"""

from __future__ import annotations

from collections.abc import Callable

from kvpolicy.evaluation.questions import judge
from kvpolicy.evaluation.questions.embedded import (
    COMMA,
    END,
    EmbeddedPrompt,
    Question,
    facts_prompt,
    to_text,
)
from kvpolicy.evaluation.questions.embedded_words import VOCABULARY
from kvpolicy.evaluation.questions.judge import Judge
from kvpolicy.evaluation.questions.order import Order
from kvpolicy.evaluation.questions.sample import History, Sample, Turn

Marking = tuple[tuple[str, ...], Judge]
"""The items that a right answer names, and how an answer is judged."""


def sample_of(
    order: Order,
    prompt: EmbeddedPrompt,
    mark: Callable[[Question], Marking],
    history: History = History.TREE,
) -> Sample:
    """The sample that asks the questions of a prompt, one in each turn."""
    turns = []
    for number, question in enumerate(prompt.questions):
        prefix = f" {VOCABULARY[END]} " if number and history != History.SHARED else " "
        expected, answer_judge = mark(question)
        turns.append(
            Turn(
                prompt=prefix + to_text(question.ids),
                reference=" " + to_text(question.answer),
                expected=expected,
                most_tokens=len(question.answer) + 1,  # and the closing <end>
                judge=answer_judge,
            )
        )
    needles = prompt.questions[0].needles
    return order.sample(
        to_text(prompt.context),
        turns,
        depth(needles[0], len(prompt.context)) if needles else None,
        history,
        [characters(prompt.context, needle) for needle in needles],
    )


def facts_sample(
    order: Order,
    facts: int | None = None,
    asked: int = 1,
    turns: int = 1,
    history: History = History.TREE,
) -> Sample:
    """A sample whose context has facts; arguments as in `words_facts.locker_sample`."""
    prompt = facts_prompt(order.task, order.length, order.rng, facts, asked, turns)
    return sample_of(order, prompt, whole if asked == 1 else by_parts, history)


def depth(needle: tuple[int, int], length: int) -> float:
    """Depth of a needle in a context of `length` tokens: 0 at its start, 1 at its end."""
    start, stop = needle
    return start / max(1, length - (stop - start))


def characters(context: list[int], needle: tuple[int, int]) -> tuple[int, int]:
    """[start, stop) characters of a needle, from its tokens [start, stop)."""
    start, stop = needle
    offset = len(to_text(context[:start])) + 1 if start else 0
    return offset, offset + len(to_text(context[start:stop]))


def whole(question: Question) -> Marking:
    """The whole answer is one item, with which a right answer begins."""
    item = to_text(question.answer)
    return (item,), judge.beginning(item)


def by_parts(question: Question) -> Marking:
    """Each part of the answer between commas is an item with its share."""
    items = tuple(part.strip() for part in to_text(question.answer).split(VOCABULARY[COMMA]))
    return items, judge.parts(items)


def by_words(question: Question) -> Marking:
    """Each word of the answer that is not in the question is an item with its share."""
    question_ids = {COMMA, *question.ids}
    items = tuple(VOCABULARY[word] for word in question.answer if word not in question_ids)
    return items, judge.named(items)
