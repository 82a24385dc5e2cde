"""Next-token distributions of one text under two caches, and how far apart they are.

T positions of the continuation, K tokens of the vocabulary that a server names per position.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

# What float32 leaves of "1 less a sum of probabilities". Taking a rest for as large as this where
# it is divided by can only lessen the KL.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Distributions:
    """What a server said at each position of a continuation whose tokens were given.

    Attributes:
        ids: [T, K] int64: the likeliest tokens, best first.
        logprobs: [T, K] float64: theirs.
        given: [T] float64: log-probability of the token that the text has there.
    """

    ids: np.ndarray
    logprobs: np.ndarray
    given: np.ndarray

    @classmethod
    def of(cls, meta: Mapping[str, Any], positions: int) -> Distributions:
        """From the `meta_info` of an answer with logprobs.

        Raises:
            ValueError: it has not as many positions.
        """
        top = meta.get("output_top_logprobs") or ()
        own = meta.get("output_token_logprobs") or ()
        if len(top) != positions or len(own) != positions:
            raise ValueError(f"it has logprobs of {len(top)} positions instead of {positions}")
        return cls(
            np.array([[each[1] for each in row] for row in top], dtype=np.int64),
            np.array([[each[0] for each in row] for row in top], dtype=np.float64),
            np.array([each[0] for each in own], dtype=np.float64),
        )


@dataclass(frozen=True)
class Distance:
    """How far a policy's distributions are from those of full KV, position by position.

    Attributes:
        kl: [T]: KL(full || policy) in nats; a lower bound where `covered` is below 1.
        agree: [T] bool: whether the likeliest token is the same.
        covered: [T]: probability of the tokens that a side names, of the side where it is less.
    """

    kl: np.ndarray
    agree: np.ndarray
    covered: np.ndarray

    @cached_property
    def first_divergence(self) -> int | None:
        """The first position with another likeliest token."""
        return None if self.agree.all() else int(np.argmin(self.agree))


def distance(full: Distributions, other: Distributions) -> Distance:
    """Compares two answers to the same text.

    Where a side names only its K likeliest tokens, P being full KV's distribution and Q the
    policy's, the result is a lower bound. What Q has for a token that P alone names is not known,
    but no token that Q leaves out is likelier than the last one that it names, and all of them have
    at most what Q leaves. Either limit gives a least KL; the larger one is taken. The tokens that P
    leaves out are joined to one outcome, which can only lessen a KL divergence.
    """
    sides = zip(full.ids, full.logprobs, other.ids, other.logprobs, strict=True)
    kl = np.array([_at(*row) for row in sides], dtype=np.float64)
    named = [np.exp(side.logprobs).sum(axis=1) for side in (full, other)]
    return Distance(kl, full.ids[:, 0] == other.ids[:, 0], np.minimum(*named).clip(max=1))


def _at(
    ids: np.ndarray, logprobs: np.ndarray, other_ids: np.ndarray, other_logprobs: np.ndarray
) -> float:
    """The KL at one position, from [K] tokens of each side."""
    _, here, there = np.intersect1d(ids, other_ids, return_indices=True)
    p, q = np.exp(logprobs), np.exp(other_logprobs)
    known = float(p[here] @ (logprobs[here] - other_logprobs[there]))
    alone, others = np.delete(np.arange(len(p)), here), max(1 - float(p.sum()), 0.0)
    # Of Q: for what P alone names and all others, and of this for tokens that Q does not name.
    room, left = (max(1 - float(x.sum()), _ROUNDING) for x in (q[there], q))
    each = float(p[alone] @ (logprobs[alone] - other_logprobs.min())) + _term(others, room)
    mass = float(p[alone].sum())
    share = min(left, room * mass / (mass + others)) if mass else 0.0
    joined = _term(mass, share) + _term(others, max(room - share, _ROUNDING))
    return max(known + max(each, joined), 0.0)


def _term(p: float, q: float) -> float:
    """What an outcome adds to a KL."""
    return p * float(np.log(p / q)) if p > 0 else 0.0


def perplexity(logprobs: np.ndarray) -> float:
    """Of given tokens with these log-probabilities."""
    return float(np.exp(-logprobs.mean()))


def interval(
    parts: list[np.ndarray], seed: int = 0, draws: int = 2000
) -> tuple[float, float] | None:
    """95 % interval of the mean over all values; parts are drawn again whole (a bootstrap).

    Args:
        parts: values that hang together: of one text, or of neighbouring positions. At least one.

    Returns:
        The interval; None of a single part, which is the same whenever it is drawn.
    """
    if len(parts) < 2:
        return None
    sums = np.array([part.sum() for part in parts], dtype=np.float64)
    sizes = np.array([len(part) for part in parts])
    drawn = np.random.default_rng(seed).integers(len(parts), size=(draws, len(parts)))
    means = sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    low, high = np.percentile(means, (2.5, 97.5))
    return float(low), float(high)
