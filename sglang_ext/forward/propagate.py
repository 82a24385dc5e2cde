"""Prefill in which tokens leave: deeper layers compute only the rows that a policy chose.

Every decoder layer of the model is wrapped. After a layer at which tokens leave, the chosen rows of
the hidden states and of the residual stream are gathered, and a view of the forward batch takes the
place of SGLang's: each request has its chosen tokens' slots in a scratch row of the table of slots.
Chosen tokens from the radix cache are read by these slots and have no rows. After the last layer
there are as many rows as in SGLang's batch again: the row from which a request's logits are taken
holds its last computed token.

A prompt in chunks waits at the layer after which its tokens leave: rows of earlier chunks are held
until the last chunk, and layers without any row are skipped. If a policy restarts, chosen tokens
are embedded and computed from layer 0 on, at positions 0, 1, ..., before deeper layers go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from kvpolicy.sglang_ext.face import compat
from kvpolicy.sglang_ext.face.host import to_device, to_host
from kvpolicy.sglang_ext.face.kernels_in_use import in_use
from kvpolicy.sglang_ext.forward import view
from kvpolicy.sglang_ext.forward.failures import PROPAGATION, Contained, met
from kvpolicy.sglang_ext.forward.prefill_step import PrefillStep, Scored
from kvpolicy.sglang_ext.forward.row_layout import RowLayout
from kvpolicy.sglang_ext.request.propagation import LayerRows, PropagationPlan
from kvpolicy.sglang_ext.request.request import RequestState, state_of

if TYPE_CHECKING:
    from kvpolicy.sglang_ext.forward.services import Services

Layer = Callable[..., torch.Tensor]


@dataclass
class _Batched:
    """One request of the forward, here one that keeps all its rows."""

    request: Any
    index: int  # in the batch
    own: slice  # its rows in SGLang's batch
    row: int  # of the table of slots
    length: int  # number of its tokens in that row
    lost: bool = field(default=False, kw_only=True)  # it failed: its rows are void


@dataclass
class _Propagating(_Batched):
    """A request whose rows leave, or may."""

    state: RequestState
    plan: PropagationPlan
    scored: Scored | None  # only in the forward that ends its prompt

    @property
    def keeps_rows(self) -> bool:
        """Whether all its rows go through every layer after all."""
        return self.state.failed and self.state.is_whole

    def leaves(self, layer: int, layers: int) -> bool:
        """Whether rows leave or join after `layer`, of `layers` in all."""
        stops = self.plan.layer == layer
        if self.scored is None:
            return stops and self.state.propagates
        if self.scored.chosen is not None:
            return self.plan.restarts or layer != layers - 1
        return stops and self.state.progress.stopped


def shifts(batch: Any) -> torch.Tensor | None:
    """By how much second prefills lower the positions of a batch's rows; None: all by 0.

    Returns:
        int64 [rows] on the CPU; in a decode batch further rows may follow the requests'.
    """
    states = [state_of(request) for request in batch.reqs]
    shifts = [0 if state is None else state.progress.shift for state in states]
    if not any(shifts):
        return None
    if batch.forward_mode.is_decode():
        return torch.tensor(shifts + [0] * (len(batch.seq_lens) - len(shifts)))
    shifts = [
        0 if state is None or prefix < state.prompt else state.progress.shift
        for prefix, state in zip(batch.prefix_lens, states, strict=True)
    ]
    return torch.tensor(shifts).repeat_interleave(torch.tensor(batch.extend_lens))


class PropagateStep:
    """The propagating requests of one extend forward, and the other requests in it."""

    def __init__(
        self, services: Services, batch: Any, layout: RowLayout, prefill: PrefillStep
    ) -> None:
        self._services, self._layout = services, layout
        self._kernels = in_use(services.arena.storage.device)
        self._batch: Any = None  # SGLang's forward batch
        self._view: Any = None  # what deeper layers get instead, once rows have left
        self._rows = 0  # at the current layer
        self._reached = -1
        scored_by_id = {id(scored.request): scored for scored in prefill.scored}
        self._batched = [
            self._batched_at(i, request, length, scored_by_id.get(id(request)))
            for i, (request, length) in enumerate(
                zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True)
            )
        ]
        self._scratch = iter(services.scratch_rows)

    def _batched_at(self, index: int, request: Any, length: int, scored: Scored | None) -> _Batched:
        state, rows = state_of(request), self._layout.required_rows(request)
        plan = None if state is None else state.followed_plan
        row = request.kv.req_pool_idx
        if state is None or plan is None or length > state.prompt:
            return _Batched(request, index, rows, row, length)
        return _Propagating(request, index, rows, row, length, state, plan, scored)

    @staticmethod
    def wanted(batch: Any) -> bool:
        """Whether rows may leave in this forward."""
        states = (state_of(request) for request in batch.reqs)
        return any(
            state is not None and state.propagates and prefix < state.prompt
            for state, prefix in zip(states, batch.prefix_lens, strict=True)
        )

    def layer(
        self, number: int, run: Layer, positions: torch.Tensor, hidden: Any, batch: Any, **kw: Any
    ) -> Any:
        """Run one layer on the current rows; afterwards keep the chosen ones.

        Args:
            number: from 0.
            run: the layer.
            positions, hidden, batch: as SGLang passes them, for all rows.
        """
        self._reached = number
        if self._batch is None:
            self._batch, self._rows = batch, positions.shape[0]
        current = self._batch if self._view is None else self._view
        if self._rows:
            positions = positions if self._view is None else self._view.positions
            hidden = run(positions, hidden, current, **kw)
        else:
            compat.await_loaded(self._services.runner, number)
        layers = self._services.arena.layers
        if any(batched.leaves(number, layers) for batched in self._propagating):
            hidden = self._narrow(number, hidden, current)
        last = number == layers - 1
        changed = self._view is not None or any(batched.lost for batched in self._batched)
        return self._widen(hidden) if last and changed else hidden

    def finish(self) -> None:
        """After the forward: fail propagating requests if SGLang did not call all layers."""
        if self._reached == self._services.arena.layers - 1:
            return
        error = RuntimeError(
            f"a prefill with --kv-policy ended at layer {self._reached}: SGLang did not call the "
            f"wrapped layers; start it with --disable-cuda-graph"
        )
        for batched in self._propagating:
            self._services.failures.note(batched.request, PROPAGATION, error, whole=False)

    @property
    def _propagating(self) -> Iterator[_Propagating]:
        return (batched for batched in self._batched if isinstance(batched, _Propagating))

    def _narrow(self, layer: int, hidden: Any, batch: Any) -> Any:
        rows, update = view.rows_of(hidden, batch)
        pieces = self._pieces(layer, rows)
        saved_view = self._view, self._rows
        layout = {
            id(batched.request): request_rows
            for batched in self._batched
            if (request_rows := self._layout.rows(batched.request))
        }
        error, joined = None, hidden
        try:
            joined = self._join(pieces, rows, update)
        except Exception as raised:
            error = raised
        error = met(self._services.ranks, error)
        if error is None:
            return joined
        # One operation for the whole batch has failed. All rows go on as they are; those of the
        # requests that propagate are void from now on.
        self._view, self._rows = saved_view
        self._layout.replace(layout)
        lost = [
            batched
            for batched, _ in pieces
            if isinstance(batched, _Propagating) and not batched.keeps_rows
        ]
        for batched in lost:
            batched.lost = True
            self._services.failures.note(batched.request, PROPAGATION, error, whole=False)
        self._services.failures.agree(batched.request for batched in lost)
        # Attention may already have been planned for other rows.
        compat.prepare(self._services.runner, batch)
        return compat.put_stream(batch, rows.hidden, rows.residual, update)

    def _pieces(self, layer: int, rows: LayerRows) -> list[tuple[_Batched, LayerRows]]:
        """The requests that have rows deeper than a layer, with these rows.

        Args:
            rows: of all requests, after the layer.
        """
        second_rows, layers = self._second_prefills(layer), self._services.arena.layers
        pieces = []
        for batched in self._batched:
            request_rows = self._layout.rows(batched.request)
            piece = None if request_rows is None else rows.take(request_rows)
            if id(batched.request) in second_rows:
                piece = second_rows[id(batched.request)]
            elif (
                not batched.lost
                and isinstance(batched, _Propagating)
                and batched.leaves(layer, layers)
            ):
                piece, batched.lost = None, True  # unless it succeeds
                failed_before = batched.state.failed
                with self._contained(batched):
                    layer_rows = rows.take(self._layout.required_rows(batched.request))
                    piece, batched.lost = self._chosen(batched, layer, layer_rows), False
                batched.lost |= batched.state.failed and not failed_before  # maybe on another rank
            if not batched.lost and piece is not None and piece.ids.numel():
                pieces.append((batched, piece))
        return pieces

    def _contained(self, batched: _Propagating) -> Contained:
        """A block for one request, after which its rows are the same on all ranks."""
        failures = self._services.failures
        return failures.contained(batched.request, PROPAGATION, whole=False, joint=True)

    def _join(
        self, pieces: Sequence[tuple[_Batched, LayerRows]], rows: LayerRows, update: Any
    ) -> Any:
        """Let only the rows in `pieces` go on; return what the next layer is called with.

        Args:
            rows: of all requests, after the last layer that ran.
            update: how output and residual are added up.
        """
        extents, layout, end = [], {}, 0
        for batched, piece in pieces:
            count = piece.ids.numel()
            extents.append(view.ViewedRequest(batched.row, batched.length, count, batched.index))
            layout[id(batched.request)] = slice(end, end + count)
            end += count
        joined = LayerRows.cat([piece for _, piece in pieces]) if pieces else rows.take(slice(0))
        self._view = self._make_view(extents, joined.ids, joined.positions, joined.slots)
        self._layout.replace(layout)
        self._rows = end
        return compat.put_stream(self._view, joined.hidden, joined.residual, update)

    def _chosen(self, batched: _Propagating, layer: int, piece: LayerRows) -> LayerRows | None:
        """The rows of a request that go deeper; None: none. Notes which tokens are left."""
        progress, scored = batched.state.progress, batched.scored
        if scored is not None and batched.state.failed:
            # Earlier chunks stopped at this layer: without chosen tokens nothing can go deeper.
            return None
        if scored is None:  # the prompt goes on in a later chunk
            progress.stopped = True
            if not batched.plan.restarts:
                # A layer may change its input in place.
                progress.held.append(LayerRows(*(tensor.clone() for tensor in piece)))
            return None
        piece = LayerRows.cat([*progress.held, piece])
        progress.held.clear()
        if scored.chosen is None:
            return piece
        chosen, scored.chosen = scored.chosen, None
        cached = scored.slots.numel() - piece.ids.numel()
        scored.narrow(chosen)
        self._note(batched, layer, chosen.numel())
        self._point(batched, scored.slots)
        if cached:
            # Tokens from the radix cache have no rows; data decide how many of them were chosen.
            (chosen_cached,) = to_host([(chosen < cached).sum()])
            chosen = chosen[int(chosen_cached) :] - cached
        return LayerRows(*self._kernels.take_rows(piece, chosen))

    @staticmethod
    def _note(batched: _Propagating, layer: int, tokens: int) -> None:
        progress = batched.state.progress
        progress.layer = layer if progress.layer is None else progress.layer
        progress.tokens = tokens

    def _point(self, batched: _Batched, slots: torch.Tensor) -> None:
        """Write the slots of the tokens that are left to a scratch row of the table of slots."""
        if batched.row not in self._services.scratch_rows:
            batched.row = next(self._scratch)
        batched.length = slots.numel()
        table = compat.slot_table(self._services.runner)
        table[batched.row, : batched.length] = slots.to(table.dtype)

    def _second_prefills(self, layer: int) -> dict[int, LayerRows]:
        """Start second prefills; return their rows after `layer`, by `id` of the request."""
        layers = self._services.arena.layers
        starting = [
            (batched, batched.scored)
            for batched in self._propagating
            if batched.scored is not None and batched.leaves(layer, layers)
            if batched.plan.restarts and not batched.state.failed
        ]
        starts, extents, layout, end = [], [], {}, 0
        for batched, scored in starting:
            batched.lost = True  # unless it succeeds
            start = None
            with self._contained(batched):
                start = self._start(batched, scored, layer)
            if start is not None and not batched.state.failed:
                starts.append(start)
                extents.append(
                    view.ViewedRequest(batched.row, batched.length, batched.length, batched.index)
                )
                layout[id(batched.request)] = slice(end, end + batched.length)
                end += batched.length
        if not starts:
            return {}
        error, inputs, second_rows = None, None, {}
        try:
            inputs = self._second_inputs(starts, extents)
        except Exception as raised:
            error = raised
        # The model's layers exchange tensors: no rank may begin them alone.
        error = met(self._services.ranks, error)
        if inputs is not None and error is None:
            try:
                second_rows = self._start_again(layer, inputs, layout)
            except Exception as raised:
                if self._services.ranks.size > 1:
                    raise  # the others' layers wait for what this rank will never send
                error = raised
        if error is not None:
            for batched, _ in starting:
                self._services.failures.note(batched.request, PROPAGATION, error, whole=False)
            self._services.failures.agree(batched.request for batched, _ in starting)
            return {}
        for batched, _ in starting:
            batched.lost = id(batched.request) not in second_rows
        return second_rows

    def _second_inputs(
        self,
        starts: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
        extents: Sequence[view.ViewedRequest],
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Ids, positions and the batch of the tokens that requests start again with.

        Args:
            starts: results of `_start`.
            extents: of the requests, in the same order.
        """
        ids, positions, slots = (torch.cat(tensors) for tensors in zip(*starts, strict=True))
        return ids, positions, self._make_view(extents, ids, positions, slots)

    def _start_again(
        self,
        layer: int,
        inputs: tuple[torch.Tensor, torch.Tensor, Any],
        layout: Mapping[int, slice],
    ) -> dict[int, LayerRows]:
        """Compute layers 0 to `layer` on the tokens that requests start again with.

        Args:
            inputs: result of `_second_inputs`.
            layout: rows of each request, by `id`.
        """
        ids, positions, batch = inputs
        hidden = compat.embed(self._services.runner.model, ids)
        compat.start_stream(batch)
        saved_layout = self._layout.replace(layout)
        try:
            with compat.unrecorded():  # they would be taken for experts of this one layer
                for run in self._services.layers[: layer + 1]:
                    hidden = run(positions, hidden, batch)
        finally:
            self._layout.replace(saved_layout)
        rows, _ = view.rows_of(hidden, batch)
        return {request: rows.take(request_rows) for request, request_rows in layout.items()}

    def _make_view(self, extents: Sequence[view.ViewedRequest], *tokens: torch.Tensor) -> Any:
        return view.make(self._services.runner, self._batch, extents, *tokens)

    def _start(
        self, batched: _Propagating, scored: Scored, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """int64 [m] ids, positions and slots of the tokens that a request starts again with."""
        progress = batched.state.progress
        chosen, scored.chosen = scored.chosen, None
        if chosen is None:  # all: rows of earlier chunks did not go beyond this layer
            chosen = torch.arange(batched.state.prompt, device=scored.slots.device)
        tokens = chosen.numel()
        progress.held.clear()
        progress.shift = batched.state.prompt - tokens
        self._note(batched, layer, tokens)
        # The request owns the prompt's last slots; the first ones may be the radix cache's.
        scored.restart(chosen)
        self._point(batched, scored.slots)
        ids = to_device(batched.request.origin_input_ids, torch.int64, chosen.device)[chosen]
        return ids, torch.arange(tokens, device=chosen.device), scored.slots

    def _widen(self, hidden: Any) -> Any:
        """All rows of SGLang's batch again; zeros for tokens that left, and for lost requests."""
        rows, update = view.rows_of(hidden, self._batch if self._view is None else self._view)
        targets, sources = [], []
        for batched in self._batched:
            request_rows, own_rows = self._layout.rows(batched.request), batched.own
            if request_rows is None or batched.lost:
                continue
            if isinstance(batched, _Propagating):  # only its last row is read
                request_rows, own_rows = (
                    slice(span.stop - 1, span.stop) for span in (request_rows, own_rows)
                )
            sources.append(torch.arange(request_rows.start, request_rows.stop))
            targets.append(torch.arange(own_rows.start, own_rows.stop))
        total = self._batched[-1].own.stop
        stream = [rows.hidden, rows.residual]
        wide, residual = (tensor.new_zeros((total, *tensor.shape[1:])) for tensor in stream)
        if targets:
            target, source = to_device(
                torch.stack([torch.cat(targets), torch.cat(sources)]),
                torch.int64,
                rows.hidden.device,
            )
            kernels = self._kernels
            kernels.put_rows([wide, residual], target, kernels.take_rows(stream, source))
        compat.adapt_rows(self._services.runner, self._batch)
        return compat.put_stream(self._batch, wide, residual, update)
