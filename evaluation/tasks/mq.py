"""Several facts are asked for at once (RULER's multi-query task)."""

from __future__ import annotations

from kvpolicy.evaluation.questions.embedded_turns import facts_sample
from kvpolicy.evaluation.questions.order import Order
from kvpolicy.evaluation.questions.sample import Sample
from kvpolicy.evaluation.questions.words_facts import locker_sample

TITLE = "multi-query: several of 24 needles at once"


def embedded(order: Order) -> Sample:
    return facts_sample(order, facts=24, asked=3)


def words(order: Order) -> Sample:
    return locker_sample(order, facts=24, asked=4)
