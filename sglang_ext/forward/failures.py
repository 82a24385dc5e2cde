"""A policy that fails in its work for one request fails for that request alone.

Whatever is raised while a policy, or the plugin on its behalf, works for a request is caught at the
request's border. Where all layers still hold all entries of its prompt, the request goes on with
full KV; otherwise it ends with an HTTP 500 that names the policy. A policy that fails too often is
disabled: its requests are served in full from then on.
"""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Any

from kvpolicy.sglang_ext.face import compat
from kvpolicy.sglang_ext.memory.store import Store
from kvpolicy.sglang_ext.report.metrics import Metrics
from kvpolicy.sglang_ext.report.reports import Reports
from kvpolicy.sglang_ext.request.reasons import Reason
from kvpolicy.sglang_ext.request.request import Served, State, state_of

logger = logging.getLogger(__name__)

# At what a policy failed, as messages say it.
ADMISSION = "admission"
SCORING = "scoring"
CHOOSING = "choosing"
COMPACTION = "compaction"
PROPAGATION = "propagation"
DECODING = "decoding"
READING = "attention to compressed entries"
FOLD = "a fold"


class Failures:
    """The failures of one scheduler's policies.

    Args:
        most: failing requests after which a policy is disabled; 0 for never.
    """

    def __init__(self, store: Store, metrics: Metrics, reports: Reports, most: int) -> None:
        self._store, self._metrics, self._reports = store, metrics, reports
        self._most = most
        self._logged: set[tuple[str, str, type]] = set()

    def contained(self, req: Any, stage: str, *, whole: bool | None = None) -> Contained:
        """A block of work for one request: what it raises is noted and goes no further.

        Args:
            stage: at what the policy works, for messages.
            whole: whether the request's prompt is whole if the block fails; None: its state says.
        """
        return Contained(self, req, stage, whole)

    def note(self, req: Any, stage: str, error: Exception, *, whole: bool | None = None) -> None:
        """A policy has failed; arguments as of `contained`."""
        state = state_of(req)
        if state is None or state.failed:
            return
        state.failed = True
        whole = state.is_whole if whole is None else whole
        self._log(state.served, req, stage, error)
        if whole:
            self._serve_in_full(req, state)
        else:
            self._end(req, state, stage)
        self._count(state.served)

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

    def _serve_in_full(self, req: Any, state: State) -> None:
        private = state.private
        if state.progress.barred:
            # All layers have all entries: others may use them.
            req.skip_radix_cache_insert = state.progress.barred = False
        if private is not None:
            state.private = None
            if private.ready and req.kv.kv_committed_len > state.prompt:
                # Tokens were decoded from chosen entries; others must not reuse them.
                req.skip_radix_cache_insert = True
            self._store.free(private.row)
        state.give_up(Reason.POLICY_ERROR)
        if state.told.counted:
            self._reports.gave_up(req, state, Reason.POLICY_ERROR)

    def _end(self, req: Any, state: State, stage: str) -> None:
        name = state.served.name
        if state.private is not None:
            # It may run once more before SGLang ends it; then it reads its latest token only,
            # nothing that was half written.
            latest = max(state.prompt, req.kv.kv_allocated_len - 1)
            try:
                self._store.empty(state.private, latest)
            except Exception:  # its slots are given back with its row
                logger.exception("Slots of a failed request are still held. rid=%s", req.rid)
                state.private = None
        state.give_up(Reason.POLICY_ERROR)
        compat.end_with_error(
            req,
            f"KV-cache policy `{name}` failed at {stage} of this request, and its full KV is gone. "
            f"Send it again with custom_params.kv_policy `none`; the server's log says why.",
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
            "full until the server is started again (--kv-policy-max-failures).",
            served.name,
            standing.failures,
        )


class Contained:
    """A block whose exceptions are one request's."""

    def __init__(self, failures: Failures, req: Any, stage: str, whole: bool | None) -> None:
        self._failures, self._req, self._stage, self._whole = failures, req, stage, whole

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self._failures.note(self._req, self._stage, error, whole=self._whole)
        return True
