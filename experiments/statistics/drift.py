"""How far one model's next-token distributions are from another's, from the top K of each.

Both distributions are reduced to the same coarser events: each candidate that both list, the
candidates that only the first lists, and everything else. The divergence of coarser events is at
most that of the whole distributions. The probability that the second gives to candidates that it
does not list is unknown; each has at most the probability of its last listed one. Of the possible
values, the one with the least divergence is taken. So the result is a lower bound, and it is zero
for equal distributions. It is NaN, never zero, where a log-probability is NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

RESOLUTION = 1e-6  # nats; a smaller divergence may come from kernels that round differently
_NOTHING = 1e-6  # largest probability that rounding in float32 may leave of a sum that is 1
_LEAST = 1e-12  # smallest probability in a logarithm
_ROWS = 256  # distributions compared at once, which takes [_ROWS, K, K] flags


class Candidates(NamedTuple):
    """The K most probable tokens of n distributions, most probable first.

    Attributes:
        ids: [n, K] int.
        logprobs: [n, K] float, natural logarithms.
    """

    ids: np.ndarray
    logprobs: np.ndarray


def divergence(policy: Candidates, full: Candidates) -> np.ndarray:
    """KL(policy || full) of each distribution, a lower bound in nats: float64 [n].

    0 up to `RESOLUTION`; NaN where a listed log-probability of either is NaN.
    """
    parts = [
        _divergence(
            Candidates(policy.ids[start : start + _ROWS], policy.logprobs[start : start + _ROWS]),
            Candidates(full.ids[start : start + _ROWS], full.logprobs[start : start + _ROWS]),
        )
        for start in range(0, len(policy.ids), _ROWS)
    ]
    return np.concatenate(parts) if parts else np.empty(0)


def _divergence(policy: Candidates, full: Candidates) -> np.ndarray:
    same = policy.ids[:, :, None] == full.ids[:, None, :]  # [n, K, K]
    listed = same.any(axis=2)
    place = same.argmax(axis=2)
    ours = policy.logprobs.astype(np.float64)
    theirs = np.take_along_axis(full.logprobs.astype(np.float64), place, axis=1)
    p = np.exp(ours)
    with np.errstate(invalid="ignore"):  # neither may have any probability
        both = np.where(listed & (p > 0), p * (ours - theirs), 0.0).sum(axis=1)
    alone = np.where(listed, 0.0, p).sum(axis=1)
    rest = _left(p.sum(axis=1))
    theirs_left = _left(np.where(listed, np.exp(theirs), 0.0).sum(axis=1))
    most = (~listed).sum(axis=1) * np.exp(full.logprobs[:, -1].astype(np.float64))
    total = alone + rest
    share = np.divide(alone, total, out=np.zeros_like(total), where=total > 0)
    theirs_alone = np.minimum(share * theirs_left, most)
    nats = both + _term(alone, theirs_alone) + _term(rest, theirs_left - theirs_alone)
    nats = np.where(nats > RESOLUTION, nats, 0.0)
    return np.where(_unknown(policy) | _unknown(full), np.nan, nats)


def _unknown(candidates: Candidates) -> np.ndarray:
    """Whether a distribution has a log-probability that is NaN: bool [n]."""
    return np.isnan(candidates.logprobs).any(axis=1)


def _left(mass: np.ndarray) -> np.ndarray:
    """1 - mass, at least 0, and 0 where only rounding is left: float64 [n]."""
    left = np.clip(1 - mass, 0.0, 1.0)
    return np.where(left > _NOTHING, left, 0.0)


def _term(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """p log(p / q); 0 where p is 0."""
    return p * np.log(np.maximum(p, _LEAST) / np.maximum(q, _LEAST))


def disagreements(policy: Candidates, full: Candidates) -> np.ndarray:
    """Whether the most probable tokens differ, or a log-probability is NaN: bool [n]."""
    return (policy.ids[:, 0] != full.ids[:, 0]) | _unknown(policy) | _unknown(full)
