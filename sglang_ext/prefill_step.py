"""Prompts in one extend forward: which rows the policies see, what is kept when a prompt ends."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from kvpolicy.sglang_ext import share
from kvpolicy.sglang_ext.compress import compress, timed
from kvpolicy.sglang_ext.frame import Frame
from kvpolicy.sglang_ext.request import State, iterate_rows

if TYPE_CHECKING:
    from kvpolicy.sglang_ext.runtime import Runtime


@dataclass
class Scored:
    """A request whose prompt ends in this forward.

    Attributes:
        slots: [n] int64 slots of the tokens that are there: at first all N of the prompt.
        tokens: [n] int64 their positions in the prompt; None: all.
        prompt_slots: [N] int64 slots of all tokens that the run decides about.
        run: of the policy's program.
        queries: last queries that it observes at a layer, where there are so many.
        chosen: [m] int64 indices into the n tokens, which alone go deeper than the layer just
            observed; None if all do.
    """

    request: Any
    state: State
    slots: torch.Tensor
    prompt_slots: torch.Tensor
    run: Any
    queries: int
    tokens: torch.Tensor | None = None
    chosen: torch.Tensor | None = None

    def narrow(self, chosen: torch.Tensor) -> None:
        """Only the chosen tokens [m] are there from now on."""
        self.slots = self.slots[chosen]
        self.tokens = chosen if self.tokens is None else self.tokens[chosen]

    def restart(self, tokens: int) -> None:
        """The prefill begins again on so many tokens, whose entries go to the last slots."""
        self.slots = self.prompt_slots = self.slots[self.slots.numel() - tokens :]
        self.run = self.run.again(tokens)
        self.queries = self.run.queries


@dataclass
class _Windowed:
    """A request with queries of its observation window in a chunk that is not its last."""

    request: Any
    state: State
    count: int  # of its last rows


@dataclass
class _Accumulated:
    """A request with a chunk that is not its last, whose policy adds up what all queries say."""

    request: Any
    state: State
    slots: torch.Tensor  # [n] int64 of its tokens up to the end of the chunk


class PrefillStep:
    """What the policies see and decide in one extend forward."""

    def __init__(self, runtime: Runtime, batch: Any, frame: Frame) -> None:
        self._runtime, self._frame = runtime, frame
        self.scored: list[Scored] = []
        self._windowed: list[_Windowed] = []
        self._accumulated: list[_Accumulated] = []
        table = batch.req_to_token_pool.req_to_token
        for request, state, rows, prefix in iterate_rows(batch):
            length = prefix + rows.stop - rows.start
            slots = table[request.kv.req_pool_idx, :length].to(torch.int64)
            first = max(prefix, state.prompt - state.queries)
            if length < state.prompt and state.served.program.accumulates:
                if prefix == 0:
                    state.run = state.served.program.start(state.prompt)
                self._accumulated.append(_Accumulated(request, state, slots))
            elif first < length < state.prompt:
                self._windowed.append(_Windowed(request, state, length - first))
            elif length == state.prompt:
                run, queries = state.run, state.queries
                if run is None:
                    run = state.served.program.start(state.prompt)
                else:
                    queries = max(state.prompt - prefix, state.served.tail(state.prompt))
                self.scored.append(Scored(request, state, slots, slots, run, queries))

    def observe(self, layer: Any, heads: torch.Tensor) -> None:
        """Show one layer to the policies; its keys and values are in the pool already.

        Args:
            heads: [rows, H, D] queries of the forward after RoPE.
        """
        for each in self._windowed:
            rows = self._frame.rows(each.request)
            if rows is not None:
                window = heads[rows.stop - each.count : rows.stop].clone()
                each.state.window.setdefault(layer.layer_id, []).append(window)
        for each in self._accumulated:
            rows = self._frame.rows(each.request)
            if rows is not None:
                with timed(each.state):
                    self._accumulate(each, layer, heads[rows])
        for each in self.scored:
            rows = self._frame.rows(each.request)
            if rows is not None:
                with timed(each.state):
                    self._observe(each, layer, heads[rows])

    def _accumulate(self, chunk: _Accumulated, layer: Any, heads: torch.Tensor) -> None:
        state = chunk.state
        k, v = self._runtime.arena.storage[layer.layer_id][:, chunk.slots].transpose(1, 2)
        queries = scaled(heads, layer).transpose(0, 1)
        state.run.accumulate(layer.layer_id, queries, k, v)
        tail = state.served.tail(state.prompt)
        earlier = state.window.get(layer.layer_id, [])
        latest = torch.cat([*earlier, heads])
        state.window[layer.layer_id] = [latest[max(latest.shape[0] - tail, 0) :].clone()]

    def _observe(self, scored: Scored, layer: Any, heads: torch.Tensor) -> None:
        state, there = scored.state, scored.slots.numel()
        wanted = min(scored.queries, there)
        queries = heads[max(heads.shape[0] - wanted, 0) :]
        earlier = state.window.get(layer.layer_id, [])
        if earlier and queries.shape[0] < wanted:
            queries = torch.cat([*earlier, queries])[-wanted:]
        if queries.shape[0] != wanted:
            raise RuntimeError(
                f"request {scored.request.rid}: {queries.shape[0]} of the last {wanted} "
                f"queries of its prompt were computed"
            )
        queries = scaled(queries, layer)
        keys, values = self._runtime.arena.storage[layer.layer_id]
        k = keys[scored.slots].transpose(0, 1)
        v = values[scored.slots].transpose(0, 1) if state.served.bound.needs_values else None
        scored.chosen = scored.run.observe(
            layer.layer_id, queries.transpose(0, 1), k, v, scored.tokens
        )

    def finish(self) -> None:
        """After the forward: choose what is kept and copy it to private pages."""
        for each in self.scored:
            state, slots = each.state, each.prompt_slots
            with timed(state):
                kept = torch.stack(list(each.run.finish()))  # [L, G, N]
                state.window.clear()
                state.run = None
                if state.served.upper_layers:
                    share.compress(self._runtime, state, slots, each.run)
                else:
                    row = each.request.kv.req_pool_idx
                    compress(self._runtime, state, row, slots, kept, each.run)
                state.remember(each.run)
            if state.progress.barred and state.progress.layer is None:
                # All layers have all entries: others may use them.
                each.request.skip_radix_cache_insert = state.progress.barred = False
            self._runtime.finished_prompt(
                each.request, state, int(kept.sum()), finite=not each.run.not_finite
            )


def scaled(queries: torch.Tensor, layer: Any) -> torch.Tensor:
    """Queries as a policy sees them: its attention is softmax(q k / sqrt(D)); the model's may
    be scaled otherwise.
    """
    factor = layer.scaling * math.sqrt(layer.qk_head_dim)
    return queries if math.isclose(factor, 1.0, rel_tol=1e-6) else queries * factor
