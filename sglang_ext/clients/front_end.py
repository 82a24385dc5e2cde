"""The plugin in the front end: it chooses requests' policies and learns how requests end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from kvpolicy.sglang_ext.clients.traffic import Traffic
from kvpolicy.sglang_ext.experiment.live import Live
from kvpolicy.sglang_ext.experiment.shadow import Shadows, WholeAnswer
from kvpolicy.sglang_ext.face import compat
from kvpolicy.sglang_ext.face.asked import ASSIGNED

logger = logging.getLogger(__name__)

POLL = 2.0  # seconds between two looks at the experiment's file
_STATUS = 500  # HTTP status from which on the server is to blame


class FrontEnd:
    """The plugin's part for one tokenizer manager of SGLang.

    Attributes:
        traffic: which policy each request gets.
        live: the experiment, if there is one.
    """

    def __init__(self, traffic: Traffic, *, context: int) -> None:
        """
        Args:
            context: tokens of the model's context.
        """
        self.traffic = traffic
        self.live: Live | None = traffic.live
        self.shadows: Shadows | None = None
        self._context = context
        self._token_bytes = 0  # KV memory of one token with full KV, once schedulers have said it
        self._began = False
        self._noted: set[tuple[str, type]] = set()
        self._watching: asyncio.Task[None] | None = None
        self._applied: Any = None  # the gauge, if metrics are on

    async def arrived(self, manager: Any, obj: Any, request: Any) -> None:
        """A request has arrived: choose its policy.

        Raises:
            ValueError: it asks for what it may not have.
        """
        if not compat.is_generation(obj):
            return
        if compat.is_named_health_check(obj):
            if compat.is_of_health_route(request):
                return
            raise ValueError(
                "a request id that begins with HEALTH_CHECK is SGLang's own; send another `rid`"
            )
        if not self._began:
            self._began = True
            await self._begin(manager)
        draws = await self.traffic.choose(manager, obj, request)
        if draws and self.live is not None and not compat.is_starting(manager):  # SGLang's warm-up
            try:
                await self.traffic.draw(self.live, manager, obj, request)
            except Exception as error:
                self._note("a request was not assigned and gets the server's default", error)

    def _note(self, what: str, error: Exception) -> None:
        """Log an error of an experiment, which fails no request, once for each kind."""
        kind = (what, type(error))
        if kind not in self._noted:
            self._noted.add(kind)
            logger.error("KV-cache experiment: %s.", what, exc_info=error)

    async def _begin(self, manager: Any) -> None:
        labels = compat.front_end_labels(manager)
        if labels is not None:
            # SGLang has set the multiprocess folder by now; imported earlier, the library
            # misses it.
            from prometheus_client import Gauge

            text = "1, or 0 while policies are disabled: every request gets full KV."
            gauge = Gauge(
                "sglang:kv_policy_applied", text, [*labels], multiprocess_mode="mostrecent"
            )
            self._applied = gauge.labels(**labels)
            self._applied.set(1)
        if self.live is not None:
            if labels is not None:
                self.live.series.export(labels)
            self.shadows = Shadows(self.live, manager, self._context)
            self._watching = asyncio.get_running_loop().create_task(self._watch(self.live))
            try:
                self._token_bytes = await compat.token_bytes(manager)
            except Exception as error:
                self._note("what full KV takes is not known, and is counted as nothing", error)

    def apply(self, on: bool) -> bool:
        """Switch policies on or off from the next request on. Returns whether that is new."""
        new = self.traffic.enabled != on
        self.traffic.enabled = on
        if self._applied is not None:
            self._applied.set(int(on))
        return new

    async def _watch(self, live: Live) -> None:
        """Follow the experiment's file, and the steps of its coverage; keep what was seen."""
        while True:
            await asyncio.sleep(POLL)
            try:
                await live.keep_state()
                await live.keep_evidence()
                live.series.standing(live.lifecycle)
                await live.follow()
            except Exception as error:
                self._note("its file was not looked at", error)

    def ended(
        self, state: Any, meta_info: Mapping[str, Any], facts: Mapping[str, Any], recorded: Any
    ) -> None:
        """A request has ended.

        Args:
            state: SGLang's, of the request.
            meta_info: of its answer.
            facts: what is reported of its policy.
            recorded: candidates of a sampled request from the scheduler (raw.py); None if none.
        """
        assigned = assigned_to(state.obj)
        if self.live is not None and "arm" in assigned:
            # SGLang notes the times of the request after this.
            prompt = {"prompt_tokens": meta_info.get("prompt_tokens", 0)}
            arguments = (self.live, assigned, state, meta_info, {**prompt, **facts}, recorded)
            asyncio.get_running_loop().call_soon(self._ended, *arguments)

    def _ended(
        self,
        live: Live,
        assigned: Mapping[str, Any],
        state: Any,
        meta_info: Mapping[str, Any],
        facts: Mapping[str, Any],
        recorded: Any,
    ) -> None:
        if _asked_for_nothing(meta_info["finish_reason"]):
            return
        outcome = _outcome(meta_info["finish_reason"])
        try:
            ttft, e2e = compat.latencies(state)
            if outcome == "aborted" and ttft is None and self._knows_first_token(state.obj):
                ttft = e2e  # it has waited as long for its first token
            live.finished(
                assigned,
                outcome=outcome,
                facts=facts,
                token_bytes=self._token_bytes,
                ttft=ttft,
                e2e=None if outcome == "failed" else e2e,
            )
            if assigned.get("top") and self.shadows is not None:
                answer = WholeAnswer(recorded, facts, state.obj, meta_info)
                self.shadows.offer(assigned, answer if outcome == "ok" else None)
        except Exception as error:
            self._note("a request that has ended was not counted", error)

    def _knows_first_token(self, obj: Any) -> bool:
        """Whether the time of a request's first token is known as soon as there is one."""
        return self._applied is not None or bool(getattr(obj, "stream", False))


def assigned_to(obj: Any) -> Mapping[str, Any]:
    """What was noted in a single request when its policy was chosen; empty if nothing was."""
    params = getattr(obj, "sampling_params", None)
    custom = params.get("custom_params") if isinstance(params, dict) else None
    note = custom.get(ASSIGNED) if isinstance(custom, dict) else None
    return note or {}


def facts_of(assigned: Mapping[str, Any]) -> dict[str, Any]:
    """What a client is told about its assignment."""
    names = ("experiment", "revision", "arm", "reason")
    return {name: assigned[name] for name in names if name in assigned}


def _asked_for_nothing(why: Any) -> bool:
    """Whether no token was to be generated: SGLang sends such a copy before `n` samples."""
    return isinstance(why, dict) and why.get("type") == "length" and why.get("length") == 0


def _outcome(why: Any) -> str:
    if not isinstance(why, dict) or why.get("type") != "abort":
        return "ok"
    status = why.get("status_code")
    return "failed" if status is not None and int(status) >= _STATUS else "aborted"
