"""Lists of words to count, in English."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from kvpolicy.evaluation.questions.embedded_worlds import shuffled
from kvpolicy.evaluation.questions.order import Order, too_short
from kvpolicy.evaluation.questions.sample import Sample
from kvpolicy.evaluation.questions.words import largest
from kvpolicy.evaluation.questions.words_facts import turn_of

LEAST_LISTED = 40
INTRODUCTION = "Here is a list of words. A question about how often they come follows.\n\n"


def list_sample(
    order: Order, words: Sequence[str], top: int, counts: Callable[[int], np.ndarray]
) -> Sample:
    """A sample that asks for the most frequent words of a list.

    Args:
        words: different words; the first `top` are asked for.
        top: number of words asked for.
        counts: function from the length of a list to the count of each word in it.

    Raises:
        ValueError: a list of LEAST_LISTED words does not fit.
    """
    seed = int(order.rng.integers(2**63))
    question = (
        f"\n\nQuestion: Which {top} words come most often in the list?"
        f"\nAnswer: The {top} words that come most often in the list are"
    )

    def context(extra: int) -> str:
        length = LEAST_LISTED + extra
        indices = np.arange(len(words))
        shuffled_indices = shuffled(indices, counts(length), length, np.random.default_rng(seed))
        return INTRODUCTION + ", ".join(words[i] for i in shuffled_indices) + "."

    def size(extra: int) -> int:
        return order.count(context(extra) + question)

    if size(0) > order.length:
        raise too_short(order.task, size(0), order.length)
    extra = largest(size, order.length, order.length, order.length // 2)
    return order.sample(context(extra), [turn_of(question, words[:top], order)])
