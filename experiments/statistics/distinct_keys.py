"""Distinct keys by arm and stage, each counted once, for the test of the sample ratio.

Requests of one key come in bursts and share their arm, so requests are not independent draws; keys
are. Of each key, 32 bits of a hash are kept, and the arm in which it was seen first: another key
with the same hash is not counted in another arm. At the later stages keys count in the order in
which they set out (`waiting_line.py`), so that a slower arm does not look like a smaller one.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from kvpolicy.experiments.statistics.bounded_mean import finite
from kvpolicy.experiments.statistics.sample_ratio import SampleRatio
from kvpolicy.experiments.statistics.waiting_line import WaitingLine

MAX_KEYS = 200_000  # only the first ones are kept; the order does not depend on their arms
STAGES = ("assigned", "finished", "shadowed")

_LOW = (1 << 32) - 1
_BITS = len(STAGES)


class DistinctKeys:
    """Keys seen, and a sequential test of the sample ratio for each stage.

    Attributes:
        arms: names in the order of the experiment.
        ratios: the test of each stage, over the arms that are not retired.
        retired: arm that takes no further keys -> stage -> number of keys that it had.
    """

    def __init__(
        self, weights: Mapping[str, float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            clock: seconds of a clock that never goes back.
        """
        self.arms = list(weights)
        self._weights = list(weights.values())
        self.ratios = {stage: SampleRatio(self._weights) for stage in STAGES}
        self.retired: dict[str, dict[str, int]] = {}
        # Hash of a key -> the index of its arm, above one bit for each stage that it has reached.
        self._seen: dict[int, int] = {}
        self._clock = clock
        self._lines = {stage: WaitingLine() for stage in STAGES[1:]}

    def __len__(self) -> int:
        return len(self._seen)

    def assigned(self, arm: str, key_hash: int, *, sampled: bool = False) -> None:
        """Counts a key the first time that a request of it is assigned, until there are `MAX_KEYS`.

        Args:
            sampled: whether this request is to be scored again.
        """
        if arm in self.retired:
            return
        key, index = key_hash & _LOW, self.arms.index(arm)
        if key not in self._seen:
            if len(self._seen) >= MAX_KEYS:
                return
            self._seen[key] = index << _BITS
            self._count("assigned", key)
        if self._seen[key] >> _BITS == index:
            for stage in STAGES[1 : 3 if sampled else 2]:
                if not self._has_reached(stage, key):
                    self._lines[stage].set_out(key, self._clock())
        for stage in self._lines:
            self._advance(stage)

    def ended(self, stage: str, arm: str, key_hash: int, *, reached: bool) -> None:
        """Notes that a request of a key has got to a later stage, or never will.

        The key counts once this is known of all keys that set out before it, or
        `waiting_line.PATIENCE` has passed for them.
        """
        key = key_hash & _LOW
        if self._seen.get(key, -1) >> _BITS == self.arms.index(arm):
            self._lines[stage].end(key, arrived=reached)
            self._advance(stage)

    def _advance(self, stage: str) -> None:
        for key in self._lines[stage].leaving(self._clock()):
            if self.arms[self._seen[key] >> _BITS] not in self.retired:
                self._count(stage, key)

    def _has_reached(self, stage: str, key: int) -> bool:
        return bool(self._seen[key] >> STAGES.index(stage) & 1)

    def _count(self, stage: str, key: int) -> None:
        self._seen[key] |= 1 << STAGES.index(stage)
        self.ratios[stage].add(self._seen[key] >> _BITS)

    def retire(self, arm: str) -> None:
        """Takes an arm out of the tests: it gets no further keys.

        The other arms are compared among themselves from now on. The keys that they have already
        count, since their shares among these arms follow the weights too.
        """
        if arm in self.retired:
            return
        index = self.arms.index(arm)
        self.retired[arm] = {stage: self.ratios[stage].counts[index] for stage in STAGES}
        counts = {stage: self.ratios[stage].counts for stage in STAGES}
        self._set_counts(counts)

    def _set_counts(self, counts: Mapping[str, Sequence[int]]) -> None:
        """Begins the tests again with these counts, by stage and arm, without retired arms."""
        gone = {self.arms.index(arm) for arm in self.retired}
        weights = [0.0 if i in gone else weight for i, weight in enumerate(self._weights)]
        if not any(weights):
            return
        self.ratios = {
            stage: SampleRatio(
                weights, [0 if i in gone else n for i, n in enumerate(counts[stage])]
            )
            for stage in STAGES
        }

    def counts(self, stage: str) -> dict[str, int]:
        """Distinct keys of each arm at a stage."""
        seen = dict(zip(self.arms, self.ratios[stage].counts, strict=True))
        return seen | {arm: counts[stage] for arm, counts in self.retired.items()}

    def as_document(self, with_keys: bool) -> dict[str, Any]:
        """Counts and p-values by stage, as a JSON value.

        Args:
            with_keys: include the hashes of the keys in base64, grouped by arm and stages reached.
                Without them keys are counted again after a restart, and keys that several replicas
                have seen count several times.
        """
        document: dict[str, Any] = {
            "counts": {stage: ratio.counts[:] for stage, ratio in self.ratios.items()},
            "p_values": {stage: ratio.p_value for stage, ratio in self.ratios.items()},
            "retired": self.retired,
        }
        if with_keys:
            document["keys"] = self._packed()
        return document

    def _packed(self) -> dict[str, str]:
        size = len(self._seen)
        keys = np.fromiter(self._seen.keys(), dtype="<u4", count=size)
        states = np.fromiter(self._seen.values(), dtype=np.int64, count=size)
        return {
            str(state): base64.b64encode(np.sort(keys[states == state]).tobytes()).decode()
            for state in np.unique(states)
        }

    @classmethod
    def pooled(
        cls, weights: Mapping[str, float], documents: Sequence[dict[str, Any]]
    ) -> DistinctKeys:
        """The keys of several documents: each once if all documents have hashes, else counts added.

        p-values are those of the pooled counts, since the smallest of several would be too small
        too often. With a single document its smallest p-value so far is kept.

        Raises:
            ValueError, KeyError, TypeError: a document is not one of `as_document`.
        """
        pooled = cls(weights)
        if documents and all("keys" in document for document in documents):
            counts = pooled._union([document["keys"] for document in documents])
        else:
            counts = {stage: [0] * len(pooled.arms) for stage in STAGES}
            for document in documents:
                for stage in STAGES:
                    added = zip(counts[stage], document["counts"][stage], strict=True)
                    counts[stage] = [a + int(b) for a, b in added]
        for document in documents:
            for arm, had in document["retired"].items():
                sums = pooled.retired.setdefault(arm, dict.fromkeys(STAGES, 0))
                for stage in STAGES:
                    sums[stage] += int(had[stage])
        pooled._set_counts(counts)
        if len(documents) == 1:
            for stage, ratio in pooled.ratios.items():
                ratio.p_value = min(ratio.p_value, finite(documents[0]["p_values"][stage]))
        return pooled

    def _union(self, packed: Sequence[dict[str, str]]) -> dict[str, list[int]]:
        """Takes over the keys of documents; returns the number of keys by stage and arm."""
        for keys in packed:
            for written, text in keys.items():
                state = int(written)
                if not 0 <= state >> _BITS < len(self.arms):
                    raise ValueError("a key is of an arm that there is not")
                for key in np.frombuffer(base64.b64decode(text), dtype="<u4").tolist():
                    known = self._seen.get(key, state)
                    same = known >> _BITS == state >> _BITS
                    self._seen[key] = known | state if same else known
        counts = {stage: [0] * len(self.arms) for stage in STAGES}
        for state in self._seen.values():
            for number, stage in enumerate(STAGES):
                counts[stage][state >> _BITS] += state >> number & 1
        return counts
