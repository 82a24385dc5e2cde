"""What is known of one metric in one arm."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from kvpolicy.experiments.metrics import Role

Outcome = Literal["breached", "cleared", "undecided"]


@dataclass(frozen=True)
class Verdict:
    """A metric in an arm, now.

    Attributes:
        metric: its name.
        role: as in the file; "info" for control, which nothing is decided about.
        arm: its name.
        samples: values behind it: requests; of a difference, pairs of requests or of windows.
        mean: in the metric's unit; where a metric is compared with control, arm minus control.
            None before the first value.
        low, high: bounds of the mean that hold at all moments together with a chance of
            1 - alpha; None where nothing bounds the values.
        log_e_breach: natural log of the evidence that the mean is beyond the margin; None where
            there is no margin.
        log_e_clear: of the evidence that it is within.
        margin: of a guardrail; 0 for a success metric that has a clip.
        outcome: "breached" or "cleared" when the evidence is enough.
        absolute: whether `mean` is the arm's own, not a difference.
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
