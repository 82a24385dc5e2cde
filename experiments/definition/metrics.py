"""The table of metrics that an experiment can have.

A mean can be judged at any moment only if its values have a known bound. Shares are at most 1; a
metric without a natural bound has a clip, and larger values count as the clip.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["guardrail", "success", "info"]
Compared = Literal["margin", "control"]


@dataclass(frozen=True)
class MetricKind:
    """The properties of a metric, the same in every experiment.

    Attributes:
        name: its name in the file.
        unit: unit of its values.
        meaning: what it measures, as a phrase.
        roles: roles that it may have.
        compared: "margin" if its mean is compared with the margin; "control" if arm minus control
            is.
        clip: whether the file may give a clip: "refused" (values are shares), "optional" or
            "needed".
        default_clip: clip where the file has none, in its unit.
        shadow: whether it comes from shadow requests.
        latency: whether it is a latency: arms of one replica share batches and change each
            other's.
    """

    name: str
    unit: str
    meaning: str
    roles: tuple[Role, ...]
    compared: Compared
    clip: Literal["refused", "optional", "needed"] = "refused"
    default_clip: float | None = None
    shadow: bool = False
    latency: bool = False

    @property
    def is_share(self) -> bool:
        """Whether values are shares from 0 to 1, so that percent makes sense."""
        return self.clip == "refused"


METRICS = {
    kind.name: kind
    for kind in (
        MetricKind(
            "drift",
            "nats per token",
            "mean over a request's tokens of the clipped KL divergence from full KV",
            ("guardrail", "info"),
            "margin",
            clip="needed",
            default_clip=2.0,
            shadow=True,
        ),
        MetricKind(
            "top1_disagreement",
            "share of tokens",
            "share of a request's tokens whose likeliest candidate differs from full KV's",
            ("guardrail", "info"),
            "margin",
            shadow=True,
        ),
        MetricKind(
            "error_rate",
            "share of requests",
            "share of requests that failed, arm minus control",
            ("guardrail", "info"),
            "control",
        ),
        MetricKind(
            "kv_bytes_per_prompt_token",
            "bytes per token",
            "KV memory that a prompt holds after compression; smaller is better",
            ("success",),
            "control",
            clip="optional",
        ),
        MetricKind(
            "ttft_seconds",
            "seconds",
            "time to the first token",
            ("guardrail", "info"),
            "control",
            clip="needed",
            latency=True,
        ),
        MetricKind(
            "e2e_seconds",
            "seconds",
            "time to the last token",
            ("guardrail", "info"),
            "control",
            clip="needed",
            latency=True,
        ),
    )
}
