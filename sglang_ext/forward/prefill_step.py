"""Prompts in one extend forward: which rows the policies see, what is kept when a prompt ends.

Where a prompt's length does not decide how many entries each list keeps (unconfirmed.py), the host
waits for the device once after the last layer, for all such prompts that end in the forward: it
needs to know these numbers, and whether the tensors were finite. It also waits for:

* a policy that propagates: once per prompt at each layer after which tokens leave, for how many go
  deeper, and once more if the radix cache had some of the prompt's tokens; and, if data decide the
  condition, once per prompt and layer at which it is tested
* `cluster[layer]`, and `split[layer]` and `cascade[layer]` of totals or maxima that data decide:
  once per prompt, because the host divides exactly
* layers in pairs (share.py): once per pair, for how many tokens keep both originals
* a request that asks which positions are kept: once
* the torch references of kernels: wherever they look at values
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from kvpolicy.dsl.execute.decode.memory import Known
from kvpolicy.dsl.execute.layer.choice import Held
from kvpolicy.dsl.execute.prefill.finished import FinishedPrefill
from kvpolicy.dsl.execute.prefill.run import KeysValues, Run
from kvpolicy.sglang_ext.face import compat
from kvpolicy.sglang_ext.face.host import to_host
from kvpolicy.sglang_ext.forward import share
from kvpolicy.sglang_ext.forward.compress import compress, give_back, slots_of_copy, timed
from kvpolicy.sglang_ext.forward.failures import CHOOSING, COMPACTION, SCORING
from kvpolicy.sglang_ext.forward.fold import begun
from kvpolicy.sglang_ext.forward.parts import Chosen, Comparing, Part, StageChoice
from kvpolicy.sglang_ext.forward.row_layout import RowLayout
from kvpolicy.sglang_ext.forward.unconfirmed import Unconfirmed, known_counts, launched, taken_over
from kvpolicy.sglang_ext.report.kept import described
from kvpolicy.sglang_ext.request.request import Queries, RequestState, Seen, iterate_rows

if TYPE_CHECKING:
    from kvpolicy.sglang_ext.forward.services import Services


@dataclass
class Scored:
    """A request whose prompt ends in this forward.

    Attributes:
        slots: int64 [n] slots of the tokens that reach the current layer, at first all N.
        tokens: int64 [n] positions of these tokens in the prompt; None: all N.
        prompt_slots: int64 slots of all tokens that `run` decides on: [N], or [m] of a second
            prefill.
        run: the policy's prefill of the prompt.
        queries: number of last queries that `run` observes at a layer, if it has so many tokens.
        chosen: int64 [m] indices into the n tokens: those that go deeper than the layer just
            observed; None: all.
        origin: int64 [m] positions in the prompt of a second prefill's tokens, if the request asks
            which are kept; None: positions of `run` are those of the prompt.
        known_counts: [L] entries that each list of a layer keeps; None: wait for the device.
    """

    request: Any
    state: RequestState
    slots: torch.Tensor
    prompt_slots: torch.Tensor
    run: Run
    queries: int
    tokens: torch.Tensor | None = None
    chosen: torch.Tensor | None = None
    origin: torch.Tensor | None = None
    known_counts: list[int] | None = None

    def narrow(self, chosen: torch.Tensor) -> None:
        """Leave out all but the chosen tokens, int64 [m] indices into the n."""
        self.slots = self.slots[chosen]
        self.tokens = chosen if self.tokens is None else self.tokens[chosen]

    def restart(self, chosen: torch.Tensor) -> None:
        """Begin again on the chosen tokens, int64 [m]; their entries go to the last m slots."""
        tokens = chosen.numel()
        if self.state.reported.shows_kept:
            self.origin = chosen
        self.slots = self.prompt_slots = self.slots[self.slots.numel() - tokens :]
        self.run = self.run.again(tokens)
        self.queries = self.run.queries


@dataclass
class _Windowed:
    """A request with a chunk, not its last, that holds queries of the observation window."""

    request: Any
    state: RequestState
    count: int  # of these queries, the last rows of the chunk


@dataclass
class _Accumulated:
    """A request with a chunk, not its last, whose policy sums over all queries."""

    request: Any
    state: RequestState
    slots: torch.Tensor  # [n] int64 of its tokens up to the end of the chunk


@dataclass(frozen=True)
class _DeviceChoice:
    """What one request keeps, on the device.

    Attributes:
        kept: bool [l, g, N], of the layers and KV heads that are here, as of `finished`.
        counts: int64 [l, g] entries of each list.
        held: int64 [l, 2] as of `Held.of`; [0, 2] if the policy remembers nothing.
        finite: 0-d, whether the model's tensors were finite.
    """

    finished: FinishedPrefill
    kept: torch.Tensor
    counts: torch.Tensor
    held: torch.Tensor
    finite: torch.Tensor


class PrefillStep:
    """What the policies see and decide in one extend forward.

    Attributes:
        ending: requests whose prompt ends in it, failed ones included.
        unconfirmed: those of them compressed before the device has said how many entries stay.
        parts: with several stages, what this one has found, by `id` of the request.
    """

    def __init__(self, services: Services, batch: Any, layout: RowLayout) -> None:
        self._services, self._layout = services, layout
        self.scored: list[Scored] = []
        self._windowed: list[_Windowed] = []
        self._accumulated: list[_Accumulated] = []
        self._concerned: list[Any] = []
        self.ending: list[tuple[Any, RequestState]] = []
        self.unconfirmed: list[Unconfirmed] = []
        self.parts: dict[int, Part] = {}
        table = batch.req_to_token_pool.req_to_token
        for request, state, rows, prefix in iterate_rows(batch):
            length = prefix + rows.stop - rows.start
            slots = table[request.kv.req_pool_idx, :length].to(torch.int64)
            self._concerned.append(request)
            if length == state.prompt:
                self.ending.append((request, state))
            with services.failures.contained(request, SCORING):
                self._begin(request, state, slots, prefix)
        services.failures.agree(self._concerned)

    def _begin(self, request: Any, state: RequestState, slots: torch.Tensor, prefix: int) -> None:
        """Note what a request needs in this forward.

        Args:
            slots: int64 [n] of its tokens up to the end of the forward.
            prefix: number of its tokens before the forward.
        """
        length = slots.numel()
        first = max(prefix, state.prompt - state.queries)
        if length < state.prompt and state.served.program.accumulates:
            if prefix == 0:
                state.seen.run = state.served.program.start(state.prompt)
            self._accumulated.append(_Accumulated(request, state, slots))
        elif first < length < state.prompt:
            self._windowed.append(_Windowed(request, state, length - first))
        elif length == state.prompt:
            run, queries = state.seen.run, state.queries
            if run is None:
                run = state.served.program.start(state.prompt)
            else:
                queries = max(state.prompt - prefix, state.served.single_queries(state.prompt))
            scored = Scored(
                request, state, slots, slots, run, queries, known_counts=known_counts(state)
            )
            self.scored.append(scored)

    @property
    def reads_lse(self) -> bool:
        """Whether a policy in this forward computes less if attention gives its log-sum-exp."""
        states = [chunk.state for chunk in self._windowed]
        states += [chunk.state for chunk in self._accumulated]
        states += [scored.state for scored in self.scored]
        return any(state.served.program.reads_lse for state in states)

    def observe(self, layer: Any, queries: Queries) -> None:
        """Show one layer to the policies; its keys and values are in the pool already.

        Args:
            queries: of all rows of the forward at this layer.
        """
        for windowed in self._windowed:
            rows = self._layout.rows(windowed.request)
            if rows is not None:
                window = queries.rows(slice(rows.stop - windowed.count, rows.stop)).copied()
                windowed.state.seen.window.setdefault(layer.layer_id, []).append(window)
        failures, shared = self._services.failures, self._services.ranks.heads.shared
        for chunk in self._accumulated:
            rows = self._layout.rows(chunk.request)
            if rows is not None and not chunk.state.broken:
                with (
                    failures.contained(chunk.request, SCORING, joint=shared),
                    timed(chunk.state),
                ):
                    self._accumulate(chunk, layer, queries.rows(rows))
        for scored in self.scored:
            rows = self._layout.rows(scored.request)
            if rows is not None and not scored.state.broken:
                joint = scored.run.needs_ranks or (shared and scored.queries > 0)
                with (
                    failures.contained(scored.request, SCORING, joint=joint),
                    timed(scored.state),
                ):
                    self._observe(scored, layer, queries.rows(rows))

    def _accumulate(self, chunk: _Accumulated, layer: Any, queries: Queries) -> None:
        state = chunk.state
        k, v = self._entries(state, chunk.slots, range(layer.layer_id, layer.layer_id + 1))
        q, lse = self._of_heads(queries, layer)
        state.seen.run.accumulate(layer.layer_id, q, k, v, lse=lse)
        single = state.served.single_queries(state.prompt)
        chunk_queries = state.seen.window.get(layer.layer_id, [])
        latest = Queries.joined([*chunk_queries, queries]).last(single)
        state.seen.window[layer.layer_id] = [latest.copied()]

    def _entries(self, state: RequestState, slots: torch.Tensor, layers: range) -> KeysValues:
        """Keys and values of layers at int64 [n] slots, as a policy's program takes them."""
        arena = self._services.arena
        first = arena.place_of(layers.start)
        k, v = arena.of_layers(range(first, first + len(layers)), slots)
        values = v if state.served.bound.needs_values else None
        if state.served.kernels.read_the_pool:
            return k, values
        return k.dense, None if values is None else values.dense

    def _of_heads(self, queries: Queries, layer: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Queries [H, T, D] as a policy's program takes them, and their log-sum-exp [H, T].

        H are all query heads that read the KV heads held here, those of other ranks included.
        """
        parts = [(compat.scaled(queries.heads, layer).transpose(0, 1), 0)]
        if queries.lse is not None:
            parts.append((queries.lse.T, 0))
        q, *lse = self._services.ranks.heads.queries(parts)
        return q, lse[0] if lse else None

    def _observe(self, scored: Scored, layer: Any, queries: Queries) -> None:
        state, tokens = scored.state, scored.slots.numel()
        needed = min(scored.queries, tokens)
        queries = queries.last(needed)
        chunk_queries = state.seen.window.get(layer.layer_id, [])
        if chunk_queries and queries.number < needed:
            queries = Queries.joined([*chunk_queries, queries]).last(needed)
        if queries.number != needed:
            raise RuntimeError(
                f"request {scored.request.rid}: {queries.number} of the last {needed} "
                f"queries of its prompt were computed"
            )
        q, lse = self._of_heads(queries, layer)
        entries = partial(self._entries, state, scored.slots)
        scored.chosen = scored.run.show(layer.layer_id, q, entries, scored.tokens, lse=lse)

    def finish(self) -> None:
        """After the forward: choose what is kept and copy it to private pages.

        With several stages, only choose, or find the numbers that the others need first.
        """
        failures, choices = self._services.failures, []
        failures.agree(self._concerned)
        for scored in self.scored:
            if scored.state.broken:  # on any rank
                continue
            with failures.contained(scored.request, CHOOSING, joint=True), timed(scored.state):
                if scored.run.program.exchanged:
                    self.parts[id(scored.request)] = self._comparing(scored)
                else:
                    choices.append((scored, self._choose(scored)))
        chosen = [(scored, choice) for scored, choice in choices if not scored.state.broken]
        for scored, choice in chosen:
            if scored.known_counts is not None:
                self._compress_at_once(scored, choice, scored.known_counts)
        chosen = [(scored, choice) for scored, choice in chosen if scored.known_counts is None]
        numbers: list[list[torch.Tensor]] = []
        if chosen:  # the numbers of one arrive with those of the others
            with failures.contained_together([scored.request for scored, _ in chosen], CHOOSING):
                # Work of all requests has been launched before the host waits for numbers.
                numbers = self._numbers([choice for _, choice in chosen])
        if not numbers:
            return
        if self._services.in_stages:
            for (scored, choice), (counts, widest, held, finite) in zip(
                chosen, numbers, strict=True
            ):
                with failures.contained(scored.request, CHOOSING, joint=True):
                    shown = (
                        self._of_all_heads(choice.kept)
                        if scored.state.reported.shows_kept
                        else None
                    )
                    kept_here = StageChoice(choice.finished, choice.kept, _known(held, widest))
                    self.parts[id(scored.request)] = Chosen(
                        scored.state, bool(finite), kept_here, counts, shown
                    )
            return
        for (scored, choice), (counts, widest, held, finite) in zip(chosen, numbers, strict=True):
            with failures.contained(scored.request, COMPACTION, joint=True):
                with timed(scored.state):
                    choice.finished.settle(finite=bool(finite))
                    self._compress(scored, choice.finished, choice.kept, counts)
                    scored.state.remember(choice.finished, _known(held, widest))
                self._describe(scored, choice.kept)
            self._ended(scored, choice.finished, counts)

    def _compress_at_once(self, scored: Scored, choice: _DeviceChoice, layers: list[int]) -> None:
        """Compress a prompt without waiting for the device.

        Args:
            layers: [L] entries that each list of a layer keeps, if tensors are finite.
        """
        failures, store = self._services.failures, self._services.store
        request, state = scored.request, scored.state
        counts = torch.tensor(layers)[:, None].expand(-1, store.kv_heads).contiguous()
        with failures.contained(request, COMPACTION, joint=True), timed(state):
            choice.finished.settle(finite=True)
            unconfirmed = launched(request, state, store.here(counts), choice.counts, choice.finite)
            self._compress(scored, choice.finished, unconfirmed.fitting(choice.kept), counts)
            state.remember(choice.finished, taken_over(state, layers))
            if state.private is not None:
                self.unconfirmed.append(unconfirmed)
        self._ended(scored, choice.finished, counts)

    def _ended(self, scored: Scored, finished: FinishedPrefill, counts: torch.Tensor) -> None:
        """Report a prompt that has been compressed, unless that has failed on some rank."""
        if not scored.state.broken:
            with self._services.failures.contained(scored.request, COMPACTION):
                self._note(scored, int(counts.sum()), finite=not finished.not_finite)

    def _comparing(self, scored: Scored) -> Comparing:
        finite = scored.run.finite
        numbers = scored.run.layer_numbers()
        parts = [numbers] if finite is None else [numbers, finite]
        numbers, *is_finite = to_host(parts)
        all_finite = all(map(bool, is_finite))
        return Comparing(
            scored.state, all_finite, scored.run, numbers, self._services.store.kv_heads
        )

    def carry_out(self, request: Any, model_numbers: torch.Tensor, *, finite: bool) -> None:
        """Compress a request's prompt by what all stages have found.

        If that fails here, the request holds as many slots as on other stages and reads only its
        newest token, until all stages know.

        Args:
            model_numbers: int64 [L, `numbers_of_layer`] of all stages' layers, on the host.
            finite: whether the model's tensors were finite on all stages.
        """
        failures, part = self._services.failures, self.parts[id(request)]
        scored = next(candidate for candidate in self.scored if candidate.request is request)
        state = scored.state
        table = self._services.tree.req_to_token_pool.req_to_token
        # The radix cache may have had the same prompt, and freed these slots in favor of its own.
        scored.prompt_slots = table[request.kv.req_pool_idx, : state.prompt].to(torch.int64)
        counts = chosen = None
        with failures.contained(request, COMPACTION, whole=False, joint=True), timed(state):
            counts = part.counts(model_numbers, finite=finite)
        if not state.broken:
            with failures.contained(request, CHOOSING, whole=False, joint=True), timed(state):
                chosen = part.choose()
        if not state.broken and chosen is not None and counts is not None:
            with failures.contained(request, COMPACTION, whole=False, joint=True), timed(state):
                self._compress(scored, chosen.finished, chosen.kept, counts)
                state.remember(chosen.finished, chosen.known)
        if state.broken:
            self._keep_pace(request, state, counts, finite=finite)
        elif counts is not None:
            with failures.contained(request, COMPACTION, whole=False):
                positions = part.positions(model_numbers)
                is_new = state.private is not None and not state.reported.counted
                if positions is not None and is_new:
                    state.reported.kept = described(positions, None, state.prompt)
                self._note(scored, int(counts.sum()), finite=finite)
        if state.resumes and state.continues_anywhere:
            # Keep what it computes next from the radix cache, which might put other slots in its
            # place before all stages know what stays.
            request.skip_radix_cache_insert = state.progress.barred = True

    def _keep_pace(
        self, request: Any, state: RequestState, counts: torch.Tensor | None, *, finite: bool
    ) -> None:
        """Hold as many slots as the request holds on other stages, without entries in them.

        Args:
            counts: result of `Part.counts`; None if that has failed.
        """
        services = self._services
        if not finite:
            state.forget()  # as on other stages, where nothing leaves
        if counts is None:
            return
        slots = slots_of_copy(services.store, state, counts)
        with services.failures.contained(request, COMPACTION, whole=False):
            if slots is None:
                give_back(services, state)
            else:
                private = begun(services, request, state, state.prompt)
                services.store.hold(private, slots, services.evict)

    def _choose(self, scored: Scored) -> _DeviceChoice:
        finished = scored.run.finish(wait=False)
        kept, finite = torch.stack(finished.kept), finished.finite
        if finite is None:
            finite = kept.new_ones(())
        # Only a policy that goes on remembers what each layer holds.
        held = kept.new_zeros((0, 2), dtype=torch.int64)
        if scored.state.folds:
            held = Held.of(kept, finished.columns())
        return _DeviceChoice(finished, kept, kept.sum(dim=2), held, finite)

    def _numbers(self, chosen: list[_DeviceChoice]) -> list[list[torch.Tensor]]:
        """What the host needs to know of each request, in one transfer.

        Returns:
            Of each: int64 [l, G] entries of each list, of all ranks; int64 [l, G], or [0, G] if
            nothing is remembered, positions that some head of the list's layer and rank keeps;
            `held` and `finite`.
        """
        parts = [
            (tensor, 1) for choice in chosen
            for tensor in (choice.counts, choice.held[:, :1].expand(-1, choice.counts.shape[1]))
        ]  # fmt: skip
        gathered = iter(self._services.ranks.heads.gathered(parts))
        tensors = [
            tensor
            for choice in chosen
            for tensor in (next(gathered), next(gathered), choice.held, choice.finite)
        ]
        numbers = to_host(tensors)
        return [numbers[i : i + 4] for i in range(0, len(numbers), 4)]

    def _compress(
        self, scored: Scored, finished: FinishedPrefill, kept: torch.Tensor, counts: torch.Tensor
    ) -> None:
        state, slots = scored.state, scored.prompt_slots
        state.seen = Seen()
        if state.served.upper_layers:
            share.compress(self._services, state, slots, finished)
            return
        compress(self._services, scored.request, state, slots, kept, counts, finished)

    def _describe(self, scored: Scored, kept: torch.Tensor) -> None:
        """Note which entries were copied, bool [l, g, N], if the answer is to say it."""
        state, reported = scored.state, scored.state.reported
        paired = bool(state.served.upper_layers)  # they hold everything
        if (
            reported.shows_kept
            and not reported.counted
            and state.private is not None
            and not paired
        ):
            reported.kept = described(self._of_all_heads(kept), scored.origin, state.prompt)

    def _of_all_heads(self, kept: torch.Tensor) -> torch.Tensor:
        """bool [l, G, N] kept on all ranks, from this rank's [l, g, N]."""
        (all_heads,) = self._services.ranks.heads.gathered([(kept, 1)])
        return all_heads

    def _note(self, scored: Scored, kept: int, *, finite: bool) -> None:
        progress = scored.state.progress
        if progress.barred and scored.state.is_whole:
            # All layers have all entries: others may use them.
            scored.request.skip_radix_cache_insert = progress.barred = False
        self._services.reports.finished_prompt(scored.request, scored.state, kept, finite=finite)


def _known(held: torch.Tensor, widest: torch.Tensor) -> Known:
    """What the host knows, from two results of `PrefillStep._numbers`."""
    return Known(Held.each(held), max(widest.flatten().tolist(), default=0))
