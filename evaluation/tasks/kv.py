"""Key-value retrieval: one JSON object of random pairs (InfiniteBench, arXiv:2402.13718)."""

from __future__ import annotations

import uuid

from kvpolicy.evaluation.questions.embedded_turns import sample_of, whole
from kvpolicy.evaluation.questions.embedded_worlds import (
    PAIR_KEY,
    PAIR_VALUE,
    Shape,
    pairs,
    world_prompt,
)
from kvpolicy.evaluation.questions.order import Order
from kvpolicy.evaluation.questions.sample import Sample
from kvpolicy.evaluation.questions.words import Filler
from kvpolicy.evaluation.questions.words_facts import Woven, fitted, turn_of

TITLE = "key-value: the context is all pairs"
SHAPE = Shape(pairs, PAIR_KEY + PAIR_VALUE + 2, PAIR_KEY + 2, None)
LEAST_PAIR = 16  # lower bound of the tokens of a pair


def embedded(order: Order) -> Sample:
    return sample_of(order, world_prompt(order.task, order.length, order.rng, SHAPE), whole)


def words(order: Order) -> Sample:
    most = 1 + order.length // LEAST_PAIR
    ids = [str(uuid.UUID(bytes=order.rng.bytes(16), version=4)) for _ in range(2 * most)]
    keys, values = ids[:most], ids[most:]
    filler = Filler(order.rng)
    question = (
        f'\n\nQuestion: Which value does the object give for the key "{keys[0]}"?'
        f'\nAnswer: The value of the key "{keys[0]}" is'
    )

    def compose(count: int, filler_words: int) -> Woven:
        # A preface of filler takes up the length in which no further pair fits.
        preface = " ".join(
            [*filler.sentences(filler_words), "Here is a JSON object of keys and values."]
        )
        index = round(order.depth * (count - 1))
        indices = [*range(1, index + 1), 0, *range(index + 1, count)]
        lines = [f'"{keys[i]}": "{values[i]}"' for i in indices]
        introduction = f"{preface}\n\n{{\n"
        start = len(introduction) + sum(len(line) + 2 for line in lines[:index])
        text = introduction + ",\n".join(lines) + "\n}"
        return Woven(text, len(introduction), [(start, start + len(lines[index]))])

    woven = fitted(order, compose, 1, most, question)
    turn = turn_of(question, values[:1], order)
    return order.sample(woven.text, [turn], woven.depth(0), asked=woven.spans)
