"""A second question, asked of the compressed copy of the first turn."""

from __future__ import annotations

from kvpolicy.evaluation.questions.order import Order
from kvpolicy.evaluation.questions.sample import History, Sample
from kvpolicy.evaluation.tasks import multiturn

TITLE = "second question, on the compressed copy"
CONTEXTS = "multiturn"


def embedded(order: Order) -> Sample:
    return multiturn.embedded(order, History.COPY)


def words(order: Order) -> Sample:
    return multiturn.words(order, History.COPY)
