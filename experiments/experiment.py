"""An experiment: arms that share live traffic, and what they are judged by.

Plain values; `reading.py` makes them from a file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

from kvpolicy.experiments.metrics import METRICS, MetricKind, Role
from kvpolicy.experiments.quantities import duration_text, percent_text

NO_POLICY = "none"  # serves a request with full KV

# May change while an experiment runs: nobody moves between arms, and what was seen stays true.
CHANGEABLE = ("enabled", "coverage", "steps")


@dataclass(frozen=True)
class Arm:
    """One of the things compared.

    Attributes:
        name: as messages and labels show it.
        policy: name of a policy that the server has; `none` is full KV.
        weight: share of the covered keys, relative to the other arms' weights; at least 0.
        settings: values of the policy's parameters for this arm, `set` in the file.
    """

    name: str
    policy: str
    weight: float = 1.0
    settings: Mapping[str, float | bool] = field(default_factory=dict, hash=False)

    @property
    def served_as(self) -> str:
        """Name of the policy that a server has for the arm: with settings, one of its own."""
        return f"{self.policy}@{self.name}" if self.settings else self.policy


@dataclass(frozen=True)
class Key:
    """A place where the key of a request may be found.

    Attributes:
        kind: "header", "body" (a field of the JSON body, `a.b` inside an object), "session_id", or
            "rid" (the request's own id, which is always there).
        name: of the header in lower case, or of the field; empty for the others.
    """

    kind: str
    name: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}" if self.name else self.kind


DEFAULT_TARGETING_KEY = (
    Key("header", "x-smg-routing-key"),
    Key("body", "user"),
    Key("session_id"),
    Key("rid"),
)


@dataclass(frozen=True)
class Metric:
    """Something measured in every arm.

    Attributes:
        metric: a name in `metrics.METRICS`.
        role: "guardrail" (ends the experiment beyond its margin), "success" (what is hoped for) or
            "info" (shown).
        margin: of a guardrail, in the metric's unit: how much is too much.
        clip: in the metric's unit: larger values count as this one.
    """

    metric: str
    role: Role
    margin: float | None = None
    clip: float | None = None

    @property
    def kind(self) -> MetricKind:
        """What is known of the metric."""
        return METRICS[self.metric]

    @property
    def upper(self) -> float | None:
        """Largest value that one unit can have; None where nothing bounds it."""
        return 1.0 if self.kind.is_share else self.clip


@dataclass(frozen=True)
class Shadow:
    """Which requests are scored again with full KV.

    Attributes:
        sample: share of the requests, above 0 and at most 1.
        top: candidates per token whose probabilities are compared.
        tokens_per_second: most that shadow requests may compute.
    """

    sample: float
    top: int = 64
    tokens_per_second: float = 2000.0


@dataclass(frozen=True)
class Switchback:
    """All covered requests of a window of time get the arm of the window.

    Attributes:
        window: seconds.
        burn_in: seconds at the beginning of a window that are not compared.
    """

    window: float
    burn_in: float = 0.0


@dataclass(frozen=True)
class Analysis:
    """When something is decided.

    Attributes:
        alpha: most that the chance of a false alarm may be, over the whole experiment.
        min_samples: values in an arm before anything is decided about it.
        on_fail: what a breached guardrail does.
    """

    alpha: float = 0.05
    min_samples: int = 200
    on_fail: Literal["abort", "alert"] = "abort"


@dataclass(frozen=True)
class Step:
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
        name: also the salt of every draw.
        targeting_key: places of a request's key; the first that is there counts.
        enabled: False serves everything by `default`.
        coverage: share of the keys that take part, 0 to 1.
        default: policy of requests that do not take part.
        arms: at least two; the first is control.
        design: None draws an arm for each key.
        shadow: None if nothing is scored again.
        metrics: what is measured.
        analysis: when something is decided.
        steps: how coverage grows.
    """

    name: str
    targeting_key: tuple[Key, ...] = DEFAULT_TARGETING_KEY
    enabled: bool = True
    coverage: float
    default: str = NO_POLICY
    arms: tuple[Arm, ...]
    design: Switchback | None = None
    shadow: Shadow | None = None
    metrics: tuple[Metric, ...] = ()
    analysis: Analysis = Analysis()
    steps: tuple[Step, ...] = ()

    @cached_property
    def revision(self) -> str:
        """12 hex digits over everything but `CHANGEABLE`.

        The analysis and a rollback belong to a revision: new weights, policies or margins begin
        anew, a ramp goes on.
        """
        document = as_document(self)
        return _digest({key: document[key] for key in document if key not in CHANGEABLE})

    @cached_property
    def digest(self) -> str:
        """12 hex digits over everything; comments and layout do not count."""
        return _digest(as_document(self))

    @property
    def control(self) -> Arm:
        """What the other arms are compared with."""
        return self.arms[0]

    def arm(self, name: str) -> Arm:
        """The arm of a name.

        Raises:
            KeyError: there is none.
        """
        for arm in self.arms:
            if arm.name == name:
                return arm
        raise KeyError(name)

    @cached_property
    def thresholds(self) -> tuple[float, ...]:
        """Where each arm's part of [0, 1) ends, in the order of the arms."""
        ends = list(accumulate(arm.weight for arm in self.arms))
        return tuple(end / ends[-1] for end in ends)


def as_document(experiment: Experiment) -> dict[str, Any]:
    """The experiment as a JSON value, in the words of the file; `reading.read` reads its text."""
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


def _step(step: Step) -> dict[str, str]:
    if step.coverage is not None:
        return {"coverage": percent_text(step.coverage)}
    assert step.pause is not None
    return {"pause": duration_text(step.pause)}


def _number(value: float | bool) -> float | bool:
    """One way to write a number: 1 for 1.0, so that equal experiments have equal digests."""
    whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
    return int(value) if whole else value


def _digest(document: dict[str, Any]) -> str:
    # The order of arms is part of the meaning (the first is control), so keys are not sorted.
    text = json.dumps(document, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
