"""What became of the requests of an arm that were sampled to be scored again.

Not all of them are: one may be too long, or find the server busy. Where that depends on the
request, as on its length, what is compared is no fair sample of what is served.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

COMPARED = "compared"
# What became of a sampled request: compared, or why not.
OUTCOMES = (
    COMPARED,
    "busy",  # no idle moment came in time
    "no_room",  # no slots were free in time
    "queue_full",
    "over_budget",  # tokens per second
    "too_long",  # prompt and output fill the model's context
    "one_token",  # its only token comes from the prefill
    "not_comparable",  # its distributions were not all taken, or its prompt is not tokens
    "superseded",  # it belongs to a revision, or an experiment, that has ended
    "failed",
)
# No choice: such a request has nothing to compare, or nothing to be compared for.
_NO_CHOICE = ("one_token", "superseded")


class ComparedShare(NamedTuple):
    """The part of the sampled requests that was compared.

    Attributes:
        sampled: number of sampled requests that could have been compared.
        requests: share of them that was compared, 0 to 1.
        tokens: share of their tokens, prompts included; 1 where no tokens are known.
    """

    sampled: int
    requests: float
    tokens: float

    @property
    def least(self) -> float:
        """The smaller one of the two shares."""
        return min(self.requests, self.tokens)


@dataclass
class Scoring:
    """Sampled requests of one arm.

    Attributes:
        requests: outcome -> number of requests.
        tokens: outcome -> number of their tokens, prompts included.
    """

    requests: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))

    def add(self, outcome: str, tokens: int) -> None:
        """Counts a request; `outcome` is one of `OUTCOMES`."""
        self.requests[outcome] += 1
        self.tokens[outcome] += tokens

    @property
    def share(self) -> ComparedShare | None:
        """The part that was compared; None before the first request."""
        sampled, tokens = (
            sum(counts[outcome] for outcome in OUTCOMES if outcome not in _NO_CHOICE)
            for counts in (self.requests, self.tokens)
        )
        if not sampled:
            return None
        by_tokens = self.tokens[COMPARED] / tokens if tokens else 1.0
        return ComparedShare(sampled, self.requests[COMPARED] / sampled, by_tokens)

    def as_document(self) -> dict[str, list[int]]:
        """The outcomes that there were, as a JSON value."""
        return {
            outcome: [count, self.tokens[outcome]]
            for outcome, count in self.requests.items()
            if count
        }

    def take(self, documents: Sequence[dict[str, Any]]) -> None:
        """Adds the counts of replicas.

        Raises:
            ValueError, KeyError, TypeError: a document is not one of `as_document`.
        """
        for document in documents:
            for outcome, (count, tokens) in document.items():
                self.requests[outcome] += int(count)
                self.tokens[outcome] += int(tokens)
