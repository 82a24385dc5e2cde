"""Prometheus metrics on SGLang's own /metrics, labelled by policy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

# Seconds; compression of a prompt takes from under a millisecond to some seconds.
_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Metrics:
    """Counters of what policies did; without labels (metrics are off) nothing is exported."""

    def __init__(self, labels: Mapping[str, str] | None, policies: Iterable[str]) -> None:
        """
        Args:
            labels: labels and values of SGLang's own scheduler metrics, or None.
            policies: names that appear from the start, at zero.
        """
        self._on = labels is not None
        if labels is None:
            return
        # SGLang has set the multiprocess folder by now; imported earlier, the library misses it.
        from prometheus_client import Counter, Gauge, Histogram

        self._labels = dict(labels)
        names = [*labels, "policy"]
        prefix = "sglang:kv_policy_"
        self._requests = Counter(
            prefix + "requests_total",
            "Requests that a KV-cache policy applied to, at the end of their prefill.",
            names,
        )
        self._prompt_tokens = Counter(
            prefix + "prompt_tokens_total", "Prompt tokens of requests that were compressed.", names
        )
        self._kept = Counter(
            prefix + "kept_entries_total",
            "Entries kept; an entry is one key and one value of one layer and KV head.",
            names,
        )
        self._saved = Counter(
            prefix + "saved_bytes_total",
            "KV memory of compressed prompts less that of their compressed copies, in bytes.",
            names,
        )
        self._propagated = Counter(
            prefix + "propagated_tokens_total",
            "Prompt tokens that the last layer saw, of policies by which tokens leave the prefill.",
            names,
        )
        self._uncompressed = Counter(
            prefix + "uncompressed_requests_total",
            "Requests of a policy that were served in full, by reason.",
            [*names, "reason"],
        )
        self._seconds = Histogram(
            prefix + "compression_seconds",
            "Time spent on scoring and compacting one prompt.",
            names,
            buckets=_BUCKETS,
        )
        self._folds = Counter(
            prefix + "folds_total", "Times that entries left while a request decoded.", names
        )
        self._skipped = Counter(
            prefix + "skipped_folds_total",
            "Times that entries should have left, but there were no slots for what would stay.",
            names,
        )
        self._fold_seconds = Histogram(
            prefix + "fold_seconds",
            "Time spent on one fold of one request: waiting for how many stay, and writing.",
            names,
            buckets=_BUCKETS,
        )
        self._slots = Gauge(
            prefix + "private_slots",
            "Slots (of one token in every layer) that hold compressed entries now.",
            names,
            multiprocess_mode="mostrecent",
        )
        for policy in policies:
            for metric in (self._requests, self._prompt_tokens, self._kept, self._saved):
                metric.labels(**self._labels, policy=policy)
            for metric in (self._seconds, self._folds, self._skipped, self._fold_seconds):
                metric.labels(**self._labels, policy=policy)
            self.private_slots(policy, 0)

    def compressed(
        self, policy: str, *, prompt: int, kept: int, saved_bytes: int, seconds: float
    ) -> None:
        """A prompt of so many tokens was compressed to so many entries."""
        if not self._on:
            return
        labels = {**self._labels, "policy": policy}
        self._requests.labels(**labels).inc()
        self._prompt_tokens.labels(**labels).inc(prompt)
        self._kept.labels(**labels).inc(kept)
        self._saved.labels(**labels).inc(max(saved_bytes, 0))
        self._seconds.labels(**labels).observe(seconds)

    def propagated(self, policy: str, tokens: int) -> None:
        """The last layer saw so many tokens of a prompt."""
        if self._on:
            self._propagated.labels(**self._labels, policy=policy).inc(tokens)

    def uncompressed(self, policy: str, reason: str) -> None:
        """A request was served in full."""
        if self._on:
            labels = {**self._labels, "policy": policy}
            self._requests.labels(**labels).inc()
            self._uncompressed.labels(**labels, reason=reason).inc()

    def folded(self, policy: str, seconds: float) -> None:
        """Entries of a request left at a decode step."""
        if self._on:
            self._folds.labels(**self._labels, policy=policy).inc()
            self._fold_seconds.labels(**self._labels, policy=policy).observe(seconds)

    def skipped_fold(self, policy: str) -> None:
        """There were no slots for a fold."""
        if self._on:
            self._skipped.labels(**self._labels, policy=policy).inc()

    def private_slots(self, policy: str, slots: int) -> None:
        """Slots that the requests of a policy hold now."""
        if self._on:
            self._slots.labels(**self._labels, policy=policy).set(slots)
