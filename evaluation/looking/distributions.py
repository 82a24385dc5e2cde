"""Next-token distributions of one text with two caches, and how far apart they are.

T positions of the continuation; K tokens that the server names at each position.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

FEWEST = 5
"""Parts below which a mean has no interval: a few cannot tell how far others would be."""

# Rounding error of float32 in 1 minus a sum of probabilities. As the least value of a divisor it
# can only lower the KL.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Distributions:
    """The distributions at each position of a continuation whose tokens were forced.

    Attributes:
        ids: int64 [T, K], ids of the likeliest tokens, best first.
        logprobs: float64 [T, K], natural log-probabilities of these tokens.
        given: float64 [T], natural log-probability of the forced token.
    """

    ids: np.ndarray
    logprobs: np.ndarray
    given: np.ndarray

    @classmethod
    def of(cls, meta: Mapping[str, Any], positions: int) -> Distributions:
        """From the `meta_info` of an answer with logprobs.

        Raises:
            ValueError: it does not have `positions` positions, or they hold something else.
        """
        top = meta.get("output_top_logprobs") or ()
        forced = meta.get("output_token_logprobs") or ()
        try:
            found = cls(
                np.array([[token[1] for token in row] for row in top], dtype=np.int64),
                np.array([[token[0] for token in row] for row in top], dtype=np.float64),
                np.array([token[0] for token in forced], dtype=np.float64),
            )
        except (TypeError, LookupError, ValueError):
            raise ValueError("its logprobs are not pairs of a number and a token") from None
        if len(found.ids) != positions or len(found.given) != positions:
            raise ValueError(f"it has logprobs of {len(found.ids)} positions, not {positions}")
        return found


@dataclass(frozen=True)
class Distance:
    """How far a policy's distributions are from those of full KV, position by position.

    Attributes:
        kl: float64 [T], KL(full || policy) in nats; a lower bound where `covered` is below 1.
        agree: bool [T], whether the likeliest token is the same.
        covered: float64 [T], probability of the K tokens that a side names; the smaller of the two.
    """

    kl: np.ndarray
    agree: np.ndarray
    covered: np.ndarray

    @cached_property
    def first_divergence(self) -> int | None:
        """The first position with another likeliest token; None if there is none."""
        return None if self.agree.all() else int(np.argmin(self.agree))


def distance(full: Distributions, other: Distributions) -> Distance:
    """Compares two answers to the same text.

    With P full KV's distribution and Q the policy's: if each side names only its K likeliest
    tokens, the result is a lower bound of KL(P || Q). The probability in Q of a token that only P
    names is unknown, but it is at most that of the last token that Q names, and all such tokens
    together have at most the rest of Q. Each limit gives a lower bound; the larger one is taken.
    The tokens that P does not name are joined to one outcome, which can only lower the KL.
    """
    sides = zip(full.ids, full.logprobs, other.ids, other.logprobs, strict=True)
    kl = np.array([_at(*row) for row in sides], dtype=np.float64)
    covered = [np.exp(side.logprobs).sum(axis=1) for side in (full, other)]
    return Distance(kl, full.ids[:, 0] == other.ids[:, 0], np.minimum(*covered).clip(max=1))


def _at(
    ids: np.ndarray, logprobs: np.ndarray, other_ids: np.ndarray, other_logprobs: np.ndarray
) -> float:
    """The KL in nats at one position, from the ids and log-probabilities [K] of each side."""
    _, shared, other_shared = np.intersect1d(ids, other_ids, return_indices=True)
    p, q = np.exp(logprobs), np.exp(other_logprobs)
    shared_kl = float(p[shared] @ (logprobs[shared] - other_logprobs[other_shared]))
    unshared, p_rest = np.delete(np.arange(len(p)), shared), max(1 - float(p.sum()), 0.0)
    # Probability in Q of all tokens that not both name, and of the tokens that Q does not name.
    q_unshared, q_rest = (max(1 - float(x.sum()), _ROUNDING) for x in (q[other_shared], q))
    separate_kl = float(p[unshared] @ (logprobs[unshared] - other_logprobs.min())) + _term(
        p_rest, q_unshared
    )
    p_unshared = float(p[unshared].sum())
    share = min(q_rest, q_unshared * p_unshared / (p_unshared + p_rest)) if p_unshared else 0.0
    joint_kl = _term(p_unshared, share) + _term(p_rest, max(q_unshared - share, _ROUNDING))
    return max(shared_kl + max(separate_kl, joint_kl), 0.0)


def _term(p: float, q: float) -> float:
    """The term of one outcome in a KL: p log(p / q); 0 where p is 0."""
    return p * float(np.log(p / q)) if p > 0 else 0.0


def perplexity(logprobs: np.ndarray) -> float:
    """Perplexity of tokens with these natural log-probabilities."""
    return float(np.exp(-logprobs.mean()))


def interval(parts: Sequence[np.ndarray], least: float, most: float) -> tuple[float, float] | None:
    """95 % interval of the mean over all values, from the means of whole parts (Student's t).

    Args:
        parts: arrays of correlated values: of one text, or of neighbouring positions.
        least, most: smallest and largest value that there can be.

    Returns:
        The interval; None for fewer than `FEWEST` parts.
    """
    count = len(parts)
    if count < FEWEST:
        return None
    sums = np.array([part.sum() for part in parts], dtype=np.float64)
    sizes = np.array([len(part) for part in parts])
    mean = sums.sum() / sizes.sum()
    # The mean is a ratio of sums, since the last part of a text may be short.
    error = math.sqrt(count / (count - 1) * ((sums - mean * sizes) ** 2).sum()) / sizes.sum()
    reach = student(count - 1) * error
    return max(least, float(mean - reach)), min(most, float(mean + reach))


def student(freedom: int) -> float:
    """97.5 % quantile of Student's t, to 0.001 from 4 degrees of freedom on.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5.
    """
    z = 1.959964
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))
