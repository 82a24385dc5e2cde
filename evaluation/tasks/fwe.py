"""Which made-up words are most frequent, with counts by Zipf's law (RULER's frequent words)."""

from __future__ import annotations

import numpy as np
from kvpolicy.evaluation.questions.embedded import ASK
from kvpolicy.evaluation.questions.embedded_turns import by_parts, sample_of
from kvpolicy.evaluation.questions.embedded_worlds import (
    FREQUENT,
    RANKS,
    count_prompt,
    frequent_words,
    zipf_counts,
)
from kvpolicy.evaluation.questions.order import Order
from kvpolicy.evaluation.questions.sample import Sample
from kvpolicy.evaluation.questions.words_lists import list_sample

TITLE = "frequent words: the first 3 by Zipf's law"
CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
SYLLABLES = [consonant + vowel for consonant in CONSONANTS for vowel in VOWELS]


def embedded(order: Order) -> Sample:
    prompt = count_prompt(order.task, order.length, order.rng, ASK, frequent_words)
    return sample_of(order, prompt, by_parts)


def words(order: Order) -> Sample:
    return list_sample(order, coded(RANKS, order.rng), FREQUENT, zipf_counts)


def coded(count: int, rng: np.random.Generator) -> list[str]:
    """`count` different made-up words of three syllables."""
    cells = rng.choice(len(SYLLABLES) ** 3, count, replace=False).tolist()
    return [
        "".join(SYLLABLES[cell // len(SYLLABLES) ** i % len(SYLLABLES)] for i in range(3))
        for cell in cells
    ]
