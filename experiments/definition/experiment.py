"""An experiment: arms that share live traffic, and what they are judged by.

Plain values; `reading.py` makes them from a file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

from kvpolicy.dsl.syntax import parse
from kvpolicy.experiments.definition.metrics import METRICS, MetricKind, Role
from kvpolicy.experiments.definition.quantities import duration_text, percent_text

NO_POLICY = parse.NO_POLICY  # serves a request with full KV

# Keys that may change while an experiment runs: no request's key moves to another arm, and what
# was seen stays valid.
CHANGEABLE = ("enabled", "coverage", "steps")


@dataclass(frozen=True)
class Arm:
    """One of the policies that share the traffic.

    Attributes:
        name: as messages and labels show it.
        policy: name of a policy that the server has; `none` for full KV.
        weight: share of the covered keys, relative to the other arms' weights; at least 0.
        settings: values of the policy's parameters for this arm, `set` in the file.
    """

    name: str
    policy: str
    weight: float = 1.0
    settings: Mapping[str, float | bool] = field(default_factory=dict, hash=False)

    @property
    def served_as(self) -> str:
        """Name under which a server has the arm's policy: `POLICY@ARM` if the arm has settings."""
        return f"{self.policy}@{self.name}" if self.settings else self.policy


@dataclass(frozen=True)
class KeySource:
    """A place where the key of a request may be found.

    Attributes:
        kind: "header", "body" (a field of the JSON body, `a.b` inside an object), "session_id", or
            "rid" (the request's own id, which is always there).
        name: name of the header in lower case, or of the field; empty for the other kinds.
    """

    kind: str
    name: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}" if self.name else self.kind


DEFAULT_TARGETING_KEY = (
    KeySource("header", "x-smg-routing-key"),
    KeySource("body", "user"),
    KeySource("session_id"),
    KeySource("rid"),
)


@dataclass(frozen=True)
class Metric:
    """Something measured in every arm.

    Attributes:
        metric: a name in `metrics.METRICS`.
        role: "guardrail" (rolls an arm back beyond its margin), "success" (the hoped-for gain) or
            "info" (shown only).
        margin: largest acceptable loss of a guardrail, in the metric's unit; None for other roles.
        clip: in the metric's unit; larger values count as this one. None for no clip.
    """

    metric: str
    role: Role
    margin: float | None = None
    clip: float | None = None

    @property
    def kind(self) -> MetricKind:
        """The metric's row in `metrics.METRICS`."""
        return METRICS[self.metric]

    @property
    def upper(self) -> float | None:
        """Largest value that a request can have, in the metric's unit; None without a bound."""
        return 1.0 if self.kind.is_share else self.clip


@dataclass(frozen=True)
class Shadow:
    """Which requests are scored again with full KV.

    Attributes:
        sample: share of the requests, above 0 and at most 1.
        top: number of candidates per token whose probabilities are compared.
        tokens_per_second: largest number of tokens that shadow requests may compute per second.
    """

    sample: float
    top: int = 64
    tokens_per_second: float = 2000.0


@dataclass(frozen=True)
class Switchback:
    """A design in which all covered requests of a window of time get the arm of the window.

    Attributes:
        window: length of a window in seconds.
        burn_in: seconds at the beginning of a window whose requests are not compared.
    """

    window: float
    burn_in: float = 0.0


@dataclass(frozen=True)
class AnalysisRules:
    """When the experiment decides.

    Attributes:
        alpha: largest chance of a false alarm, over the whole experiment.
        min_samples: values in an arm before anything is decided about it; requests where windows
            are compared.
        on_fail: what a breached guardrail does: "abort" rolls its arm back, "alert" is logged.
    """

    alpha: float = 0.05
    min_samples: int = 200
    on_fail: Literal["abort", "alert"] = "abort"


@dataclass(frozen=True)
class CoverageStep:
    """A change of coverage, or a pause; exactly one of them is given.

    Attributes:
        coverage: share of the keys from here on.
        pause: seconds until the next step.
    """

    coverage: float | None = None
    pause: float | None = None


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Everything that an experiment file says.

    Attributes:
        name: its name, also the salt of every draw.
        targeting_key: places to look for a request's key; the first place that has one counts.
        enabled: False serves all requests by `default`.
        coverage: share of the keys that take part, 0 to 1, before the first step.
        default: policy of requests that do not take part.
        arms: at least two; the first is control.
        design: None for `design: request`, which draws an arm for each key.
        shadow: which requests are scored again; None for none.
        metrics: what is measured.
        analysis: when the experiment decides.
        steps: how coverage grows.
    """

    name: str
    targeting_key: tuple[KeySource, ...] = DEFAULT_TARGETING_KEY
    enabled: bool = True
    coverage: float
    default: str = NO_POLICY
    arms: tuple[Arm, ...]
    design: Switchback | None = None
    shadow: Shadow | None = None
    metrics: tuple[Metric, ...] = ()
    analysis: AnalysisRules = AnalysisRules()
    steps: tuple[CoverageStep, ...] = ()

    @cached_property
    def revision(self) -> str:
        """Digest of everything but `CHANGEABLE`, 12 hex digits.

        The analysis and rollbacks belong to a revision: with new weights, policies or margins they
        begin anew, with other steps of coverage they go on.
        """
        document = as_document(self)
        return _digest({key: document[key] for key in document if key not in CHANGEABLE})

    @cached_property
    def digest(self) -> str:
        """Digest of everything but comments and layout, 12 hex digits."""
        return _digest(as_document(self))

    @property
    def control(self) -> Arm:
        """The arm that the other arms are compared with."""
        return self.arms[0]

    def arm(self, name: str) -> Arm:
        """The arm with a name.

        Raises:
            KeyError: the experiment has no such arm.
        """
        for arm in self.arms:
            if arm.name == name:
                return arm
        raise KeyError(name)

    def shares(self, without: Collection[str] = ()) -> dict[str, float]:
        """Share of the covered keys that the weights give each arm; 0 for arms of `without`."""
        weights = {arm.name: 0.0 if arm.name in without else arm.weight for arm in self.arms}
        total = sum(weights.values())
        return {name: weight / total for name, weight in weights.items()}

    @cached_property
    def thresholds(self) -> tuple[float, ...]:
        """End of each arm's part of [0, 1), in the order of the arms."""
        ends = list(accumulate(arm.weight for arm in self.arms))
        return tuple(end / ends[-1] for end in ends)


def as_document(experiment: Experiment) -> dict[str, Any]:
    """The experiment as a JSON value with the keys of the file; `reading.read` reads its text."""
    document: dict[str, Any] = {
        "experiment": experiment.name,
        "enabled": experiment.enabled,
        "targeting_key": [str(key) for key in experiment.targeting_key],
        "coverage": percent_text(experiment.coverage),
        "default": experiment.default,
        "arms": {arm.name: _arm(arm) for arm in experiment.arms},
        "design": _design(experiment.design),
    }
    if experiment.shadow is not None:
        document["shadow"] = {
            "sample": percent_text(experiment.shadow.sample),
            "top": experiment.shadow.top,
            "tokens_per_second": _number(experiment.shadow.tokens_per_second),
        }
    document["metrics"] = [_metric(metric) for metric in experiment.metrics]
    document["analysis"] = {
        "alpha": experiment.analysis.alpha,
        "min_samples": experiment.analysis.min_samples,
        "on_fail": experiment.analysis.on_fail,
    }
    if experiment.steps:
        document["steps"] = [_step(step) for step in experiment.steps]
    return document


def _arm(arm: Arm) -> dict[str, Any]:
    document: dict[str, Any] = {"policy": arm.policy, "weight": _number(arm.weight)}
    if arm.settings:
        values = sorted(arm.settings.items())
        document["set"] = {name: _number(value) for name, value in values}
    return document


def _design(design: Switchback | None) -> str | dict[str, Any]:
    if design is None:
        return "request"
    window, burn_in = duration_text(design.window), duration_text(design.burn_in)
    return {"switchback": {"window": window, "burn_in": burn_in}}


def _metric(metric: Metric) -> dict[str, Any]:
    document: dict[str, Any] = {"metric": metric.metric, "role": metric.role}
    for key, value in (("margin", metric.margin), ("clip", metric.clip)):
        if value is not None:
            document[key] = _number(value)
    return document


def _step(step: CoverageStep) -> dict[str, str]:
    if step.coverage is not None:
        return {"coverage": percent_text(step.coverage)}
    assert step.pause is not None
    return {"pause": duration_text(step.pause)}


def _number(value: float | bool) -> float | bool:
    """A whole float as an int, so that 1 and 1.0 give equal digests."""
    whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
    return int(value) if whole else value


def _digest(document: dict[str, Any]) -> str:
    # The order of arms is part of the meaning (the first is control), so keys are not sorted.
    text = json.dumps(document, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
