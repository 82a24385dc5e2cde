"""What one replica has seen of one arm: counts, sums, and the statistics of each metric."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvpolicy.experiments.definition.experiment import Experiment, Metric
from kvpolicy.experiments.replica.scoring import Scoring
from kvpolicy.experiments.statistics.bounded_mean import BoundedMean, finite
from kvpolicy.experiments.statistics.difference import PairedDifference
from kvpolicy.experiments.statistics.heavy_keys import HeavyKeys


@dataclass
class Tally:
    """Number and sum of values without a bound."""

    n: int = 0
    total: float = 0.0

    def add(self, value: float) -> None:
        """Takes one value."""
        self.n += 1
        self.total += value

    @property
    def mean(self) -> float | None:
        """Mean of the values, None before the first."""
        return self.total / self.n if self.n else None


TALLIES = ("kv_bytes_per_prompt_token", "ttft_seconds", "e2e_seconds", "drift", "top1_disagreement")


@dataclass
class ArmRecord:
    """Counts of requests and tokens, and the statistics of each metric.

    Attributes:
        requests: assigned ones.
        scoring: what became of the sampled ones.
        kept_bytes, full_bytes: KV memory that prompts of finished requests hold, and would hold
            with full KV.
        heavy: the keys that have most of the finished ones; empty with `design: switchback`.
        tallies: number and sum of the values of each metric of `TALLIES`.
        means: bounded means, by metric. A metric has one of these, a difference to control, or
            neither: where its values have no bound, or where windows are compared.
        differences: arm minus control, by metric.
    """

    requests: int = 0
    finished: int = 0
    failed: int = 0
    shadowed: int = 0
    shadowed_tokens: int = 0
    scoring: Scoring = field(default_factory=Scoring)
    kept_bytes: int = 0
    full_bytes: int = 0
    heavy: HeavyKeys = field(default_factory=HeavyKeys)
    tallies: dict[str, Tally] = field(default_factory=lambda: {name: Tally() for name in TALLIES})
    means: dict[str, BoundedMean] = field(default_factory=dict)
    differences: dict[str, PairedDifference] = field(default_factory=dict)

    @property
    def kept(self) -> float | None:
        """Share of full KV's memory that prompts hold; None before the first."""
        return self.kept_bytes / self.full_bytes if self.full_bytes else None

    def as_document(self, with_keys: bool) -> dict[str, Any]:
        """The record as a JSON value, with or without hashes of keys."""
        return {
            **{name: getattr(self, name) for name in _COUNTS},
            "scoring": self.scoring.as_document(),
            "memory": [self.kept_bytes, self.full_bytes],
            "heavy": self.heavy.as_document(with_keys),
            "tallies": {name: [tally.n, tally.total] for name, tally in self.tallies.items()},
            "means": {name: mean.as_document() for name, mean in self.means.items()},
            "differences": {
                name: change.as_document() for name, change in self.differences.items()
            },
        }

    def take(self, documents: Sequence[dict[str, Any]]) -> None:
        """Adds the records of replicas to this empty one.

        Raises:
            ValueError, KeyError, TypeError: a document is not one of `as_document`.
        """
        for document in documents:
            for name in _COUNTS:
                setattr(self, name, getattr(self, name) + int(document[name]))
            kept, full = document.get("memory", (0, 0))  # which earlier versions lack
            self.kept_bytes += int(kept)
            self.full_bytes += int(full)
            for name, tally in self.tallies.items():
                n, total = document["tallies"][name]
                tally.n += int(n)
                tally.total += finite(total)
        # Evidence of earlier versions lacks these.
        self.scoring.take([document.get("scoring", {}) for document in documents])
        self.heavy.take([document.get("heavy", (0, ())) for document in documents])
        for name, mean in self.means.items():
            read = [BoundedMean.from_document(document["means"][name]) for document in documents]
            self.means[name] = BoundedMean.pooled([mean, *read])
        for name, difference in self.differences.items():
            difference.take([document["differences"][name] for document in documents])


_COUNTS = ("requests", "finished", "failed", "shadowed", "shadowed_tokens")


def empty_record(experiment: Experiment, arm: str) -> ArmRecord:
    """A record without values, with the statistics of each metric whose unit is the request."""
    record = ArmRecord()
    is_control = arm == experiment.control.name
    for metric in experiment.metrics:
        upper = metric.upper
        if upper is None:
            continue
        if metric.kind.compared == "margin":
            record.means[metric.metric] = BoundedMean(upper, None if is_control else metric.margin)
        elif experiment.design is not None:
            continue  # arms take turns: windows are the unit
        elif metric.kind.latency:
            # Arms of one replica share its batches: times are shown and not compared.
            record.means[metric.metric] = BoundedMean(upper)
        elif not is_control:
            record.differences[metric.metric] = PairedDifference(upper, judged_margin(metric))
    return record


def judged_margin(metric: Metric) -> float | None:
    """The difference to control that bets are made against: 0 for a success metric."""
    return 0.0 if metric.role == "success" else metric.margin
