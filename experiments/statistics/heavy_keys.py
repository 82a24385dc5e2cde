"""Keys with many of an arm's values, found with few counters (Misra and Gries 1982).

The analysis takes an arm's values as independent. Those of one key are alike, so an arm that has
few keys seems to know more than it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

COUNTERS = 40  # a count is too small by at most 1 / 41 of the values


class HeavyKeys:
    """Counts of the keys that have most values.

    Attributes:
        values: number of values of all keys.
        counts: 32 bits of a key's hash -> a number of values that it has at least.
    """

    def __init__(self) -> None:
        self.values = 0
        self.counts: dict[int, int] = {}

    def add(self, key_hash: int) -> None:
        """Counts a value of a key."""
        key = key_hash & 0xFFFFFFFF
        self.values += 1
        if key in self.counts or len(self.counts) < COUNTERS:
            self.counts[key] = self.counts.get(key, 0) + 1
        else:
            self._lower(1)

    def _lower(self, by: int) -> None:
        self.counts = {key: count - by for key, count in self.counts.items() if count > by}

    @property
    def largest(self) -> int:
        """Number of values that one key has at least."""
        return max(self.counts.values(), default=0)

    def as_document(self, with_keys: bool) -> list[Any]:
        """The counts as a JSON value; without keys only the number of values."""
        return [self.values, [list(pair) for pair in self.counts.items()] if with_keys else []]

    def take(self, documents: Sequence[Any]) -> None:
        """Adds the counts of replicas, which may have seen the same keys.

        Raises:
            ValueError, TypeError: a document is not one of `as_document`.
        """
        for values, counts in documents:
            self.values += int(values)
            for key, count in counts:
                self.counts[int(key)] = self.counts.get(int(key), 0) + int(count)
        if len(self.counts) > COUNTERS:
            self._lower(sorted(self.counts.values(), reverse=True)[COUNTERS])
