"""One fact is asked for, among seven others (RULER's first multi-key task)."""

from __future__ import annotations

from kvpolicy.evaluation.questions.embedded_turns import facts_sample
from kvpolicy.evaluation.questions.order import Order
from kvpolicy.evaluation.questions.sample import Sample
from kvpolicy.evaluation.questions.words_facts import locker_sample

TITLE = "needle among 7 others"


def embedded(order: Order) -> Sample:
    return facts_sample(order, facts=8)


def words(order: Order) -> Sample:
    return locker_sample(order, facts=8)
