"""Documents of experiments as servers send them: real lifecycles and analyses, random values."""

import random
from collections.abc import Mapping
from typing import Any

from kvpolicy.experiments.definition import reading
from kvpolicy.experiments.definition.experiment import Experiment
from kvpolicy.experiments.replica.analysis import Analysis
from kvpolicy.experiments.replica.assignment import assign
from kvpolicy.experiments.replica.document import document
from kvpolicy.experiments.replica.lifecycle import Lifecycle

TEXT = """\
experiment: lava-25
coverage: 1 %
arms:
  control: {policy: none}
  lava-25: {policy: lava@0.25}
shadow: {sample: 2 %}
metrics:
  - {metric: drift, role: guardrail, margin: 0.05, clip: 2}
  - {metric: top1_disagreement, role: guardrail, margin: 0.05}
  - {metric: error_rate, role: guardrail, margin: 0.02}
  - {metric: kv_bytes_per_prompt_token, role: success, clip: 4096}
  - {metric: ttft_seconds, role: info, clip: 30}
steps: [{pause: 30m}, {coverage: 10 %}, {pause: 2h}, {coverage: 100 %}]
"""
SWITCHBACK = TEXT.replace(
    "arms:", "design: {switchback: {window: 10m, burn_in: 1m}}\narms:"
).replace("role: info, clip: 30", "role: guardrail, margin: 2, clip: 30")
THREE = TEXT.replace("shadow:", "  sinks-6: {policy: sinks-recent@0.06}\nshadow:")
LEFT_OUT = ({"busy": 2}, {"over_budget": 4})  # sampled requests of the first two arms


def experiment(text: str = TEXT) -> Experiment:
    """The experiment of a text."""
    return reading.read(text, "experiment.yaml").require()


class Made:
    """One replica's experiment.

    Attributes:
        lifecycle, analysis: as in a server.
        clock: time of the lifecycle in seconds.
    """

    def __init__(self, text: str = TEXT, name: str = "t") -> None:
        self.clock = 1000.0
        self.lifecycle = Lifecycle(
            experiment(text), clock=lambda: self.clock, now=lambda: f"{name}{self.clock:06.0f}"
        )
        self.analysis = Analysis(self.lifecycle.experiment)
        self.reload: dict[str, Any] = {"success": True, "problem": None}
        self.state_saved = self.state_file = True
        for arm, outcomes in zip(self.analysis.records, LEFT_OUT, strict=False):
            for outcome, count in outcomes.items():
                for _ in range(count):
                    self.analysis.sample_ended(arm, outcome, 64, key_hash=-1)

    def wait(self, seconds: float) -> None:
        """Moves the clock on."""
        self.clock += seconds

    def document(self) -> dict[str, Any]:
        """The document that the replica sends."""
        return document(
            self.lifecycle,
            self.analysis,
            reload=self.reload,
            state_saved=self.state_saved,
            state_file=self.state_file,
            analysed_seconds=self.clock - 1000.0,
        )


def feed(
    analyses: list[Analysis],
    requests: int,
    *,
    drift: Mapping[str, float] | float = 0.01,
    failures: float = 0.001,
    sampled: float = 0.5,
    seed: int = 0,
    first_key: int = 0,
) -> None:
    """Feeds requests, each with its own key, to every analysis.

    Args:
        requests: number of requests.
        drift: mean in nats per token, by arm, or of all arms but control.
        failures: share of requests that fail.
        sampled: share of requests that are scored again.
        first_key: number of the first key.
    """
    rng = random.Random(seed)
    made = analyses[0].experiment
    for number in range(first_key, first_key + requests):
        seconds = 5.0 * number
        arm = assign(made, f"key {number}", coverage=1.0, seconds=seconds).arm
        assert arm is not None
        index = [each.name for each in made.arms].index(arm)
        mean = drift.get(arm, 0.0) if isinstance(drift, Mapping) else drift * (index > 0)
        failed = rng.random() < failures
        ttft, e2e = rng.lognormvariate(-2, 0.4), rng.lognormvariate(0.5, 0.5)
        scored = rng.random() < sampled
        value = mean * rng.lognormvariate(-0.5, 1.0)
        top1 = min(1.0, value)
        for analysis in analyses:
            analysis.key_source(0)
            analysis.assigned(arm, number, seconds=seconds, sampled=scored)
            analysis.finished(
                arm,
                failed=failed,
                kv_bytes_per_prompt_token=1024.0 / (1 + index),
                ttft=ttft,
                e2e=None if failed else e2e,
                key_hash=number,
                kept_bytes=1024 * 100 // (1 + index),
                full_bytes=1024 * 100,
                seconds=seconds,
            )
            if scored:
                analysis.shadowed(arm, drift=value, top1=top1, tokens=64, number=number)
                analysis.sample_ended(arm, "compared", 64, key_hash=number)


def made(requests: int = 600, text: str = TEXT, **options: Any) -> Made:
    """A replica after an hour and `requests` requests."""
    replica = Made(text)
    feed([replica.analysis], requests, **options)
    replica.wait(3600)
    return replica
