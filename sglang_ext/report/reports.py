"""Reports about a request: its facts in the answer's `meta_info`, and the metrics."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from kvpolicy.experiments.definition.experiment import NO_POLICY
from kvpolicy.sglang_ext.face import asked, compat
from kvpolicy.sglang_ext.face.ranks import Ranks
from kvpolicy.sglang_ext.memory.arena import Arena
from kvpolicy.sglang_ext.memory.private import Private
from kvpolicy.sglang_ext.report import kept
from kvpolicy.sglang_ext.report.metrics import Metrics
from kvpolicy.sglang_ext.request.reasons import Reason
from kvpolicy.sglang_ext.request.request import RequestState, Seen, state_of

logger = logging.getLogger(__name__)


class Reports:
    """The reports of one scheduler.

    Attributes:
        token_bytes: KV memory of one token in all layers of the model, in bytes.
    """

    def __init__(self, arena: Arena, metrics: Metrics, ranks: Ranks) -> None:
        self._metrics = metrics
        # Sizes of the whole model, so that every rank and stage reports the same, each list once.
        self._kv_heads = ranks.heads.total(arena.kv_heads)
        self._layers = arena.model_layers
        layer_bytes = arena.slot_bytes // (arena.layers * arena.kv_heads) * self._kv_heads
        self.token_bytes = layer_bytes * self._layers

    def queued(self, req: Any, *, shows_kept: bool) -> None:
        """Note, when a request arrives, whether it asks which positions are kept."""
        state = state_of(req)
        if not shows_kept or req.to_finish is not None:
            return
        if state is not None:
            state.reported.shows_kept = True
            return
        # Nothing will leave, and no policy will report it.
        prompt = len(req.origin_input_ids)
        facts = {"policy": NO_POLICY, "prompt_tokens": prompt, "kept": self._everything(prompt)}
        self._send(req, facts)

    def without_policy(self, req: Any) -> None:
        """Note that the prompt of a request to which no policy applies has ended."""
        # A retracted request comes again, with its output so far.
        internal = compat.is_health_check(req) or asked.is_scoring(req)
        if not req.output_ids and not internal and req.to_finish is None:
            self._metrics.without_policy()

    def finished_prompt(self, req: Any, state: RequestState, entries: int, *, finite: bool) -> None:
        """Note the outcome of compressing a prompt.

        Args:
            entries: number of entries chosen, over all layers and KV heads.
            finite: whether the model's tensors were finite; otherwise nothing can be chosen.
        """
        if state.private is None:
            shares = state.served.upper_layers
            # One stage may need as many slots as the prompt has tokens; then all keep those.
            drops = entries < self._layers * self._kv_heads * state.prompt
            saves_nothing = shares or (state.served.in_stages and drops)
            reason = Reason.NOTHING_SAVED if saves_nothing else Reason.NOTHING_DROPPED
            state.uncompressed = state.uncompressed or reason
            if not finite:
                state.uncompressed = Reason.NOT_FINITE
            return
        if state.reported.counted:
            return
        state.reported.counted = True
        facts = self._of_compressed(state, state.private, entries)
        self._report(req, state, facts)
        self._metrics.compressed(
            state.served.name,
            prompt=state.prompt,
            entries=(facts["entries_before"], entries),
            size=(facts["kv_bytes_before"], facts["kv_bytes_after"]),
            seconds=state.reported.seconds,
        )

    def _of_compressed(self, state: RequestState, private: Private, entries: int) -> dict[str, Any]:
        name = state.served.name
        slots = private.slots.numel()
        facts: dict[str, Any] = {
            "policy": name,
            "prompt_tokens": state.prompt,
            "entries_before": self._layers * self._kv_heads * state.prompt,
            "entries_kept": entries,
            "kv_bytes_before": self.token_bytes * state.prompt,
            "kv_bytes_after": self.token_bytes * slots,
            "slots_freed": state.prompt - slots,
            "compression_seconds": round(state.reported.seconds, 6),
        }
        if state.propagates:
            facts |= state.progress.facts(state.prompt)
            self._metrics.propagated(name, facts["propagated_tokens"])
        if state.reported.shows_kept:
            facts["kept"] = state.reported.kept or self._everything(state.prompt)
        return facts

    def finished(self, requests: Iterable[tuple[Any, RequestState | None]]) -> None:
        """Note, of requests whose prompt has ended, those without policy or served in full."""
        for req, state in requests:
            if state is None:
                self.without_policy(req)
            elif state.failed and req.to_finish is not None:
                if not state.reported.counted:
                    self._metrics.ended_with_prompt(state.served.name)
                state.reported.counted = True
            elif state.uncompressed is not None:
                self.served_in_full(req, state, state.uncompressed)

    def served_in_full(self, req: Any, state: RequestState, reason: Reason) -> None:
        """Note that the prompt of a request has ended and all of it stays."""
        state.seen = Seen()
        if state.reported.counted:
            # It was compressed before it was retracted.
            if "uncompressed" not in state.reported.facts:
                self.gave_up(req, state, reason)
            return
        state.reported.counted = True
        facts = {
            "policy": state.served.name,
            "prompt_tokens": state.prompt,
            "uncompressed": reason.value,
        }
        if state.reported.shows_kept:
            facts["kept"] = self._everything(state.prompt)
        self._report(req, state, facts)
        self._metrics.uncompressed(state.served.name, reason)

    def gave_up(self, req: Any, state: RequestState, reason: Reason) -> None:
        """Note that a request whose prompt has ended goes on without its policy."""
        self._report_again(req, state, {"uncompressed": reason.value})
        self._metrics.gave_up(state.served.name, reason)

    def finished_fold(self, req: Any, state: RequestState, dropped: int, seconds: float) -> None:
        """Note a fold of a request: `dropped` entries have left, in `seconds`."""
        state.reported.folded += 1
        state.reported.dropped += dropped
        facts = {
            "folds": state.reported.folded,
            "entries_dropped_in_decode": state.reported.dropped,
        }
        self._report_again(req, state, facts)
        self._metrics.folded(state.served.name, dropped, seconds)

    def skipped_fold(self, req: Any, state: RequestState, step: int) -> None:
        """Note that there were no slots for a fold at a decode step."""
        state.skipped.add(step)
        self._report_again(req, state, {"skipped_folds": len(state.skipped)})
        self._metrics.skipped_fold(state.served.name)

    def _everything(self, prompt: int) -> dict[str, Any]:
        return kept.everything(self._layers, self._kv_heads, prompt)

    def _report(self, req: Any, state: RequestState, facts: dict[str, Any]) -> None:
        state.reported.facts = facts
        if state.folds:
            facts |= {"folds": 0, "entries_dropped_in_decode": 0, "skipped_folds": 0}
        self._send(req, facts)
        if state.served.set:
            facts["set"] = state.served.set
        logged_facts = {name: value for name, value in facts.items() if name != "kept"}
        logger.debug("Prompt ended. rid=%s, %s", req.rid, logged_facts)

    @staticmethod
    def _send(req: Any, facts: dict[str, Any]) -> None:
        # SGLang puts these into the answer's meta_info, one element per output token; the
        # tokenizer's hook makes it one value.
        req.customized_info = {**(req.customized_info or {}), "kv_policy": [facts]}

    @staticmethod
    def _report_again(req: Any, state: RequestState, changes: dict[str, Any]) -> None:
        values = req.customized_info["kv_policy"]
        if len(values) <= req.send_token_offset:
            # The last element has been sent; the next token's has not.
            values += [None] * (len(req.output_ids) - len(values))
            # What is kept of the prompt has been sent, and the tokenizer remembers it.
            values.append(
                {name: value for name, value in state.reported.facts.items() if name != "kept"}
            )
            state.reported.facts = values[-1]
        state.reported.facts.update(changes)
