"""Of the answers to one HTTP request at most one is scored again.

The parts of a batch and the `n` answers to a prompt are alike, and the analysis takes values as
independent. The one is chosen at random when all have ended: the first to end would be a short one.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

MOST_OPEN = 64  # requests some of whose answers are awaited; one answer of each is held


@dataclass
class _Open:
    """A request: how many answers have ended, how many of them can be scored, and one of these."""

    ended: int = 0
    sound: int = 0
    chosen: Any = None


class Choices:
    """The requests that have several answers, of which some have ended."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, _Open] = OrderedDict()

    def take(self, draw: str, answers: int, answer: Any) -> Any:
        """Takes an answer that has ended; returns the answer that is to be scored now, or None.

        Args:
            draw: identifies its request.
            answers: number of answers to the request.
            answer: the answer; None if it cannot be scored.
        """
        request = self._open.setdefault(draw, _Open())
        request.ended += 1
        if answer is not None:
            request.sound += 1
            if not random.randrange(request.sound):
                request.chosen = answer
        if request.ended >= answers:
            del self._open[draw]
            return request.chosen
        if len(self._open) > MOST_OPEN:  # the oldest one may wait for what never ends
            return self._open.popitem(last=False)[1].chosen
        return None
