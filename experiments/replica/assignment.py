"""Which arm a request gets: a hash of its key decides, so it is the same everywhere and always.

Whether a key takes part and which arm it gets are two independent draws, so that raising the
coverage adds keys and moves none between arms.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b

from kvpolicy.experiments.definition.experiment import Experiment, Switchback


class AssignmentReason(StrEnum):
    """Why a request got its policy, in the words of OpenFeature."""

    SPLIT = "SPLIT"  # drawn by its key
    TARGETING_MATCH = "TARGETING_MATCH"  # the request named its policy: not part of the analysis
    DEFAULT = "DEFAULT"  # outside the coverage, or without a key
    DISABLED = "DISABLED"  # the experiment is disabled or has ended, or the arm is rolled back


@dataclass(frozen=True, slots=True)
class Assignment:
    """The arm of a request, None if it takes no part, and why."""

    arm: str | None
    reason: AssignmentReason


DISABLED = Assignment(None, AssignmentReason.DISABLED)
DEFAULT = Assignment(None, AssignmentReason.DEFAULT)


def fraction(experiment: str, purpose: str, key: str) -> float:
    """A number in [0, 1), uniform over keys and independent between experiments and purposes.

    The names of experiments and purposes hold no `/`, so no two triples give the same text.
    """
    text = f"{experiment}/{purpose}/{key}".encode("utf-8", "surrogatepass")
    digest = blake2b(text, digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) * 2.0**-53


def assign(
    experiment: Experiment, key: str | None, *, coverage: float, seconds: float
) -> Assignment:
    """The arm of a request.

    Args:
        key: what the targeting key found; a request with None takes no part.
        coverage: share of the keys that take part now, 0 to 1; steps change it.
        seconds: wall clock in seconds since 1970; used with `design: switchback` only.

    Returns:
        An arm with the reason SPLIT, or no arm with DEFAULT or DISABLED. The caller gives
        TARGETING_MATCH to requests that name a policy themselves.
    """
    if not experiment.enabled:
        return DISABLED
    if key is None or fraction(experiment.name, "coverage", key) >= coverage:
        return DEFAULT
    if experiment.design is None:
        drawn = fraction(experiment.name, "arm", key)
    else:
        window = window_of(experiment.design, seconds)
        drawn = fraction(experiment.name, "window", str(window))
    arm = experiment.arms[bisect_right(experiment.thresholds, drawn)]
    return Assignment(arm.name, AssignmentReason.SPLIT)


def window_of(design: Switchback, seconds: float) -> int:
    """Number of the window that a moment is in, counted from 1970; the same in every replica."""
    return int(seconds // design.window)


def in_burn_in(experiment: Experiment, seconds: float) -> bool:
    """Whether a moment is in the part of a window that is not compared."""
    design = experiment.design
    return design is not None and seconds % design.window < design.burn_in
