"""Whether one key carries most of the requests, as when a gateway strips or replaces the keys.

Boyer and Moore's majority vote (1981) over blocks of requests: it keeps one key and two counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

BLOCK = 1_000  # requests of a block; the vote begins anew with each, so that a change is seen
ENOUGH = 200  # requests before anything is decided


class MajorityKey:
    """The key that may have more than half of the requests of a block.

    Attributes:
        key: 32 bits of the hash of the candidate.
        votes: votes of the candidate; at 0 the next key becomes the candidate.
        count: requests of the candidate since it became that, so at most all of its requests.
        requests: requests of the present block.
        last: key, count and requests of the block before.
    """

    def __init__(self) -> None:
        self.key = 0
        self.votes = 0
        self.count = 0
        self.requests = 0
        self.last = (0, 0, 0)

    def add(self, key_hash: int) -> None:
        """Counts a request of a key."""
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
        """Requests of the candidate and of all keys in this block.

        In the last block while this one has fewer than `ENOUGH` requests.
        """
        if self.requests < ENOUGH <= self.last[2]:
            return self.last[1:]
        return (self.count if self.votes else 0), self.requests

    @property
    def dominates(self) -> bool:
        """Whether one key has more than half of at least `ENOUGH` requests."""
        count, requests = self.shown()
        return requests >= ENOUGH and 2 * count > requests

    def as_document(self) -> list[int]:
        """The state as a JSON value."""
        return [self.key, self.votes, self.count, self.requests, *self.last]

    @classmethod
    def pooled(cls, documents: Sequence[Any]) -> MajorityKey:
        """The state of one of the documents: one in which a key dominates, if there is any.

        Replicas may be behind different gateways, so a single one is enough for an alarm. Among
        equals the one with the most requests counts.

        Raises:
            ValueError, TypeError, IndexError: a document is not one of `as_document`.
        """
        states = []
        for document in documents:
            state = cls()
            values = [int(value) for value in document]
            state.key, state.votes, state.count, state.requests, *last = values
            state.last = (last[0], last[1], last[2])
            states.append(state)
        return max(states, key=lambda s: (s.dominates, s.requests), default=cls())
