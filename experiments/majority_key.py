"""Whether one key carries most of the requests: a gateway has then stripped or replaced the keys.

Majority vote of Boyer and Moore (1981) over blocks of requests: one key and two counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

BLOCK = 1_000  # requests after which it begins anew, so that a change on the way is seen
ENOUGH = 200  # requests before anything is said


class MajorityKey:
    """The key that may have more than half of the requests of a block."""

    def __init__(self) -> None:
        self.key = 0
        self.votes = 0
        self.count = 0  # its requests since it is the candidate: never too many
        self.requests = 0
        self.last = (0, 0, 0)  # key, count and requests of the block before

    def add(self, key_hash: int) -> None:
        """Takes the key of a request."""
        if self.requests == BLOCK:
            self.last = (self.key, self.count, self.requests)
            self.votes = self.requests = 0
        key = key_hash & 0xFFFFFFFF
        self.requests += 1
        if not self.votes:
            self.key, self.votes, self.count = key, 1, 1
        elif key == self.key:
            self.votes += 1
            self.count += 1
        else:
            self.votes -= 1

    def shown(self) -> tuple[int, int]:
        """Requests of the key, and of all, in this block, or in the last one if this is young."""
        if self.requests < ENOUGH <= self.last[2]:
            return self.last[1:]
        return (self.count if self.votes else 0), self.requests

    @property
    def dominates(self) -> bool:
        """Whether one key has more than half of enough requests."""
        count, requests = self.shown()
        return requests >= ENOUGH and 2 * count > requests

    def as_document(self) -> list[int]:
        """The state as a JSON value."""
        return [self.key, self.votes, self.count, self.requests, *self.last]

    @classmethod
    def pooled(cls, documents: Sequence[Any]) -> MajorityKey:
        """The state of a document; of several, the one in which most requests are of one key.

        Replicas may be behind different gateways, so one of them is enough for an alarm.

        Raises:
            ValueError, TypeError: a document is none of `as_document`.
        """
        states = []
        for document in documents:
            state = cls()
            values = [int(value) for value in document]
            state.key, state.votes, state.count, state.requests, *last = values
            state.last = (last[0], last[1], last[2])
            states.append(state)
        return max(states, key=lambda s: (s.dominates, s.requests), default=cls())
