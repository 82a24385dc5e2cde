"""Next-token distributions of one text under two caches, and how far apart they are.

T positions of the continuation, K tokens of the vocabulary that a server names per position.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

# What float32 leaves of "1 less a sum of probabilities": below it a rest is not known. Taking it for
# as large as this where it is divided by can only lessen the KL.
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
        covered: [T]: probability (of full KV's distribution) of the tokens that both named.
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

    Everything outside of the tokens that both sides name counts as one outcome. Joining outcomes
    can only lessen a KL divergence, so where there is anything outside the figure is a lower bound.
    """
    sides = zip(full.ids, full.logprobs, other.ids, other.logprobs, strict=True)
    rows = [_at(*row) for row in sides]
    kl, covered = np.array(rows, dtype=np.float64).reshape(-1, 2).T
    return Distance(kl, full.ids[:, 0] == other.ids[:, 0], covered)


def _at(
    ids: np.ndarray, logprobs: np.ndarray, other_ids: np.ndarray, other_logprobs: np.ndarray
) -> tuple[float, float]:
    """KL and covered probability at one position."""
    _, here, there = np.intersect1d(ids, other_ids, return_indices=True)
    p, q = logprobs[here], other_logprobs[there]
    known = float(np.exp(p).sum())
    kl = float(np.exp(p) @ (p - q))
    rest, other_rest = max(1 - known, 0.0), 1 - float(np.exp(q).sum())
    if rest > 0 and max(rest, other_rest) > _ROUNDING:
        kl += rest * np.log(rest / max(other_rest, _ROUNDING))
    return max(kl, 0.0), min(known, 1.0)


def perplexity(logprobs: np.ndarray) -> float:
    """Of given tokens with these log-probabilities."""
    return float(np.exp(-logprobs.mean()))


def interval(parts: list[np.ndarray], seed: int = 0, draws: int = 2000) -> tuple[float, float]:
    """95 % interval of the mean over all values; parts are drawn again whole (a bootstrap).

    Args:
        parts: values that hang together: of one text, or of neighbouring positions. At least one.
    """
    sums = np.array([part.sum() for part in parts], dtype=np.float64)
    sizes = np.array([len(part) for part in parts])
    drawn = np.random.default_rng(seed).integers(len(parts), size=(draws, len(parts)))
    means = sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    low, high = np.percentile(means, (2.5, 97.5))
    return float(low), float(high)
