"""Decode steps that a request's policy has not been taken through yet.

Between two folds nothing of a request leaves, so its policy need not run at every step: keys and
values stay where they are, and only queries would be lost. So after every decode forward the
queries of requests whose policies go on are kept (queries.py), those of one batch together as long
as it stays the same (decode_rows.py); then each request takes its part, until its policy is taken
through the steps at once (forward/group_fold.py).

A request holds queries `[L, H, D]` of at most `LONGEST` steps: of fewer where entries leave more
often or many requests note queries, only of the last steps where its policy reads no others, and of
none where it reads none. They are freed when its policy has been taken through the steps, or when
the request ends or is retracted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.ir.traverse import nodes_of, state_roots

LONGEST = 64  # most decode steps that a policy is taken through at once


class NotedSteps(NamedTuple):
    """Queries of consecutive decode steps of one request.

    Attributes:
        steps: per step [F, L, H, D], of F requests that were noted together.
        place: the request's place among these.
    """

    steps: Sequence[torch.Tensor]
    place: int


def wanted(bound: Bound, prompt: int) -> int | None:
    """Number of the last pending steps whose queries are needed; None: all."""
    states = {} if bound.folded.decode is None else bound.folded.decode.states
    if any(node.type.window for node in nodes_of(state_roots(states))):
        return None
    return bound.step_queries(prompt)


@dataclass
class PendingSteps:
    """Queries of the decode steps of one request that its policy has not been taken through.

    Attributes:
        wanted: number of the last steps whose queries are needed; None: all.
        parts: queries of these steps, in their order.
    """

    wanted: int | None
    parts: list[NotedSteps] = field(default_factory=list)

    def add(self, steps: Sequence[torch.Tensor], place: int) -> None:
        """Add further noted steps; arguments as in `NotedSteps`."""
        self.parts.append(NotedSteps(steps, place))
        if self.wanted is None:
            return
        surplus = sum(len(part.steps) for part in self.parts) - self.wanted
        while surplus > 0:
            first = self.parts.pop(0)
            if len(first.steps) > surplus:
                self.parts.insert(0, NotedSteps(first.steps[surplus:], first.place))
            surplus -= len(first.steps)

    def clear(self) -> None:
        """Forget the queries: the policy has been taken through the steps."""
        self.parts.clear()
