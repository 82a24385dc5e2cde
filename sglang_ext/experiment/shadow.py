"""In the front end: sampled requests are scored again with full KV, at idle moments.

An internal request has a sampled request's prompt and output as its prompt, and scores the output
tokens with full KV; it generates nothing. The logprobs of both, before temperature, bias and
grammar, tell how far the policy moved the distributions along its output. Only numbers are kept: no
text, no tokens, no keys. One request is scored at a time, while no request waits for admission, in
slots set aside or free, and within a budget of tokens per second.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from kvpolicy.experiments.definition.experiment import NO_POLICY
from kvpolicy.experiments.replica.scoring import COMPARED
from kvpolicy.experiments.statistics.drift import Candidates, disagreements, divergence
from kvpolicy.sglang_ext.experiment.choices import Choices
from kvpolicy.sglang_ext.experiment.live import Live
from kvpolicy.sglang_ext.face import compat
from kvpolicy.sglang_ext.face.asked import ASSIGNED, NO_ROOM, POLICY

logger = logging.getLogger(__name__)

MOST_WAITING = 64  # sampled requests, whose tokens are held
PATIENCE = 60.0  # seconds that a sampled request waits for an idle moment, or for slots
LOOK = 0.05  # seconds between two looks whether the server is idle
AGAIN = 0.25  # seconds until a request that found no free slots is tried again
MOST_USED = 0.8  # share of the pool's slots in use from which on the server is not idle
_BURST = 10.0  # most seconds of the budget that are saved up


class WholeAnswer(NamedTuple):
    """The answer to a sampled request.

    Attributes:
        recorded: its candidates from the scheduler (raw.py); None if some are missing.
        facts: what is reported of its policy.
        obj: SGLang's request.
        meta_info: of the answer.
    """

    recorded: Mapping[str, Any] | None
    facts: Mapping[str, Any]
    obj: Any
    meta_info: Mapping[str, Any]


@dataclass(frozen=True)
class SampledRequest:
    """A sampled request that has ended.

    Attributes:
        rid: its id.
        assigned: what was noted in it when it was assigned.
        prompt, output: int32 tokens [P], [n].
        policy: candidates of its n output tokens under its policy.
        first: number of first output tokens to leave out: 1, as the first one comes from a prefill
            over all tokens; 0 if tokens left the prefill.
        namespace: radix cache namespace, adapter and scheduler, as fields of SGLang's request.
        since: when it ended, by `time.monotonic`.
    """

    rid: str
    assigned: Mapping[str, Any]
    prompt: np.ndarray
    output: np.ndarray
    policy: Candidates
    first: int
    namespace: Mapping[str, Any]
    since: float

    @property
    def tokens(self) -> int:
        """Number of tokens of prompt and output."""
        return len(self.prompt) + len(self.output)

    def has_waited(self, seconds: float) -> bool:
        """Whether its request ended more than `seconds` ago."""
        return time.monotonic() - self.since > seconds


class Budget:
    """A budget of tokens per second; what is unused for up to `_BURST` seconds is saved up."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tokens_left, self._updated_at = math.inf, clock()

    def take(self, tokens: int, rate: float) -> bool:
        """Take `tokens` unless the budget is used up; it may be overdrawn. True if taken."""
        now = self._clock()
        self._tokens_left = min(self._tokens_left + (now - self._updated_at) * rate, rate * _BURST)
        self._updated_at = now
        if self._tokens_left <= 0:
            return False
        self._tokens_left -= tokens
        return True

    def give_back(self, tokens: int) -> None:
        """Return tokens that were taken and not computed."""
        self._tokens_left += tokens


class Shadows:
    """The sampled requests of one server.

    Attributes:
        released: kinds of memory that the server has given up; meanwhile nothing is scored.
    """

    def __init__(self, live: Live, manager: Any, context: int) -> None:
        """
        Args:
            manager: SGLang's tokenizer manager.
            context: tokens of the model's context.
        """
        self._live, self._manager, self._context = live, manager, context
        self._waiting: deque[SampledRequest] = deque()
        self._budget = Budget()
        self._choices = Choices()
        self._task: asyncio.Task[None] | None = None
        self._scored: str | None = None  # id of the internal request under way
        self._held = 0  # number of `hold`s
        self.released: frozenset[str] = frozenset()

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """A context in which nothing is scored; a sample that is being scored is tried again."""
        self._held += 1
        try:
            if self._scored is not None:
                compat.abort_unnoticed(self._manager, self._scored)
            while self._scored is not None:
                await asyncio.sleep(LOOK)
            yield
        finally:
            self._held -= 1

    def _may_score(self) -> bool:
        """Whether the server is idle, and nothing wants it to stay so."""
        paused = self._held or self.released
        return not paused and compat.is_idle(self._manager, MOST_USED)

    def offer(self, assigned: Mapping[str, Any], answer: WholeAnswer | None) -> None:
        """A sampled request has ended, or one of several answers to it; one of these is scored.

        Args:
            assigned: what was noted in it when it was assigned.
            answer: None if it ended without a whole one.
        """
        if "answers" in assigned:
            answer = self._choices.take(assigned["draw"], assigned["answers"], answer)
        if answer is not None:
            self._take(assigned, answer)

    def _take(self, assigned: Mapping[str, Any], answer: WholeAnswer) -> None:
        """Let an answer wait until it is scored, or count why it is not."""
        recorded, facts, obj, meta_info = answer
        first = 0 if "propagated_tokens" in facts else 1
        if recorded is None or not compat.has_only_tokens(obj):
            counts = (meta_info.get(f"{part}_tokens", 0) for part in ("prompt", "completion"))
            self._live.sample_ended(assigned, "not_comparable", sum(counts))
            return
        tokens = len(recorded["prompt"]) + len(recorded["output"])
        problem = None
        if len(recorded["output"]) <= first:
            problem = "one_token"
        elif tokens >= self._context:
            problem = "too_long"
        elif len(self._waiting) >= MOST_WAITING:
            problem = "queue_full"
        if problem is not None:
            self._live.sample_ended(assigned, problem, tokens)
            return
        candidates = Candidates(recorded["ids"], recorded["logprobs"])
        self._waiting.append(
            SampledRequest(
                str(obj.rid),
                assigned,
                recorded["prompt"],
                recorded["output"],
                candidates,
                first,
                compat.cache_namespace(obj, meta_info),
                time.monotonic(),
            )
        )
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._work())

    async def _work(self) -> None:
        while self._waiting:
            try:
                await self._next(self._waiting.popleft())
            except Exception:
                logger.exception("What became of a sampled request was not counted.")

    async def _next(self, sample: SampledRequest) -> None:
        try:
            outcome = await self._compare(sample)
        except Exception as error:
            outcome = "failed"
            logger.warning(
                "A sampled request was not scored against full KV: %s: %s",
                type(error).__name__,
                error,
            )
        if outcome is None and sample.has_waited(PATIENCE):
            outcome = "no_room"
        if outcome is None:
            self._waiting.append(sample)  # to the end, as others may need fewer slots
            await asyncio.sleep(AGAIN)
        else:
            self._live.sample_ended(sample.assigned, outcome, sample.tokens)

    async def _compare(self, sample: SampledRequest) -> str | None:
        """What became of a sample, of `scoring.OUTCOMES`; None where it has to be tried again."""
        while not self._may_score():
            if sample.has_waited(PATIENCE):
                return "busy"
            await asyncio.sleep(LOOK)
        shadow = self._live.experiment.shadow
        if shadow is None or not self._live.compares(sample.assigned):
            return "superseded"
        if sample.assigned["weights"] != self._live.weights:
            return "not_comparable"
        if not self._budget.take(sample.tokens, shadow.tokens_per_second):
            return "over_budget"
        full = await self._score(sample)
        if full is None:
            self._budget.give_back(sample.tokens)
            return None
        policy = Candidates(*(array[sample.first :] for array in sample.policy))
        full = Candidates(*(array[sample.first :] for array in full))
        token_drifts = np.minimum(divergence(policy, full), self._live.clip)
        top1 = disagreements(policy, full)
        drift, share = float(token_drifts.mean()), float(top1.mean())
        self._live.shadowed(sample.rid, sample.assigned, drift, share, len(top1))
        return COMPARED

    async def _score(self, sample: SampledRequest) -> Candidates | None:
        """Candidates of the output tokens with full KV; None where it has to be tried again."""
        tokens = np.concatenate([sample.prompt, sample.output]).tolist()
        request = compat.scoring_request(
            tokens,
            start=len(sample.prompt) - 1,
            top=sample.policy.ids.shape[1],
            custom={POLICY: NO_POLICY, ASSIGNED: {"scores": True}},
            namespace=sample.namespace,
        )
        self._scored = request.rid
        try:
            ids, logprobs = await compat.score(self._manager, request)
            if len(ids) != len(sample.output):
                raise RuntimeError(f"{len(ids)} of {len(sample.output)} tokens were scored")
        except Exception as error:
            if self._held or NO_ROOM in str(error):
                return None
            raise
        finally:
            self._scored = None
        return Candidates(ids, logprobs)
