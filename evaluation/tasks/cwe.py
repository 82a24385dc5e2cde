"""Which words are most frequent in a list where few are common (RULER's common words)."""

from __future__ import annotations

import numpy as np
from kvpolicy.evaluation.questions.embedded import LIST
from kvpolicy.evaluation.questions.embedded_turns import by_parts, sample_of
from kvpolicy.evaluation.questions.embedded_worlds import common_words, count_prompt
from kvpolicy.evaluation.questions.order import Order
from kvpolicy.evaluation.questions.sample import Sample
from kvpolicy.evaluation.questions.words import PEOPLE, PLACES, THINGS
from kvpolicy.evaluation.questions.words_lists import list_sample

TITLE = "common words: those ten times as often as the others"
POOL = sorted({*PEOPLE, *PLACES, *THINGS})
COMMON, RATIO = 10, 10  # of the form in words


def embedded(order: Order) -> Sample:
    prompt = count_prompt(order.task, order.length, order.rng, LIST, common_words)
    return sample_of(order, prompt, by_parts)


def words(order: Order) -> Sample:
    pool = order.rng.permutation(POOL).tolist()
    return list_sample(order, pool, COMMON, counts)


def counts(length: int) -> np.ndarray:
    """Count of each word in a list of `length` words, the COMMON words first."""
    rare = min(len(POOL) - COMMON, max(COMMON, length - COMMON * RATIO))
    common = max(1, length * RATIO // (COMMON * RATIO + rare))
    rare_count, remainder = divmod(length - COMMON * common, rare)
    return np.array(
        [common] * COMMON + [rare_count + 1] * remainder + [rare_count] * (rare - remainder)
    )
