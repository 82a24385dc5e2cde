"""A policy that fails in its work for one request fails for that request alone.

All exceptions raised while a policy, or the plugin on its behalf, works for a request are caught
and noted for this request. If all layers still hold all entries of its prompt, the request goes on
with full KV; otherwise it ends with an HTTP 500 that names the policy. A policy that fails too
often is disabled: its requests are served in full from then on.

Where ranks divide the model (`--tp`), a failure counts on all of them, at the same moment: one that
fails notes it, and all take it up when they next agree: when a prompt ends, when entries leave,
when a request ends, or after a number of decode steps without any of these. A block in which ranks
exchange tensors is joint: they agree at its end, and none waits for one that has failed.
With stages (`--pp`) all take up a failure when they process the result of the forward in which it
happened, or of the request's next forward (stages.py). The ranks of one stage agree before that, so
that all of them leave the request alone and none waits for another.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

from kvpolicy.experiments.definition.experiment import NO_POLICY
from kvpolicy.sglang_ext.face import compat
from kvpolicy.sglang_ext.face.asked import POLICY
from kvpolicy.sglang_ext.face.options import ANY, LISTED, NOBODY, fold_interval, override
from kvpolicy.sglang_ext.face.ranks import FailedElsewhere, Ranks
from kvpolicy.sglang_ext.memory.store import Store
from kvpolicy.sglang_ext.report.metrics import Metrics
from kvpolicy.sglang_ext.report.reports import Reports
from kvpolicy.sglang_ext.request.reasons import Reason
from kvpolicy.sglang_ext.request.request import RequestState, Served, state_of

logger = logging.getLogger(__name__)

# Work at which a policy may fail, as messages name it.
ADMISSION = "admission"
ALLOCATION = "taking slots"
SCORING = "scoring"
CHOOSING = "choosing"
COMPACTION = "compaction"
PROPAGATION = "propagation"
DECODING = "decoding"
READING = "attention to compressed entries"
FOLD = "a fold"
# Decode steps without an agreement of ranks, at most; more if folds are further apart, since ranks
# agree at them.
_AGREE = 16
_STAGES = (
    ADMISSION, ALLOCATION, SCORING, CHOOSING, COMPACTION, PROPAGATION, DECODING, READING, FOLD,
)  # fmt: skip

# What a client can do whose request was ended, by what clients may name (--kv-policy-override).
_AGAIN = {
    ANY: f"Send it again with custom_params.{POLICY} `{NO_POLICY}`",
    LISTED: f"Send it again with another policy in custom_params.{POLICY}",
    NOBODY: "Send it again later, or tell the server's operator",
}


class Failures:
    """The failures of one scheduler's policies.

    Args:
        most: number of failing requests after which a policy is disabled; 0: never.
        failed: called when a request's policy has failed.
        detach: as of `Services`.
        in_stages: whether there are several stages.
    """

    def __init__(
        self,
        store: Store,
        metrics: Metrics,
        reports: Reports,
        ranks: Ranks,
        most: int,
        failed: Callable[[], None] = lambda: None,
        detach: Callable[[Sequence[tuple[Any, RequestState]]], None] = lambda requests: None,
        *,
        in_stages: bool = False,
    ) -> None:
        self._store, self._metrics, self._reports = store, metrics, reports
        self._failed, self._detach, self._in_stages = failed, detach, in_stages
        self.ranks, self._most, self._steps_since = ranks, most, 0
        self._agree = max(_AGREE, fold_interval())
        self._logged: set[tuple[str, str, type]] = set()

    def contained(
        self, req: Any, stage: str, *, whole: bool | None = None, joint: bool = False
    ) -> Contained:
        """A block of work for one request: what it raises is noted and goes no further.

        Args:
            stage: what the block works at, one of the constants above.
            whole: whether the prompt is still whole if the block fails; None: as
                `RequestState.is_whole` says.
            joint: whether ranks exchange tensors in it, or take slots: then all of them enter it,
                and agree at its end.
        """
        return Contained(self, [req], stage, whole, joint)

    def contained_together(self, requests: Iterable[Any], stage: str) -> Contained:
        """A block of work for several requests, all of which fail if it does, on all ranks.

        Ranks may exchange tensors in it: all of them enter it, and agree at its end.
        """
        return Contained(self, list(requests), stage, None, joint=True)

    def note(self, req: Any, stage: str, error: Exception, *, whole: bool | None = None) -> None:
        """Note that a request's policy has failed; arguments as of `contained`."""
        state = state_of(req)
        if state is None or state.broken or isinstance(error, FailedElsewhere):
            return
        whole = state.is_whole if whole is None else whole
        self._log(state.served, req, stage, error)
        only_scheduler = self.ranks.size == 1 and not self._in_stages
        if only_scheduler or stage == ADMISSION:  # at admission all schedulers fail alike
            self._fail_request(req, state, stage, whole=whole)
        else:
            state.failure_code = code_of(stage, whole=whole)

    def agree(self, requests: Iterable[Any]) -> None:
        """Take up what has failed on any rank; all ranks call it for the same requests.

        With stages the ranks of this one only know it from then on, by `RequestState.broken`.
        """
        if self.ranks.size == 1:
            return
        pairs = [(req, state) for req in requests if (state := state_of(req)) is not None]
        # A prompt that one rank has given up is served in full by none.
        not_whole = [int(not state.is_whole) for _, state in pairs]
        maxima = self.ranks.worst([*(state.failure_code for _, state in pairs), *not_whole])
        codes, not_whole = maxima[: len(pairs)], maxima[len(pairs) :]
        for (req, state), code, given_up in zip(pairs, codes, not_whole, strict=True):
            if code and given_up:
                code = code_of(_stage(code), whole=False)
            if not self._in_stages:
                self.take_up_failure(req, state, code)
            elif code and not state.failed:
                self._log_elsewhere(req, state, code, "rank")
                state.failure_code = code

    def take_up_failure(self, req: Any, state: RequestState, code: int) -> None:
        """Take up that a request's policy has failed on some rank or stage.

        Args:
            code: the largest `RequestState.failure_code` of all ranks and stages; 0: it has not.
        """
        if not code or state.failed:
            return
        self._log_elsewhere(req, state, code, "stage" if self._in_stages else "rank")
        # Its prompt may have been given up since it failed.
        self._fail_request(req, state, _stage(code), whole=_is_whole(code) and state.is_whole)

    def _log_elsewhere(self, req: Any, state: RequestState, code: int, where: str) -> None:
        if not state.failure_code:
            logger.warning(
                "KV-cache policy %s failed at %s on another %s, whose log says why. rid=%s",
                state.served.name,
                _stage(code),
                where,
                req.rid,
            )

    def due(self, *, anyway: bool) -> bool:
        """Whether ranks agree at this decode step; every rank calls it once per step.

        Args:
            anyway: whether they agree at this step for other reasons.
        """
        due = anyway or self._steps_since + 1 == self._agree
        self._steps_since = 0 if due else self._steps_since + 1
        return due

    def _fail_request(self, req: Any, state: RequestState, stage: str, *, whole: bool) -> None:
        state.failed, state.failure_code = True, 0
        self._failed()
        if whole:
            serve_in_full(self._store, self._reports, req, Reason.POLICY_ERROR)
        else:
            self._end(req, state, stage)
        self._count(state.served)

    def one_by_one(self, number: int, error: Exception) -> None:
        """Log, once per kind of error, that requests could not be taken through steps together."""
        kind = ("", DECODING, type(error))
        if kind not in self._logged:
            self._logged.add(kind)
            logger.warning(
                "%d requests are taken through their steps one by one, which takes longer, since "
                "together they failed: %s: %s; further ones are not logged.",
                number,
                type(error).__name__,
                error,
                exc_info=error,
            )

    def _log(self, served: Served, req: Any, stage: str, error: Exception) -> None:
        kind = (served.name, stage, type(error))
        if kind in self._logged:
            return
        self._logged.add(kind)
        logger.error(
            "KV-cache policy %s failed at %s: %s: %s. rid=%s; further failures of this kind are "
            "only counted.",
            served.name,
            stage,
            type(error).__name__,
            error,
            req.rid,
            exc_info=error,
        )

    def _end(self, req: Any, state: RequestState, stage: str) -> None:
        name = state.served.name
        if state.private is not None:
            # It may run once more before SGLang ends it; then it reads its latest token only,
            # nothing that was half written. All other slots are given up, so that all ranks have
            # the same number, wherever each was when the policy failed.
            latest = max(state.prompt, req.kv.kv_allocated_len - 1)
            try:
                self._store.empty(state.private, latest)
                self._detach([(req, state)])
            except Exception:  # its slots are given back with its row
                logger.exception("Slots of a failed request are still held. rid=%s", req.rid)
                state.private = None
        state.give_up(Reason.POLICY_ERROR)
        compat.end_with_error(
            req,
            f"KV-cache policy `{name}` failed at {stage} of this request, and its full KV is gone. "
            f"{_AGAIN[override()]}; the server's log says why.",
        )
        self._metrics.failed(name, Reason.POLICY_ERROR)

    def _count(self, served: Served) -> None:
        standing = served.standing
        standing.failures += 1
        if standing.failures != self._most:
            return
        standing.enabled = False
        self._metrics.enabled(served.name, on=False)
        logger.error(
            "KV-cache policy %s failed in %d requests and is disabled: its requests are served in "
            "full until the server is started again or another version of it comes by PUT "
            "(--kv-policy-max-failures).",
            served.name,
            standing.failures,
        )


def serve_in_full(store: Store, reports: Reports, req: Any, reason: Reason) -> None:
    """Serve a request whose prompt is whole without its policy from now on.

    Raises:
        TypeError: it has no policy.
    """
    state = state_of(req)
    if state is None:
        raise TypeError(f"request {req.rid} has no policy")
    private = state.private
    if state.progress.barred:
        # All layers have all entries: others may use them.
        req.skip_radix_cache_insert = state.progress.barred = False
    if private is not None:
        state.private = None
        if private.ready and req.kv.kv_committed_len > state.prompt:
            # Tokens were decoded from chosen entries; others must not reuse them.
            req.skip_radix_cache_insert = state.progress.barred = True
        store.free(private.row)
    state.give_up(reason)
    if state.reported.counted:
        reports.gave_up(req, state, reason)


def code_of(stage: str, *, whole: bool) -> int:
    """`RequestState.failure_code` of a failure; the larger of a stage's two: the prompt has gone.

    Args:
        stage, whole: as of `Failures.contained`.
    """
    return 1 + 2 * _STAGES.index(stage) + (not whole)


def _stage(code: int) -> str:
    """What a policy failed at, by the code of its failure."""
    return _STAGES[(code - 1) // 2]


def _is_whole(code: int) -> bool:
    """Whether the prompt was whole when its policy failed, by the code of the failure."""
    return code % 2 == 1


class Contained:
    """A block whose exceptions are noted for the requests that it works for."""

    def __init__(
        self,
        failures: Failures,
        requests: Sequence[Any],
        stage: str,
        whole: bool | None,
        joint: bool,
    ) -> None:
        self._failures, self._requests, self._stage = failures, requests, stage
        self._whole, self._joint = whole, joint

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is not None and not isinstance(error, Exception):
            return False
        if self._joint:
            error = met(self._failures.ranks, error)
        if error is None:
            return False
        for request in self._requests:
            self._failures.note(request, self._stage, error, whole=self._whole)
        if self._joint:
            self._failures.agree(self._requests)
        return True


def met(ranks: Ranks, error: Exception | None) -> Exception | None:
    """Wait until all ranks have ended a block in which they exchange tensors.

    Args:
        error: what the block has raised on this rank; None: nothing.

    Returns:
        `error`; or `FailedElsewhere` if it is None and another rank has failed.
    """
    if isinstance(error, FailedElsewhere):
        return error
    try:
        ranks.meet(failed=error is not None)
    except FailedElsewhere as elsewhere:
        return elsewhere
    return error
