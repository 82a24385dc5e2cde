"""Prometheus series of an experiment, on SGLang's own /metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from kvpolicy.experiments.definition.experiment import Experiment
from kvpolicy.experiments.replica.assignment import AssignmentReason
from kvpolicy.experiments.replica.judge import breach_threshold
from kvpolicy.experiments.replica.lifecycle import ExperimentState, Lifecycle
from kvpolicy.experiments.replica.scoring import OUTCOMES

if TYPE_CHECKING:
    from kvpolicy.experiments.replica.analysis import Analysis, Verdict

ENDS = ("ok", "failed", "aborted")
_PREFIX = "sglang:kv_experiment_"
_DRIFT = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)  # nats per token

_COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "assignments_total": (
        "Requests by the arm that they were assigned, and why; `kv_arm` is empty for none.",
        ("kv_arm", "reason"),
    ),
    "key_sources_total": (
        "Requests by the place where their targeting key was found; `none` for no key.",
        ("source",),
    ),
    "finished_total": ("Requests of an arm that have ended, by outcome.", ("kv_arm", "outcome")),
    "shadow_total": (
        "Requests that were sampled to be scored against full KV, by what became of them.",
        ("kv_arm", "outcome"),
    ),
    "shadow_tokens_total": ("Output tokens that were compared with full KV.", ("kv_arm",)),
    "shadow_top1_disagreements_total": (
        "Of these, the ones whose most probable candidate is another with full KV.",
        ("kv_arm",),
    ),
    "prompt_bytes_total": ("KV memory of prompts before compression, in bytes.", ("kv_arm",)),
    "saved_bytes_total": ("KV memory that compression of prompts saved, in bytes.", ("kv_arm",)),
}
_GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "state": ("1 for the state in which the experiment is, 0 for the others.", ("state",)),
    "arm_share_ratio": ("Share of the keys that take part that an arm is to have.", ("kv_arm",)),
    "arm_enabled": ("1, or 0 if an arm has been rolled back or is gone.", ("kv_arm",)),
    "coverage_ratio": ("Share of the keys that take part now.", ()),
    "keys": ("Distinct targeting keys of an arm.", ("kv_arm",)),
    "log_e_value": (
        "Evidence on a metric against its margin: that it is beyond it (breach), that it is within "
        "(clear); natural logarithm.",
        ("kv_arm", "metric", "against"),
    ),
    "breach_threshold": (
        "Evidence at which a guardrail is breached: log of guardrails times arms over alpha.",
        (),
    ),
    "srm_p_value": (
        "Sequential p-value of the shares of the arms, by stage; under 0.001 they are not what the "
        "weights say.",
        ("stage",),
    ),
    "reload_success": ("1 if the file is in use as it was last seen, else 0.", ()),
    "state_saved": (
        "1 if --kv-experiment-state holds the present state, else 0, as without that option.",
        (),
    ),
}
# Gauges of what is gone, where not 0: series shared by several processes cannot be removed.
_GONE = {"srm_p_value": 1.0, "reload_success": 1.0, "state_saved": 1.0}


class Series:
    """The series of one experiment; without labels (metrics are off) nothing is exported."""

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        self._metrics: dict[str, Any] | None = None
        self._base: dict[str, str] = {}
        self._gauges: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}  # as last set
        self._no_keys()

    def export(self, labels: Mapping[str, str]) -> None:
        """Begin to export, by SGLang's own labels; what was noted before comes with it."""
        # SGLang has set the multiprocess folder by now; imported earlier, the library misses it.
        from prometheus_client import Counter, Gauge, Histogram

        self._base = dict(labels)
        names = [*labels, "kv_experiment"]
        self._metrics = {
            **{
                n: Counter(_PREFIX + n, text, [*names, *series_labels])
                for n, (text, series_labels) in _COUNTERS.items()
            },
            **{
                n: Gauge(
                    _PREFIX + n, text, [*names, *series_labels], multiprocess_mode="mostrecent"
                )
                for n, (text, series_labels) in _GAUGES.items()
            },
            "shadow_drift": Histogram(
                _PREFIX + "shadow_drift",
                "Mean over a request's tokens of KL(policy || full KV), in nats, clipped.",
                [*names, "kv_arm"],
                buckets=_DRIFT,
            ),
        }
        for (name, series_labels), value in self._gauges.items():
            self._show(name, series_labels, value)
        self._count_nothing()

    def begin_revision(self, experiment: Experiment) -> None:
        """A revision begins: series of its arms are created, gauges of others reset."""
        renamed = experiment.name != self._experiment.name
        gauges = dict(self._gauges)
        for name, labels in gauges:
            if labels or renamed:
                self._show(name, labels, _GONE.get(name, 0.0))
        self._experiment = experiment
        self._gauges.clear()
        for (name, labels), value in gauges.items():
            if not labels:
                self._set(name, value)
        self._no_keys()
        self._count_nothing()

    def _no_keys(self) -> None:
        for arm in self._experiment.arms:
            self._set("keys", 0, kv_arm=arm.name)

    def _count_nothing(self) -> None:
        experiment = self._experiment
        for key in ("none", *map(str, experiment.targeting_key)):
            self._count("key_sources_total", 0, source=key)
        for arm in experiment.arms:
            self._count(
                "assignments_total", 0, kv_arm=arm.name, reason=AssignmentReason.SPLIT.value
            )
            for end in ENDS:
                self._count("finished_total", 0, kv_arm=arm.name, outcome=end)
            for outcome in OUTCOMES:
                self._count("shadow_total", 0, kv_arm=arm.name, outcome=outcome)
            for name in ("shadow_tokens_total", "shadow_top1_disagreements_total"):
                self._count(name, 0, kv_arm=arm.name)
            for name in ("prompt_bytes_total", "saved_bytes_total"):
                self._count(name, 0, kv_arm=arm.name)

    def assigned(self, arm: str | None, reason: AssignmentReason) -> None:
        """A request has been assigned an arm, or none."""
        self._count("assignments_total", 1, kv_arm=arm or "", reason=reason.value)

    def key_source(self, place: int | None) -> None:
        """A request's key was found at this place among the targeting keys; None: nowhere."""
        keys = self._experiment.targeting_key
        self._count("key_sources_total", 1, source="none" if place is None else str(keys[place]))

    def finished(self, arm: str, outcome: str) -> None:
        """A request of an arm has ended."""
        self._count("finished_total", 1, kv_arm=arm, outcome=outcome)

    def memory(self, arm: str, before: int, after: int) -> None:
        """A prompt took so many bytes before and after compression."""
        self._count("prompt_bytes_total", before, kv_arm=arm)
        self._count("saved_bytes_total", max(before - after, 0), kv_arm=arm)

    def shadow(self, arm: str, outcome: str) -> None:
        """A sampled request was compared, or why not: `outcome` is one of `OUTCOMES`."""
        self._count("shadow_total", 1, kv_arm=arm, outcome=outcome)

    def drift(self, arm: str, drift: float, top1: float, tokens: int) -> None:
        """A sampled request was compared with full KV; arguments as in `Live.shadowed`."""
        self._count("shadow_tokens_total", tokens, kv_arm=arm)
        self._count("shadow_top1_disagreements_total", round(top1 * tokens), kv_arm=arm)
        if self._metrics is not None:
            self._labelled("shadow_drift", kv_arm=arm).observe(drift)

    def statistics(self, analysis: Analysis, verdicts: Iterable[Verdict]) -> None:
        """The evidence now, for the gauges."""
        for verdict in verdicts:
            for against, value in (
                ("breach", verdict.log_e_breach),
                ("clear", verdict.log_e_clear),
            ):
                if value is not None:
                    labels = {"kv_arm": verdict.arm, "metric": verdict.metric, "against": against}
                    self._set("log_e_value", value, **labels)
        for stage, value in analysis.p_values().items():
            self._set("srm_p_value", value, stage=stage)
        for arm, keys in analysis.keys().items():
            self._set("keys", keys, kv_arm=arm)

    def standing(self, lifecycle: Lifecycle) -> None:
        """Where the experiment stands now, for the gauges."""
        current = lifecycle.state
        for state in ExperimentState:
            self._set("state", float(state == current), state=state.value)
        self._set("coverage_ratio", lifecycle.coverage)
        self._set("breach_threshold", breach_threshold(lifecycle.experiment))
        for name, share in lifecycle.experiment.shares().items():
            self._set("arm_share_ratio", share, kv_arm=name)
        for arm in self._experiment.arms:
            self._set("arm_enabled", float(arm.name not in lifecycle.rolled_back), kv_arm=arm.name)

    def reloaded(self, success: bool) -> None:
        """The experiment's file, as last seen, is in use or not."""
        self._set("reload_success", float(success))

    def saved(self, success: bool) -> None:
        """The state file holds the present state or not."""
        self._set("state_saved", float(success))

    def _labelled(self, name: str, **labels: str) -> Any:
        assert self._metrics is not None
        return self._metrics[name].labels(
            **self._base, kv_experiment=self._experiment.name, **labels
        )

    def _count(self, name: str, amount: float, **labels: str) -> None:
        if self._metrics is not None:
            self._labelled(name, **labels).inc(amount)

    def _set(self, name: str, value: float, **labels: str) -> None:
        self._gauges[name, tuple(labels.items())] = value
        self._show(name, tuple(labels.items()), value)

    def _show(self, name: str, labels: tuple[tuple[str, str], ...], value: float) -> None:
        if self._metrics is not None:
            self._labelled(name, **dict(labels)).set(value)
