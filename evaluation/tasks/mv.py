"""All values of one key are asked for (RULER's multi-value task)."""

from __future__ import annotations

from kvpolicy.evaluation.questions.embedded import FACT_LENGTH, question_length
from kvpolicy.evaluation.questions.embedded_turns import by_parts, sample_of
from kvpolicy.evaluation.questions.embedded_worlds import (
    VALUES_PER_KEY,
    Shape,
    many_values,
    world_prompt,
)
from kvpolicy.evaluation.questions.order import Order
from kvpolicy.evaluation.questions.sample import Sample
from kvpolicy.evaluation.questions.words import Filler, names, numbers
from kvpolicy.evaluation.questions.words_facts import (
    DIGITS,
    INTRODUCTION,
    Woven,
    fitted,
    turn_of,
    weave,
)

TITLE = "multi-value: every value of a key among 24 facts"
SHAPE = Shape(many_values, FACT_LENGTH, question_length(VALUES_PER_KEY), 24, VALUES_PER_KEY)
KEYS, EACH = 6, 4  # of the form in words


def embedded(order: Order) -> Sample:
    prompt = world_prompt(order.task, order.length, order.rng, SHAPE)
    return sample_of(order, prompt, by_parts)


def words(order: Order) -> Sample:
    keys, values = names(KEYS, order.rng), numbers(KEYS * EACH, DIGITS, order.rng)
    places = [order.depth, *order.rng.random(KEYS * EACH - 1).tolist()]
    filler = Filler(order.rng)
    statements = [
        f"One locker number of the {keys[i // EACH]} is {value}." for i, value in enumerate(values)
    ]
    question = (
        f"\n\nQuestion: Which {EACH} locker numbers does the text give for the {keys[0]}?"
        f"\nAnswer: The {EACH} locker numbers of the {keys[0]} are"
    )

    def compose(count: int, filler_words: int) -> Woven:
        facts = count * EACH
        return weave(
            INTRODUCTION, statements[:facts], places[:facts], filler.sentences(filler_words)
        )

    woven = fitted(order, compose, 1, KEYS, question)
    turn = turn_of(question, values[:EACH], order)
    return order.sample(woven.text, [turn], woven.depth(0), asked=woven.spans[:EACH])
