"""A single needle: one fact in a text about other things (RULER, arXiv:2404.06654)."""

from __future__ import annotations

from kvpolicy.evaluation.questions.embedded_turns import facts_sample
from kvpolicy.evaluation.questions.order import Order
from kvpolicy.evaluation.questions.sample import Sample
from kvpolicy.evaluation.questions.words_facts import locker_sample

TITLE = "single needle"


def embedded(order: Order) -> Sample:
    return facts_sample(order, facts=1)


def words(order: Order) -> Sample:
    return locker_sample(order, facts=1)
