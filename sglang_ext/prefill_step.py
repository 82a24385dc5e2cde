"""Prompts in one extend forward: which rows the policies see, what is kept when a prompt ends."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from kvpolicy.sglang_ext import share
from kvpolicy.sglang_ext.compress import compress, timed
from kvpolicy.sglang_ext.request import State, iterate_rows

if TYPE_CHECKING:
    from kvpolicy.sglang_ext.runtime import Runtime


@dataclass
class _Scored:
    """A request whose prompt ends in this forward."""

    request: Any
    state: State
    end: int  # row after its last query
    rows: int  # its queries in this forward
    slots: torch.Tensor  # [N] int64 slots of its prompt
    run: Any  # of the policy's program


@dataclass
class _Windowed:
    """A request with queries of its observation window in a chunk that is not its last."""

    state: State
    rows: slice


class PrefillStep:
    """What the policies see and decide in one extend forward."""

    def __init__(self, runtime: Runtime, batch: Any) -> None:
        self._runtime = runtime
        self._scored: list[_Scored] = []
        self._windowed: list[_Windowed] = []
        table = batch.req_to_token_pool.req_to_token
        for request, state, rows, prefix in iterate_rows(batch):
            length = prefix + rows.stop - rows.start
            if state.private is None:
                self._plan_window(state, rows, prefix, length)
            elif length == state.prompt and not state.private.ready:
                slots = table[state.private.row, :length].to(torch.int64)
                run = state.served.program.start(state.prompt)
                count = rows.stop - rows.start
                self._scored.append(_Scored(request, state, rows.stop, count, slots, run))

    def _plan_window(self, state: State, rows: slice, prefix: int, length: int) -> None:
        first = max(prefix, state.prompt - state.queries)
        if first < length < state.prompt:
            window = slice(rows.start + first - prefix, rows.stop)
            self._windowed.append(_Windowed(state, window))

    def observe(self, layer: Any, heads: torch.Tensor) -> None:
        """Show one layer to the policies; its keys and values are in the pool already.

        Args:
            heads: [rows, H, D] queries of the forward after RoPE.
        """
        for each in self._windowed:
            window = heads[each.rows].clone()
            each.state.window.setdefault(layer.layer_id, []).append(window)
        for each in self._scored:
            with timed(each.state):
                self._observe(each, layer, heads)

    def _observe(self, scored: _Scored, layer: Any, heads: torch.Tensor) -> None:
        state = scored.state
        wanted = min(state.queries, scored.rows)
        queries = heads[scored.end - wanted : scored.end]
        earlier = state.window.get(layer.layer_id, [])
        queries = torch.cat([*earlier, queries]) if earlier else queries
        if queries.shape[0] != state.queries:
            raise RuntimeError(
                f"request {scored.request.rid}: {queries.shape[0]} of the last {state.queries} "
                f"queries of its prompt were computed"
            )
        queries = scaled(queries, layer)
        keys, values = self._runtime.arena.storage[layer.layer_id]
        k = keys[scored.slots].transpose(0, 1)
        v = values[scored.slots].transpose(0, 1) if state.served.bound.needs_values else None
        scored.run.observe(layer.layer_id, queries.transpose(0, 1), k, v)

    def finish(self) -> None:
        """After the forward: choose what is kept and copy it to private pages."""
        for each in self._scored:
            with timed(each.state):
                kept = torch.stack(list(each.run.finish()))  # [L, G, N]
                each.state.window.clear()
                if each.state.served.upper_layers:
                    share.compress(self._runtime, each.state, each.slots, each.run)
                else:
                    compress(self._runtime, each.state, each.slots, kept)
            self._runtime.finished_prompt(
                each.request, each.state, int(kept.sum()), finite=not each.run.not_finite
            )


def scaled(queries: torch.Tensor, layer: Any) -> torch.Tensor:
    """Queries as a policy sees them: its attention is softmax(q k / sqrt(D)); the model's may
    be scaled otherwise.
    """
    factor = layer.scaling * math.sqrt(layer.qk_head_dim)
    return queries if math.isclose(factor, 1.0, rel_tol=1e-6) else queries * factor
