"""Several questions about one context, each without the others (SCBench, arXiv:2412.10319)."""

from __future__ import annotations

from kvpolicy.evaluation.questions.embedded_turns import facts_sample
from kvpolicy.evaluation.questions.order import Order
from kvpolicy.evaluation.questions.sample import History, Sample
from kvpolicy.evaluation.questions.words_facts import locker_sample

TITLE = "4 questions that share a context of 24 needles"
CONTEXTS = "multiturn"
FACTS, QUESTIONS = 24, 4


def embedded(order: Order) -> Sample:
    return facts_sample(order, FACTS, turns=QUESTIONS, history=History.SHARED)


def words(order: Order) -> Sample:
    return locker_sample(order, FACTS, turns=QUESTIONS, history=History.SHARED)
