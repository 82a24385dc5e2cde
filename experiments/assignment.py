"""Which arm a request gets: decided by a hash of its key, so it is the same everywhere and always.

Whether a key takes part and which arm it gets are drawn for different purposes, so that raising the
coverage adds keys and moves nobody between arms.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b

from kvpolicy.experiments.experiment import Experiment, Switchback


class Reason(StrEnum):
    """Why a request got its policy, in the words of OpenFeature."""

    SPLIT = "SPLIT"  # drawn by its key
    TARGETING_MATCH = "TARGETING_MATCH"  # the request named its policy: not part of the analysis
    DEFAULT = "DEFAULT"  # outside the coverage, or without a key
    DISABLED = "DISABLED"  # the experiment is switched off


@dataclass(frozen=True, slots=True)
class Assignment:
    """The arm of a request, None if it takes no part, and why."""

    arm: str | None
    reason: Reason


DISABLED = Assignment(None, Reason.DISABLED)
DEFAULT = Assignment(None, Reason.DEFAULT)


def fraction(experiment: str, purpose: str, key: str) -> float:
    """A number in [0, 1), uniform over keys and independent between experiments and purposes.

    The names of experiments hold no `/`, so no two triples give one text.
    """
    text = f"{experiment}/{purpose}/{key}".encode("utf-8", "surrogatepass")
    digest = blake2b(text, digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) * 2.0**-53


def assign(
    experiment: Experiment, key: str | None, *, coverage: float, seconds: float
) -> Assignment:
    """The arm of a request.

    Args:
        key: what the targeting key found; None takes no part.
        coverage: share of the keys that take part now; steps change it.
        seconds: wall clock in seconds since 1970; it counts with `design: switchback` only.

    Returns:
        reason SPLIT with an arm, DEFAULT or DISABLED without. TARGETING_MATCH is the caller's, for
        requests that name a policy themselves.
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
    return Assignment(arm.name, Reason.SPLIT)


def window_of(design: Switchback, seconds: float) -> int:
    """Number of the window of a moment, counted from 1970; the same in every replica."""
    return int(seconds // design.window)


def in_burn_in(experiment: Experiment, seconds: float) -> bool:
    """Whether a moment is in the part of a window that is not compared."""
    design = experiment.design
    return design is not None and seconds % design.window < design.burn_in
