"""Results of `kvpolicy fidelity`: of one policy on one text, and of one policy on all texts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from kvpolicy.evaluation.looking.distributions import Distance, Distributions, interval, perplexity
from kvpolicy.experiments.statistics.shares import wilson

# With few texts intervals are over blocks of positions, since neighbours are correlated.
_BLOCK = 16
_MANY = 10  # number of texts from which on intervals are over whole texts


@dataclass(frozen=True)
class Compared:
    """One policy on one text, at T positions.

    Attributes:
        text: name of the text.
        policy: name of the policy.
        setting: name -> value of the parameters that are set.
        prompt_tokens: tokens of the prompt.
        continuation, words: the T forced tokens, and the text that each adds.
        full, other: the distributions with full KV and with the policy.
        distance: distance of these distributions.
        greedy_divergence: first position at which free generations differ; None if none of the T.
        whole: whether the distributions have the whole vocabulary.
        kept: share of the prompt's entries left after the prefill; None if not known.
        uncompressed: why the prompt was served in full; None if it was compressed.
    """

    text: str
    policy: str
    setting: Mapping[str, str]
    prompt_tokens: int
    continuation: tuple[int, ...]
    words: tuple[str, ...]
    full: Distributions
    other: Distributions
    distance: Distance
    greedy_divergence: int | None
    whole: bool
    kept: float | None
    uncompressed: str | None

    def as_row(self) -> dict[str, Any]:
        """The figures of this text as a JSON value."""
        kl = self.distance.kl
        return {
            "text": self.text,
            "policy": self.policy,
            "setting": dict(self.setting),
            "prompt_tokens": self.prompt_tokens,
            "positions": len(kl),
            "kept": self.kept,
            "uncompressed": self.uncompressed,
            "mean_kl": float(kl.mean()),
            "median_kl": float(np.median(kl)),
            "p99_kl": float(np.percentile(kl, 99)),
            "agreement": float(self.distance.agree.mean()),
            "first_divergence": self.distance.first_divergence,
            "greedy_divergence": self.greedy_divergence,
            "perplexity": perplexity(self.other.given),
            "perplexity_full": perplexity(self.full.given),
            "tokens_compared": int(self.full.ids.shape[1]),
            "whole_vocabulary": self.whole,
            "least_covered": float(self.distance.covered.min()),
        }


@dataclass(frozen=True)
class PolicyFidelity:
    """One policy on all texts."""

    parts: tuple[Compared, ...]

    @property
    def policy(self) -> str:
        """Name of the policy."""
        return self.parts[0].policy

    @property
    def title(self) -> str:
        """Name and settings of the policy."""
        setting = ", ".join(f"{key}={value}" for key, value in self.parts[0].setting.items())
        return f"{self.policy} ({setting})" if setting else self.policy

    @property
    def kept(self) -> float | None:
        """Mean over texts of the share of the prompt's entries kept; None if not known for all."""
        shares = [part.kept for part in self.parts if part.kept is not None]
        return float(np.mean(shares)) if len(shares) == len(self.parts) else None

    @cached_property
    def kl(self) -> np.ndarray:
        """KL in nats at all positions of all texts: float64."""
        return np.concatenate([part.distance.kl for part in self.parts])

    @cached_property
    def agree(self) -> np.ndarray:
        """Whether the likeliest token is the same at all positions of all texts: bool."""
        return np.concatenate([part.distance.agree for part in self.parts])

    def kl_interval(self) -> tuple[float, float] | None:
        """95 % interval of the mean KL; None for too few blocks."""
        return interval(self._pieces([part.distance.kl for part in self.parts]), 0, math.inf)

    def agreement_interval(self) -> tuple[float, float] | None:
        """95 % interval of the share of positions that agree; None as above.

        Where pieces are all alike, which is no certainty about the next one, it is Wilson's.
        """
        pieces = self._pieces([part.distance.agree for part in self.parts])
        found = interval(pieces, 0, 1)
        if found is not None and found[0] == found[1]:
            return wilson(float(self.agree.mean()), len(pieces))
        return found

    def _pieces(self, values: Sequence[np.ndarray]) -> list[np.ndarray]:
        if len(values) >= _MANY:
            return list(values)
        return [v[start : start + _BLOCK] for v in values for start in range(0, len(v), _BLOCK)]

    def perplexities(self) -> tuple[float, float]:
        """Perplexity of the continuations of all texts, with the policy and with full KV."""
        other = np.concatenate([part.other.given for part in self.parts])
        full = np.concatenate([part.full.given for part in self.parts])
        return perplexity(other), perplexity(full)

    def first(self, *, greedy: bool) -> str:
        """Median position of the first difference over the texts; `>T` if it is T or later.

        A text without a difference has its first one behind its end, nobody knows how far.
        """
        divergences = [
            part.greedy_divergence if greedy else part.distance.first_divergence
            for part in self.parts
        ]
        known_up_to = sorted(
            (len(part.continuation), True) if position is None else (position, False)
            for position, part in zip(divergences, self.parts, strict=True)
        )
        half = known_up_to[: (len(known_up_to) + 1) // 2]
        later = any(has_none for _, has_none in half)
        return f">{half[-1][0]}" if later else str(half[-1][0])


def summaries(results: Sequence[Compared]) -> list[PolicyFidelity]:
    """A summary per policy, in the order of the results."""
    by_policy: dict[str, list[Compared]] = {}
    for result in results:
        by_policy.setdefault(result.policy, []).append(result)
    return [PolicyFidelity(tuple(parts)) for parts in by_policy.values()]
