"""Variables that point to variables, in chains of assignments (RULER's variable tracking)."""

from __future__ import annotations

import numpy as np
from kvpolicy.evaluation.questions.embedded_turns import by_words, sample_of
from kvpolicy.evaluation.questions.embedded_worlds import HOPS, Shape, chains, world_prompt
from kvpolicy.evaluation.questions.order import Order
from kvpolicy.evaluation.questions.sample import Sample
from kvpolicy.evaluation.questions.words import Filler, numbers
from kvpolicy.evaluation.questions.words_facts import Woven, fitted, turn_of, weave

TITLE = "variable tracking: a chain of 4 hops among 6"
SHAPE = Shape(chains, 4, 3, 24, HOPS)
CHAINS, BOXES = 6, 1 + HOPS
CONSONANTS = "BCDFGHJKLMNPQRSTVWXZ"


def embedded(order: Order) -> Sample:
    prompt = world_prompt(order.task, order.length, order.rng, SHAPE)
    return sample_of(order, prompt, by_words)


def words(order: Order) -> Sample:
    rng = order.rng
    boxes, values = labels(CHAINS * BOXES, rng), numbers(CHAINS, 5, rng)
    places = [place for chain in range(CHAINS) for place in ordered(order, chain)]
    filler = Filler(rng)
    statements = [
        f"Box {box} gets what box {boxes[i - 1]} holds."
        if i % BOXES
        else f"Box {box} gets the number {values[i // BOXES]}."
        for i, box in enumerate(boxes)
    ]
    question = (
        f"\n\nQuestion: Which {BOXES} boxes hold the number {values[0]} in the end?"
        f"\nAnswer: The {BOXES} boxes that hold the number {values[0]} are"
    )
    introduction = "In the text below, boxes get numbers. A question about them follows.\n\n"

    def compose(count: int, filler_words: int) -> Woven:
        links = count * BOXES
        return weave(
            introduction, statements[:links], places[:links], filler.sentences(filler_words)
        )

    woven = fitted(order, compose, 1, CHAINS, question)
    turn = turn_of(question, boxes[:BOXES], order)
    return order.sample(woven.text, [turn], woven.depth(0), asked=woven.spans[:BOXES])


def ordered(order: Order, chain: int) -> list[float]:
    """Places of a chain's statements, 0 to 1, rising; the first chain begins at `order.depth`."""
    if chain:
        return np.sort(order.rng.random(BOXES)).tolist()
    return [order.depth, *np.sort(order.rng.uniform(order.depth, 1, BOXES - 1)).tolist()]


def labels(count: int, rng: np.random.Generator) -> list[str]:
    """`count` different names of three consonants."""
    cells = rng.choice(len(CONSONANTS) ** 3, count, replace=False).tolist()
    return [
        "".join(CONSONANTS[cell // len(CONSONANTS) ** i % len(CONSONANTS)] for i in range(3))
        for cell in cells
    ]
