"""The table of metrics that an experiment can have.

A mean can be judged at any moment only if it is known how large one value can be. Shares are at
most 1; where there is no such bound a metric has a clip: larger values count as the clip.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["guardrail", "success", "info"]
Compared = Literal["margin", "control"]


@dataclass(frozen=True)
class MetricKind:
    """What is known of a metric before any file is read.

    Attributes:
        name: as in the file.
        unit: of its values.
        meaning: one sentence.
        roles: what it may be for.
        compared: with the margin itself ("margin"), or arm minus control with the margin
            ("control").
        clip: "refused", where values are shares; "optional"; "needed".
        default_clip: in its unit, where the file has none.
        shadow: whether it comes from shadow requests.
        latency: whether it is a time, which arms of one replica change for each other.
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
