"""A second question after the first answer; the prompt's full KV is still in the radix cache.

After SCBench's multi-turn form (arXiv:2412.10319). `multiturn_evicted` and `multiturn_copy` have
the same conversations, after the cache has been emptied and on the compressed copy.
"""

from __future__ import annotations

from kvpolicy.evaluation.questions.embedded_turns import facts_sample
from kvpolicy.evaluation.questions.order import Order
from kvpolicy.evaluation.questions.sample import History, Sample
from kvpolicy.evaluation.questions.words_facts import locker_sample

TITLE = "second question, full KV in the tree"
FACTS, QUESTIONS = 24, 2


def embedded(order: Order, history: History = History.TREE) -> Sample:
    return facts_sample(order, FACTS, turns=QUESTIONS, history=history)


def words(order: Order, history: History = History.TREE) -> Sample:
    return locker_sample(order, FACTS, turns=QUESTIONS, history=history)
