"""The verdict on one metric in one arm."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from kvpolicy.experiments.definition.metrics import Role

Outcome = Literal["breached", "cleared", "undecided"]


@dataclass(frozen=True)
class Verdict:
    """The verdict on a metric in an arm, at one moment.

    Attributes:
        metric: name of the metric.
        role: role in the file; "info" for control, about which nothing is decided.
        arm: name of the arm.
        samples: number of values: requests, or for a difference pairs of requests or of windows.
        mean: mean in the metric's unit; for a difference arm minus control. None before the first
            value.
        low, high: bounds of the mean that hold at all moments together with a chance of
            1 - alpha; None where the values have no bound.
        log_e_breach: natural log of the evidence that the mean is above the margin; None unless
            the role is "guardrail".
        log_e_clear: the same that the mean is below the margin; None without a margin.
        margin: margin of a guardrail; 0 for a success metric that has a clip; else None.
        outcome: "breached" or "cleared" when there is enough evidence.
        absolute: whether `mean` is the mean of the arm, not a difference to control.
    """

    metric: str
    role: Role
    arm: str
    samples: int
    mean: float | None
    low: float | None
    high: float | None
    log_e_breach: float | None
    log_e_clear: float | None
    margin: float | None
    outcome: Outcome
    absolute: bool

    def as_document(self) -> dict[str, Any]:
        """The verdict as a JSON value."""
        return asdict(self)
