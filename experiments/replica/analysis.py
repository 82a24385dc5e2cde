"""What one replica has seen of one revision of an experiment, and the verdicts from it.

An `Analysis` takes numbers only: no text, no tokens, and hashes instead of keys. Its verdicts are
valid after every request; `pooled` adds the documents of several replicas. Not thread-safe.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvpolicy.experiments.definition.experiment import Experiment
from kvpolicy.experiments.definition.metrics import METRICS
from kvpolicy.experiments.replica.alarms import Alarm, alarms
from kvpolicy.experiments.replica.arm_record import empty_record
from kvpolicy.experiments.replica.assignment import in_burn_in, window_of
from kvpolicy.experiments.replica.judge import judge
from kvpolicy.experiments.replica.scoring import COMPARED
from kvpolicy.experiments.replica.verdict import Verdict
from kvpolicy.experiments.replica.windows import Windows
from kvpolicy.experiments.statistics.bounded_mean import finite
from kvpolicy.experiments.statistics.distinct_keys import DistinctKeys
from kvpolicy.experiments.statistics.majority_key import MajorityKey

WORST = 20  # number of shadowed requests with the largest drift that are kept


class Analysis:
    """Sums, counts and keys of one revision.

    Attributes:
        experiment: the revision.
        records: what was seen of each arm, by name.
        distinct: distinct keys by stage, with the test of the sample ratio.
        majority: the key that may carry most requests.
        sources: requests by the place where their key was found, in the order of `targeting_key`.
        keyless: requests whose key was found nowhere.
        windows: means of windows of time; empty unless `design: switchback`.
    """

    def __init__(self, experiment: Experiment, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            clock: seconds of a clock that never goes back.
        """
        self.experiment = experiment
        self.records = {arm.name: empty_record(experiment, arm.name) for arm in experiment.arms}
        self.distinct = DistinctKeys({arm.name: arm.weight for arm in experiment.arms}, clock)
        self.majority = MajorityKey()
        self.sources = [0] * len(experiment.targeting_key)
        self.keyless = 0
        self.windows = Windows(experiment)
        self._worst: list[tuple[float, int, str, int]] = []  # a heap: drift, number, arm, tokens
        self._clips = {metric.metric: metric.upper for metric in experiment.metrics}

    def key_source(self, index: int | None) -> None:
        """Counts the place at which a request's key was found.

        Args:
            index: position in `targeting_key`, counted from 0; None if no key was found.
        """
        if index is None:
            self.keyless += 1
        else:
            self.sources[index] += 1

    def assigned(
        self, arm: str, key_hash: int, *, seconds: float | None = None, sampled: bool = False
    ) -> None:
        """Counts a request that got an arm by its key.

        Args:
            key_hash: 64-bit hash of the key, the same in every replica.
            sampled: whether it is to be scored again.
            seconds: wall clock in seconds since 1970; used with `design: switchback` only.

        Raises:
            KeyError: the experiment has no such arm.
        """
        self.records[arm].requests += 1
        self.majority.add(key_hash)
        if self.experiment.design is None:
            self.distinct.assigned(arm, key_hash, sampled=sampled)
        elif seconds is not None:  # the arm is that of the window: keys have none
            self.windows.reached(window_of(self.experiment.design, seconds))

    def finished(
        self,
        arm: str,
        *,
        failed: bool,
        kv_bytes_per_prompt_token: float | None,
        ttft: float | None,
        e2e: float | None,
        key_hash: int,
        kept_bytes: int = 0,
        full_bytes: int = 0,
        seconds: float | None = None,
    ) -> None:
        """Takes the figures of a request that has ended.

        Args:
            failed: whether it ended in an error of the server.
            kv_bytes_per_prompt_token: KV bytes held after the prefill, divided by the prompt's
                tokens; None if not known.
            ttft: seconds to the first token; None if there was none.
            e2e: seconds to the last token; None if it failed.
            key_hash: as in `assigned`.
            kept_bytes: KV memory that its prompt holds after the prefill.
            full_bytes: what it would hold with full KV; 0 if not known.
            seconds: wall clock at which the request was assigned; with `design: switchback` a
                request without it is not compared.
        """
        record = self.records[arm]
        record.finished += 1
        record.failed += failed
        if full_bytes:
            record.kept_bytes += kept_bytes
            record.full_bytes += full_bytes
        if self.experiment.design is None:
            record.heavy.add(key_hash)
        self.distinct.ended("finished", arm, key_hash, reached=True)
        self._compared(arm, "error_rate", float(failed))
        self._in_window(arm, "error_rate", float(failed), seconds)
        self._per_request(arm, "kv_bytes_per_prompt_token", kv_bytes_per_prompt_token, seconds)
        self._times(arm, ttft, e2e, seconds)

    def aborted(
        self,
        arm: str,
        *,
        ttft: float | None,
        e2e: float | None,
        key_hash: int,
        seconds: float | None = None,
    ) -> None:
        """Takes the times of a request that its client has aborted.

        They would have been at least as long, so an arm whose clients hang up does not seem fast.

        Args:
            ttft: seconds to the first token, or until the abort if there was none; None if not
                known.
            e2e: seconds until the abort; None if not known.
            key_hash, seconds: as in `finished`.
        """
        self.distinct.ended("finished", arm, key_hash, reached=False)
        self._times(arm, ttft, e2e, seconds)

    def shadowed(self, arm: str, drift: float, top1: float, tokens: int, number: int) -> None:
        """Takes the figures of a request that was scored again with full KV; see `sample_ended`.

        A `drift` or `top1` that is not finite counts as the largest value: a policy that breaks
        the model must not vanish from its own statistics.

        Args:
            drift: mean over the scored tokens of the clipped KL divergence, in nats.
            top1: share of the scored tokens whose likeliest candidate differs, 0 to 1.
            tokens: number of scored tokens.
            number: number of the request in the server's log, by which it is found again.
        """
        record = self.records[arm]
        record.shadowed += 1
        record.shadowed_tokens += tokens
        clip = self._clips.get("drift") or METRICS["drift"].default_clip
        drift = drift if math.isfinite(drift) else clip or 0.0
        self._measured(arm, "drift", drift)
        self._measured(arm, "top1_disagreement", top1 if math.isfinite(top1) else 1.0)
        heapq.heappush(self._worst, (drift, number, arm, tokens))
        if len(self._worst) > WORST:
            heapq.heappop(self._worst)

    def sample_ended(self, arm: str, outcome: str | None, tokens: int, *, key_hash: int) -> None:
        """Counts what became of a request that was sampled to be scored again.

        Args:
            outcome: one of `scoring.OUTCOMES`, and if it is compared, `shadowed` has its figures;
                None if it had no whole answer, and so was not looked at.
            tokens: those of its prompt and output.
            key_hash: as in `assigned`.
        """
        if outcome is not None:
            self.records[arm].scoring.add(outcome, tokens)
        self.distinct.ended("shadowed", arm, key_hash, reached=outcome == COMPARED)

    @property
    def worst(self) -> list[dict[str, Any]]:
        """The shadowed requests with the largest drift, in falling order, at most `WORST`.

        Each has `arm`, `number`, `drift` and `tokens`.
        """
        return [
            {"arm": arm, "number": number, "drift": drift, "tokens": tokens}
            for drift, number, arm, tokens in sorted(self._worst, reverse=True)
        ]

    def verdicts(self) -> list[Verdict]:
        """The verdicts on the metrics in the arms of a weight above 0, as `judge.judge` says."""
        return judge(self.experiment, self.records, self.windows)

    def alarms(self) -> list[Alarm]:
        """What makes the comparison untrue now, the gravest first."""
        return alarms(
            self.experiment,
            self.records,
            self.distinct,
            self.majority,
            self.sources,
            self.keyless,
            self.windows,
        )

    def warnings(self) -> list[str]:
        """The alarms as sentences, each with a cause and a remedy."""
        return [str(alarm) for alarm in self.alarms()]

    def p_values(self) -> dict[str, float]:
        """p-value of the sample-ratio test at each stage; below `sample_ratio.ALARM` it alarms."""
        return {stage: ratio.p_value for stage, ratio in self.distinct.ratios.items()}

    def keys(self) -> dict[str, int]:
        """Distinct keys assigned to each arm; none with `design: switchback`."""
        return self.distinct.counts("assigned")

    def retire(self, arm: str) -> None:
        """Takes the keys of an arm that is rolled back out of the test of the sample ratio."""
        self.distinct.retire(arm)

    def as_document(self, *, with_keys: bool = True) -> dict[str, Any]:
        """Everything as a JSON value.

        Args:
            with_keys: include 32 bits of a hash of each key, about five bytes a key: needed to go
                on after a restart, and to pool replicas that share keys.
        """
        document: dict[str, Any] = {
            "experiment": self.experiment.name,
            "revision": self.experiment.revision,
            "sources": self.sources[:],
            "keyless": self.keyless,
            "majority": self.majority.as_document(),
            "keys": self.distinct.as_document(with_keys),
            "arms": {arm: record.as_document(with_keys) for arm, record in self.records.items()},
            "worst": self.worst,
        }
        if self.windows.clips:
            document["windows"] = self.windows.as_document()
        return document

    @classmethod
    def from_document(cls, experiment: Experiment, document: dict[str, Any]) -> Analysis:
        """The analysis of a document, which goes on from there.

        Raises:
            ValueError: the document is of another revision, or is damaged.
        """
        return pooled(experiment, [document])

    def _times(
        self, arm: str, ttft: float | None, e2e: float | None, seconds: float | None
    ) -> None:
        self._per_request(arm, "ttft_seconds", ttft, seconds)
        self._per_request(arm, "e2e_seconds", e2e, seconds)

    def _per_request(
        self, arm: str, metric: str, value: float | None, seconds: float | None
    ) -> None:
        """Adds a request's value to the arm, and to the window that it was assigned in."""
        self._measured(arm, metric, value)
        self._in_window(arm, metric, value, seconds)

    def _measured(self, arm: str, metric: str, value: float | None) -> None:
        if value is None or not math.isfinite(value):
            return
        record = self.records[arm]
        record.tallies[metric].add(value)
        mean = record.means.get(metric)
        if mean is not None:
            mean.add(_within(value, mean.upper))
        self._compared(arm, metric, value)

    def _compared(self, arm: str, metric: str, value: float) -> None:
        """Adds a value to the difference to control; a value of control counts for every arm."""
        is_control = arm == self.experiment.control.name
        for record in self.records.values() if is_control else [self.records[arm]]:
            difference = record.differences.get(metric)
            if difference is not None:
                side = "control" if is_control else "arm"
                difference.add(side, _within(value, difference.upper))

    def _in_window(self, arm: str, metric: str, value: float | None, seconds: float | None) -> None:
        design, clip = self.experiment.design, self._clips.get(metric)
        if design is None or clip is None or value is None or seconds is None:
            return
        if math.isfinite(value) and not in_burn_in(self.experiment, seconds):
            self.windows.add(window_of(design, seconds), arm, metric, _within(value, clip))


def _within(value: float, upper: float) -> float:
    """The value, or the end of [0, upper] that is nearest to it."""
    return min(max(value, 0.0), upper)


def pooled(experiment: Experiment, documents: Sequence[dict[str, Any]]) -> Analysis:
    """One analysis of what several replicas have seen.

    Raises:
        ValueError: a document is of another revision, or is damaged.
    """
    for document in documents:
        revision = document.get("revision") if isinstance(document, dict) else None
        if revision != experiment.revision:
            raise ValueError(
                f"the analysis is of revision {revision}, the experiment `{experiment.name}` is "
                f"of revision {experiment.revision}; what they saw cannot be added"
            )
    try:
        return _pooled(experiment, documents)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        message = f"the analysis of `{experiment.name}` is damaged: {type(error).__name__}: {error}"
        raise ValueError(message) from error


def _pooled(experiment: Experiment, documents: Sequence[dict[str, Any]]) -> Analysis:
    analysis = Analysis(experiment)
    for name, record in analysis.records.items():
        record.take([document["arms"][name] for document in documents])
    weights = {arm.name: arm.weight for arm in experiment.arms}
    analysis.distinct = DistinctKeys.pooled(weights, [document["keys"] for document in documents])
    analysis.majority = MajorityKey.pooled([document["majority"] for document in documents])
    for document in documents:
        added = zip(analysis.sources, document["sources"], strict=True)
        analysis.sources = [before + int(more) for before, more in added]
        analysis.keyless += int(document.get("keyless", 0))  # which earlier versions lack
    if analysis.windows.clips:
        windows = [document["windows"] for document in documents]
        analysis.windows = Windows.pooled(experiment, windows)
    worst = [
        (
            finite(request["drift"]),
            int(request["number"]),
            str(request["arm"]),
            int(request["tokens"]),
        )
        for document in documents
        for request in document["worst"]
    ]
    analysis._worst = heapq.nlargest(WORST, worst)
    heapq.heapify(analysis._worst)
    return analysis
