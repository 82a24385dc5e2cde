"""Prometheus metrics on SGLang's own /metrics, labelled by policy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvpolicy.experiments.definition.experiment import NO_POLICY
from kvpolicy.sglang_ext.face.errors import Refused
from kvpolicy.sglang_ext.request.reasons import Reason

# Seconds; compression of a prompt takes from under a millisecond to some seconds.
_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

# Name without `sglang:kv_policy_` -> help. Series of `BY_REASON` have a label `reason` too.
COUNTERS = {
    "requests_total": "Requests by policy, at the end of their prefill; `none`: without one.",
    "prompt_tokens_total": "Prompt tokens of requests that were compressed.",
    "prompt_entries_total": "Entries of compressed prompts before compression; an entry is one key "
    "and one value of one layer and KV head.",
    "kept_entries_total": "Entries kept of compressed prompts.",
    "prompt_bytes_total": "KV memory of compressed prompts before compression, in bytes.",
    "saved_bytes_total": "KV memory of compressed prompts less that of their compressed copies, in "
    "bytes.",
    "propagated_tokens_total": "Prompt tokens that the last layer saw, of policies by which tokens "
    "leave the prefill.",
    "folds_total": "Times that entries left while a request decoded.",
    "decode_dropped_entries_total": "Entries that left while requests decoded.",
    "skipped_folds_total": "Times that entries should have left, but there were no slots for what "
    "would stay.",
}
BY_REASON: dict[str, tuple[str, tuple[Reason, ...]]] = {
    "uncompressed_requests_total": (
        "Requests of a policy that were served in full, by reason.",
        tuple(Reason),
    ),
    "failed_requests_total": (
        "Requests that a policy ended with an error.",
        (Reason.POLICY_ERROR,),
    ),
}
HISTOGRAMS = {
    "compression_seconds": "Time spent on scoring and compacting one prompt.",
    "fold_seconds": "Time spent on one fold of one request: waiting for how many stay, and "
    "writing.",
}
GAUGES = {
    "private_slots": "Slots (of one token in every layer) that hold compressed entries now.",
    "enabled": "1, or 0 if the policy has failed so often that its requests are served in full.",
}


class Metrics:
    """Counters of what policies did; without labels (metrics are off) nothing is exported."""

    def __init__(self, labels: Mapping[str, str] | None, policies: Iterable[str]) -> None:
        """
        Args:
            labels: labels and values of SGLang's scheduler metrics; None where metrics are off.
            policies: names of the policies that are served from the start.

        Raises:
            Refused: a label has the name of one of the plugin's labels.
        """
        self._on, self._begun = labels is not None, set[str]()
        if labels is None:
            return
        for name in ("policy", "reason"):
            if name in labels:
                raise Refused(
                    f"--extra-metric-labels has `{name}`, by which series of policies are told "
                    "apart; call that label otherwise."
                )
        # SGLang has set the multiprocess folder by now; imported earlier, the library misses it.
        from prometheus_client import Counter, Gauge, Histogram

        self._labels = dict(labels)
        names, prefix = [*labels, "policy"], "sglang:kv_policy_"
        reasons = [*names, "reason"]
        self._metrics: dict[str, Any] = {
            **{name: Counter(prefix + name, text, names) for name, text in COUNTERS.items()},
            **{name: Counter(prefix + name, t, reasons) for name, (t, _) in BY_REASON.items()},
            **{
                name: Histogram(prefix + name, text, names, buckets=_BUCKETS)
                for name, text in HISTOGRAMS.items()
            },
            **{
                name: Gauge(prefix + name, text, names, multiprocess_mode="mostrecent")
                for name, text in GAUGES.items()
            },
        }
        self._of("requests_total", NO_POLICY)
        for policy in policies:
            self.begin(policy)

    def begin(self, policy: str) -> None:
        """Create all series of a policy that is served, if they do not exist yet."""
        if not self._on or policy in self._begun:
            return
        self._begun.add(policy)
        for name in (*COUNTERS, *HISTOGRAMS):
            self._of(name, policy)
        for name, (_, values) in BY_REASON.items():
            for reason in values:
                self._of(name, policy, reason=reason.value)
        self.private_slots(policy, 0)
        self.enabled(policy, on=True)

    def _of(self, name: str, policy: str, **labels: str) -> Any:
        return self._metrics[name].labels(**self._labels, policy=policy, **labels)

    def _add(self, policy: str, **amounts: int) -> None:
        if self._on:
            for name, amount in amounts.items():
                self._of(name, policy).inc(max(amount, 0))

    def _observe(self, policy: str, name: str, seconds: float) -> None:
        if self._on:
            self._of(name, policy).observe(seconds)

    def without_policy(self) -> None:
        """Count a request that no policy applies to, at the end of its prefill."""
        self._add(NO_POLICY, requests_total=1)

    def compressed(
        self,
        policy: str,
        *,
        prompt: int,
        entries: tuple[int, int],
        size: tuple[int, int],
        seconds: float,
    ) -> None:
        """Count a request whose prompt was compressed.

        Args:
            prompt: N, tokens of the prompt.
            entries, size: entries and bytes, each before and after.
        """
        self._add(
            policy,
            requests_total=1,
            prompt_tokens_total=prompt,
            prompt_entries_total=entries[0],
            kept_entries_total=entries[1],
            prompt_bytes_total=size[0],
            saved_bytes_total=size[0] - size[1],
        )
        self._observe(policy, "compression_seconds", seconds)

    def propagated(self, policy: str, tokens: int) -> None:
        """Count the tokens of a prompt that the last layer saw."""
        self._add(policy, propagated_tokens_total=tokens)

    def uncompressed(self, policy: str, reason: Reason) -> None:
        """Count a request that is served in full, at the end of its prefill."""
        self._add(policy, requests_total=1)
        self.gave_up(policy, reason)

    def ended_with_prompt(self, policy: str) -> None:
        """Count a request that its policy ended with an error before its first token."""
        self._add(policy, requests_total=1)

    def gave_up(self, policy: str, reason: Reason) -> None:
        """Count why a request, counted already, goes on in full."""
        if self._on:
            self._of("uncompressed_requests_total", policy, reason=reason.value).inc()

    def failed(self, policy: str, reason: Reason) -> None:
        """Count a request that a policy ended with an error."""
        if self._on:
            self._of("failed_requests_total", policy, reason=reason.value).inc()

    def folded(self, policy: str, dropped: int, seconds: float) -> None:
        """Count a fold of a request, in which `dropped` entries left."""
        self._add(policy, folds_total=1, decode_dropped_entries_total=dropped)
        self._observe(policy, "fold_seconds", seconds)

    def skipped_fold(self, policy: str) -> None:
        """Count a fold for which there were no slots."""
        self._add(policy, skipped_folds_total=1)

    def private_slots(self, policy: str, slots: int) -> None:
        """Set the private slots that the requests of a policy hold now."""
        if self._on:
            self._of("private_slots", policy).set(slots)

    def enabled(self, policy: str, *, on: bool) -> None:
        """Set whether a policy is applied to its requests."""
        if self._on:
            self._of("enabled", policy).set(int(on))
