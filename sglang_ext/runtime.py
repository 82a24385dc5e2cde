"""The life of compressed requests in one scheduler.

queued     `queue` chooses the policy and decides, as far as is known, whether to compress
admitted   `reserve` adds the private slots to what the request needs
batched    `allocate` takes them for the forward that ends the prompt
forward    `ForwardStep` observes every layer; then the kept entries are copied to private pages
published  `published` leaves the prompt to the radix cache, unlocked: others can hit it, and it is
           the first to be evicted when memory is short
decoding   attention reads private pages and the tail, which grows as in stock SGLang. For a policy
           that goes on while requests decode, the queries of each step are noted; at a step at
           which entries may leave, the policy is taken through the noted steps, what stays is
           folded into private pages, and `detach` gives up the tail's slots (and the prompt's, if
           they are still held)
retracted  `retracted` forgets what is lost; the prompt is prefilled again, the same entries are
           chosen, and the output so far is computed on them in further chunks, so that decoding
           goes on as it would have
freed      SGLang frees the row, and the store the private slots

An error of a policy at any of these points concerns only its request (forward/failures.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

from kvpolicy.sglang_ext.experiment.raw import Raw
from kvpolicy.sglang_ext.face import asked, collection, compat
from kvpolicy.sglang_ext.face.policy_files import Policy
from kvpolicy.sglang_ext.forward.failures import ADMISSION, ALLOCATION
from kvpolicy.sglang_ext.forward.services import Services
from kvpolicy.sglang_ext.forward.stages import Outcome
from kvpolicy.sglang_ext.forward.step import ForwardStep
from kvpolicy.sglang_ext.forward.unconfirmed import Unconfirmed
from kvpolicy.sglang_ext.report import kept
from kvpolicy.sglang_ext.request import admission, internal, request
from kvpolicy.sglang_ext.request.force import Forcing
from kvpolicy.sglang_ext.request.propagation import Progress
from kvpolicy.sglang_ext.request.reasons import Reason
from kvpolicy.sglang_ext.request.request import (
    RequestState,
    Seen,
    Served,
    iterate_finishing,
    state_of,
)
from kvpolicy.sglang_ext.serving.background import Background
from kvpolicy.sglang_ext.serving.changes import Changes
from kvpolicy.sglang_ext.serving.served import ServedPolicies


class Runtime:
    """State of the plugin in one scheduler process."""

    def __init__(
        self, policies: Sequence[Policy], *, max_failures: int = 0, inspection: bool = False
    ) -> None:
        """
        Args:
            max_failures: requests for which a policy may fail before it is disabled; 0: any number.
            inspection: whether clients may ask which positions are kept, and prescribe output.
        """
        self.inspection, self.max_failures = inspection, max_failures
        self.asked_for = tuple(policies)
        self.services = Services([policy.program for policy in policies])
        self.forcing = Forcing()
        self.raw = Raw()
        self._outcomes: deque[Outcome] = deque()
        self._unconfirmed: list[Unconfirmed] = []  # until the host has read how much stays
        # Most tokens of a prompt that `propagate:` needs in one piece; None: any number.
        self.one_piece: int | None = None
        # Set by `start`, which binds the policies to the model.
        self.policies: ServedPolicies
        self.changes: Changes
        self.background: Background

    # Queued and admitted.

    @collection.put_off()
    def queue(self, req: Any) -> None:
        """Choose the policy of a request that enters the queue; refuse what cannot be done."""
        if request.is_assigned(req):
            return
        served, shows_kept = None, False
        if req.to_finish is None and not compat.is_health_check(req):
            try:
                served, shows_kept = self._asked_for(req)
                self._take_assigned(req)
            except ValueError as error:
                req.set_finish_with_abort(str(error))
        with self.services.failures.contained(req, ADMISSION):
            request.assign(req, served, self.one_piece)
        self.services.reports.queued(req, shows_kept=shows_kept)

    def _asked_for(self, req: Any) -> tuple[Served | None, bool]:
        """The policy of a request, and whether its answer says which positions are kept.

        Raises:
            ValueError: it asks for what cannot be done; the message is for the client.
        """
        params = asked.of(req, inspection=self.inspection)
        shows_kept = kept.wanted(params)
        self.forcing.note(req, params)
        served = self.policies.choose(params)
        if shows_kept and served is not None and served.program.exchanged:
            raise ValueError(kept.NOT_IN_STAGES.format(served.name))
        return served, shows_kept

    def refuses(self, req: Any) -> str | None:
        """Why a request cannot have what it asks of policies; None if it can."""
        try:
            self._asked_for(req)
        except ValueError as error:
            return str(error)
        return None

    def _take_assigned(self, req: Any) -> None:
        top = asked.assigned(req).get("top")
        if top and req.beam_group is None:  # each beam has its own distributions
            self.raw.note(req, top)
        if asked.is_scoring(req):
            internal.queue(req)

    def limit_prefix(self, req: Any, matched: int) -> int:
        """Number of tokens, at most `matched`, that a request may take from the radix cache.

        The observation window, and at least the prompt's last token, is computed again: a resumed
        request must pass the end of its prompt to be compressed there.
        """
        state, limit = state_of(req), matched
        if state is None or not state.observed:
            return matched
        with self.services.failures.contained(req, ADMISSION):
            limit = state.prompt - max(state.queries, 1)
            plan = state.followed_plan
            if plan is not None:
                limit = min(limit, plan.most_prefix)
        return max(min(matched, limit), 0)

    @collection.put_off()
    def reserve(self, adder: Any, req: Any, extend: int | None) -> int:
        """Slots that a request needs at its admission beyond those that SGLang counts.

        Negative where folds let its output hold fewer slots than it has tokens.

        Args:
            adder: SGLang's prefill adder.
            extend: tokens that this pass computes; None while the whole request is considered.
        """
        state, slots = state_of(req), 0
        if state is None or not state.observed or state.private is not None:
            return 0
        with self.services.failures.contained(req, ADMISSION):
            slots = admission.reserve(self.services.store, adder, req, state, extend)
        return slots

    def still_needs(self, req: Any, estimate: float) -> float:
        """Slots that a running request may still take besides those that it holds.

        Args:
            estimate: SGLang's number, as if all output stayed in memory.
        """
        state, needs = state_of(req), estimate
        if state is None or not state.continues_anywhere:
            return estimate
        with self.services.failures.contained(req, ADMISSION):
            needs = admission.still_needs(req, state, estimate)
        return needs

    def admit_again(self, running: Any) -> None:
        """Before the scheduler admits requests: let it use what has been freed since it last did.

        Stock SGLang takes a batch to be full until one of its requests ends, as nothing else frees
        memory; here, leaving a prompt to the radix cache does too.
        """
        self.services.store.set_aside.take_back(self.services.evict)
        if self.services.has_room:
            running.batch_is_full = False
            self.services.has_room = False

    def must_wait(self, adder: Any, req: Any, has_chunked: bool) -> bool:
        """Whether a request cannot be admitted now.

        A resumed request waits while another request is in chunks. A propagating one waits while
        the pass has too many of its kind, or would split a prompt that must be in one piece.
        """
        state = state_of(req)
        if state is None or not state.observed:
            return False
        rows = len(self.services.scratch_rows)
        if state.propagates and admission.must_wait(adder, req, state, rows):
            return True
        return state.resumes and (has_chunked or adder.new_chunked_req is not None)

    def end_early(self, req: Any) -> bool:
        """Cut a resumed request's pass where its prompt ends or entries left; True if cut."""
        state = state_of(req)
        if state is None or not state.resumes:
            return False
        end = req.extend_end
        with self.services.failures.contained(req, ADMISSION):
            end = state.next_end(req.prefix_len, req.extend_end)
        cut: bool = end < req.extend_end
        req.extend_end = end
        return cut

    # Batched and computed.

    def allocate(self, batch: Any) -> None:
        """Take private slots for the requests whose prompt ends in this batch.

        A propagating one takes them with its first chunk: once tokens have not gone through deeper
        layers, it cannot be served in full any more. What fails on one rank fails on all when the
        forward begins.
        """
        self.services.tree = batch.tree_cache
        for req in batch.reqs:
            state = state_of(req)
            if state is None or not state.wanted or state.private is not None:
                continue
            if state.in_place:
                # Others must not find the prompt: its slots will hold something else.
                req.skip_radix_cache_insert = state.progress.barred = True
                continue
            if req.extend_end != state.prompt and not state.propagates:
                continue
            with self.services.failures.contained(req, ALLOCATION):
                self._allocate(req, state)

    def _allocate(self, req: Any, state: RequestState) -> None:
        row, name, services = req.kv.req_pool_idx, state.served.name, self.services
        state.private = services.store.allocate(
            row, name, state.slots, state.prompt, services.evict
        )
        if state.private is None:
            state.uncompressed = Reason.NO_SLOTS
            state.forget()
        elif state.propagates:
            # Others must not find it: deeper layers will have entries of chosen tokens only.
            req.skip_radix_cache_insert = state.progress.barred = True

    @collection.put_off()
    def forward(self, run: Callable[[], Any], batch: Any) -> Any:
        """Run a batch's forward with the plugin's part in it.

        With several stages, the plugin's part ends at `processing`.
        """
        self.services.tree = batch.tree_cache
        self.services.tables.write()
        self.forcing.prepare(batch)
        self.raw.prepare(batch)
        if batch.forward_mode.is_extend():  # prompts end, and their requests join decode batches
            self.services.forget_rows()
        self.services.step = step = ForwardStep(self.services, batch)
        try:
            result = run()
            step.finish()
        finally:
            self.services.step = None
        if step.prefill is not None:
            self._unconfirmed += step.prefill.unconfirmed
        finishing = list(iterate_finishing(batch)) if batch.forward_mode.is_extend() else []
        if self.services.in_stages:
            self._outcomes.append(Outcome(self.services, batch, step, finishing))
        elif finishing:
            self.services.reports.finished(finishing)
        return result

    @collection.put_off()
    def processing(self, batch: Any) -> None:
        """Before the scheduler processes a forward's result: take up what the forward found.

        With several stages, that is what it found on all of them: they compute a batch at different
        times, but all compute, schedule and process results in the same order. With one stage, it
        is how much stays, where the host did not wait for the device (forward/unconfirmed.py).
        """
        if self.services.in_stages:
            self._outcomes.popleft().take_up(batch)
        elif self._unconfirmed and batch.forward_mode.is_extend():
            # The forward that ends a prompt may run while the chunk before it is processed.
            rows = zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True)
            ended_requests = [
                req for req, prefix, new in rows if prefix + new >= len(req.origin_input_ids)
            ]
            self._confirm(set(map(id, ended_requests)))

    def _confirm(self, processed: Collection[int]) -> None:
        """Read from the device what stays of prompts; `processed` has the ids of their requests."""
        unconfirmed_prompts, self._unconfirmed = self._unconfirmed, []
        for unconfirmed in unconfirmed_prompts:
            if not unconfirmed.goes_on:
                continue
            if id(unconfirmed.request) in processed:
                unconfirmed.confirm(self.services)
            else:
                self._unconfirmed.append(unconfirmed)

    def chunk_must_wait(self, adder: Any, req: Any) -> bool:
        """Whether a request in chunks cannot go on in a pass.

        It cannot while some stage does not know what stays of its prompt, or where its next chunk
        has no room.
        """
        state = state_of(req)
        if (
            state is not None
            and state.resumes
            and state.under_way > 0
            and req.prefix_len >= state.prompt
        ):
            return True
        return not admission.fits_chunk(adder, req, others=self.services.in_stages)

    # Published, retracted.

    def published(self, req: Any) -> None:
        """After SGLang has offered a request to the radix cache: give up what has been copied."""
        state = state_of(req)
        if state is None or req.prefix_len < state.prompt:
            return
        state.published = True
        if state.private is not None and state.private.ready:
            self.services.detach([(req, state)])

    def ends_with_error(self, req: Any) -> bool:
        """Whether a request that SGLang has ended has to end with an error instead.

        Its policy may have failed on some rank since the ranks agreed last. Stages have agreed
        before they process a result.
        """
        state, services, failures = state_of(req), self.services, self.services.failures
        if services.ranks.size == 1 or services.in_stages:
            return False
        if state is None or state.failed or not req.finished():
            return False
        failures.agree([req])
        return req.to_finish is not None

    def released(self, req: Any) -> None:
        """Before SGLang frees a finished request.

        A request that its first token ended may have had a decode step meanwhile; what that step
        computed from chosen entries must not enter the radix cache.
        """
        self.services.store.set_aside.ended(req.rid)
        self.services.forget_rows()
        state = state_of(req)
        if state is None or state.private is None or not state.private.ready:
            return
        if req.kv.kv_committed_len > state.prompt:
            req.skip_radix_cache_insert = True
        if req.skip_radix_cache_insert and not state.progress.barred:
            compat.keep_for_session(self.services.tree, req)

    def owned(self, req: Any, length: int) -> int:
        """Number of tokens that a finished request owns in its row; later ones were computed ahead.

        A fold may have included the token that was decoded after the last one of the answer.

        Args:
            length: SGLang's number.
        """
        state = state_of(req)
        detached = state is not None and state.detached
        return max(length, req.kv.cache_protected_len) if detached else length

    def retracted(self, req: Any) -> None:
        """Forget what will be computed again; SGLang has freed the compressed copy with the row."""
        state = state_of(req)
        self.services.forget_rows()
        if state is None:
            return
        state.seen, state.under_way = Seen(), 0
        if state.detached or state.progress.barred:
            req.skip_radix_cache_insert = False
        state.progress = Progress()
        if state.continues_anywhere or (state.private is not None and state.private.ready):
            state.was_compressed = len(req.output_ids) > 0
        state.private = state.decoding = None
        state.published = state.detached = state.in_place = False
        state.reported.folded = state.reported.dropped = 0
