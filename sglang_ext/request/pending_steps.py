"""Decode steps that a request's policy has not been taken through yet.

Between two folds nothing of a request leaves, so its policy need not look on while the model
computes: keys and values stay where they are, and queries are all that would be gone. After every
decode forward those of the requests whose policies go on are kept (queries.py), those of one batch
together as long as it stays the same (decode_rows.py); then each request takes what is its own,
until its policy is taken through the steps at once (group_fold.py).

A request holds queries `[L, H, D]` of at most `LONGEST` steps: of fewer where entries leave more
often or many policies go on, of the last ones only where its policy reads no others, and of none
where it reads none. They are free when its policy has been taken through them, when it ends, or is
retracted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.ir.traverse import nodes_of, state_roots

LONGEST = 64  # decode steps that a policy is taken through at once, at most


class Noted(NamedTuple):
    """Queries of consecutive decode steps of one request.

    Attributes:
        steps: [F, L, H, D] of each, of F requests that were noted together.
        place: which of these the request is.
    """

    steps: Sequence[torch.Tensor]
    place: int


def wanted(bound: Bound, prompt: int) -> int | None:
    """Pending steps whose queries are needed: the last so many; None: all, as states take each."""
    states = {} if bound.folded.decode is None else bound.folded.decode.states
    if any(node.type.window for node in nodes_of(state_roots(states))):
        return None
    return bound.step_queries(prompt)


@dataclass
class PendingSteps:
    """Queries of the decode steps of one request that its policy has not been taken through.

    Attributes:
        wanted: as of `wanted`.
        parts: of the last steps that are wanted, in their order.
    """

    wanted: int | None
    parts: list[Noted] = field(default_factory=list)

    def add(self, steps: Sequence[torch.Tensor], place: int) -> None:
        """More steps have been noted; as of `Noted`."""
        self.parts.append(Noted(steps, place))
        if self.wanted is None:
            return
        surplus = sum(len(each.steps) for each in self.parts) - self.wanted
        while surplus > 0:
            first = self.parts.pop(0)
            if len(first.steps) > surplus:
                self.parts.insert(0, Noted(first.steps[surplus:], first.place))
            surplus -= len(first.steps)

    def clear(self) -> None:
        """The policy has been taken through the steps."""
        self.parts.clear()
