"""Decode steps that a request's policy has not been taken through yet.

Between two folds nothing of a request leaves, so its policy need not look on while the model
computes: keys and values stay where they are, and queries are all that would be gone. After every
decode forward those of the requests that are followed are kept (queries.py), and each request
remembers here which are its own, until its policy is taken through the steps at once
(fold_together.py).

A request holds queries `[L, H, D]` of at most `LONGEST` steps: of fewer where entries leave more
often or many requests are followed, of the last ones only where its policy reads no others, and of
none where it reads none. They are free when it has been followed, ends or is retracted.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.ir.traverse import nodes_of, state_roots

# Queries [L, F, H, D] of F requests, and which of these is the request.
Noted = tuple[torch.Tensor, int]
LONGEST = 64  # decode steps that a policy is taken through at once, at most


def wanted(bound: Bound, prompt: int) -> int | None:
    """Pending steps whose queries are needed: the last so many; None: all, as states take each."""
    states = {} if bound.folded.decode is None else bound.folded.decode.states
    if any(node.type.window for node in nodes_of(state_roots(states))):
        return None
    return bound.step_queries(prompt)


@dataclass
class PendingSteps:
    """Decode steps of one request that its policy has not been taken through.

    Attributes:
        wanted: as of `wanted`.
        positions: of the steps' tokens.
        rows: per step, of the last ones that are wanted.
    """

    wanted: int | None
    positions: list[int] = field(default_factory=list)
    rows: deque[Noted] = field(init=False)

    def __post_init__(self) -> None:
        self.rows = deque(maxlen=self.wanted)

    def full(self, most: int) -> bool:
        """Whether the policy is to be taken through the steps before more than `most` gather."""
        return self.wanted is None and len(self.positions) >= most

    def add(self, position: int, taken: Noted | None) -> None:
        """A step has been computed.

        Args:
            taken: its queries; None if the policy will not read them.
        """
        self.positions.append(position)
        if taken is not None:
            self.rows.append(taken)

    def clear(self) -> None:
        """The policy has been taken through the steps."""
        self.positions.clear()
        self.rows.clear()
