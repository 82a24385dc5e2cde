"""A second question after the first answer and after the radix cache has been emptied."""

from __future__ import annotations

from kvpolicy.evaluation.questions.order import Order
from kvpolicy.evaluation.questions.sample import History, Sample
from kvpolicy.evaluation.tasks import multiturn

TITLE = "second question, prompt evicted from the tree"
CONTEXTS = "multiturn"


def embedded(order: Order) -> Sample:
    return multiturn.embedded(order, History.EVICTED)


def words(order: Order) -> Sample:
    return multiturn.words(order, History.EVICTED)
