"""One forward: which rows are scored, compacted, or read from compressed copies."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from kvpolicy.kernels.compact import compact
from kvpolicy.sglang_ext.backend import attend
from kvpolicy.sglang_ext.lists import Lists
from kvpolicy.sglang_ext.request import State, state_of

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


@dataclass
class _Resumed:
    """A retracted request whose earlier output is computed again on its compressed copy."""

    rows: slice
    lists: Lists


class Step:
    """What the plugin does in one forward of a batch."""

    def __init__(self, runtime: Runtime, batch: Any) -> None:
        self._runtime = runtime
        self.lists: Lists | None = None
        self._scored: list[_Scored] = []
        self._windowed: list[_Windowed] = []
        self._resumed: list[_Resumed] = []
        self._table = batch.req_to_token_pool.req_to_token
        if batch.forward_mode.is_extend():
            self._plan_extend(batch)
        elif batch.forward_mode.is_decode():
            self._plan_decode(batch)

    def _plan_decode(self, batch: Any) -> None:
        states = [state_of(request) for request in batch.reqs]
        private = {i: s.private for i, s in enumerate(states) if s is not None and s.private}
        if not private:
            return
        device = self._table.device
        lengths = batch.seq_lens_cpu.tolist()
        # There may be more rows than requests: beams of one request follow the others.
        others = [i for i in range(len(lengths)) if i not in private]
        self.compressed = torch.tensor(list(private), device=device)
        self.plain = torch.tensor(others, dtype=torch.int64, device=device)
        self.lists = Lists(
            self._runtime.arena, list(private.values()), [lengths[i] for i in private], self._table
        )

    def _plan_extend(self, batch: Any) -> None:
        end = 0
        rows = zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True)
        for request, prefix, count in rows:
            start, end = end, end + count
            state = state_of(request)
            if state is None or not state.wanted:
                continue
            length = prefix + count
            if state.private is None:
                self._plan_window(state, start, prefix, length)
            elif length == state.prompt and not state.private.ready:
                slots = self._table[state.private.row, :length].to(torch.int64)
                run = state.served.program.start(state.prompt)
                self._scored.append(_Scored(request, state, end, count, slots, run))
            elif prefix >= state.prompt:
                lists = Lists(self._runtime.arena, [state.private], [length], self._table)
                self._resumed.append(_Resumed(slice(start, end), lists))

    def _plan_window(self, state: State, start: int, prefix: int, length: int) -> None:
        first = max(prefix, state.prompt - state.queries)
        if first < length < state.prompt:
            rows = slice(start + first - prefix, start + length - prefix)
            self._windowed.append(_Windowed(state, rows))

    def observe(self, layer: Any, heads: torch.Tensor) -> None:
        """Show one layer to the policies; its keys and values are in the pool already.

        Args:
            heads: [rows, H, D] queries of the forward after RoPE.
        """
        for each in self._windowed:
            window = heads[each.rows].clone()
            each.state.window.setdefault(layer.layer_id, []).append(window)
        for each in self._scored:
            with _timed(each.state):
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
        # A policy's attention is softmax(q k / sqrt(D)); the model may scale otherwise.
        factor = layer.scaling * math.sqrt(layer.qk_head_dim)
        if not math.isclose(factor, 1.0, rel_tol=1e-6):
            queries = queries * factor
        keys, values = self._runtime.arena.storage[layer.layer_id]
        k = keys[scored.slots].transpose(0, 1)
        v = values[scored.slots].transpose(0, 1) if state.served.bound.needs_values else None
        scored.run.observe(layer.layer_id, queries.transpose(0, 1), k, v)

    def overwrite_resumed(
        self, layer: Any, heads: torch.Tensor, out: torch.Tensor, read: Callable[..., torch.Tensor]
    ) -> None:
        """Replace the attention of resumed rows, which the stock backend read from freed slots.

        Args:
            heads, out: [rows, H, D] queries and attention of the forward; out is written in place.
        """
        for each in self._resumed:
            queries = heads[each.rows].unsqueeze(0)
            out[each.rows] = attend(self._runtime.arena, each.lists, layer, queries, read)[0]

    def finish(self) -> None:
        """After the forward: choose what is kept and copy it to private pages."""
        for each in self._scored:
            with _timed(each.state):
                kept = torch.stack(list(each.run.finish()))  # [L, G, N]
                each.state.window.clear()
                self._compress(each, kept)
            self._runtime.finished_prompt(
                each.request, each.state, int(kept.sum()), finite=not each.run.not_finite
            )

    def _compress(self, scored: _Scored, kept: torch.Tensor) -> None:
        state, store, arena = scored.state, self._runtime.store, self._runtime.arena
        private = state.private
        counts = kept.sum(dim=2)
        if not store.saves(private, counts):
            store.release(private)
            state.private = None
            return
        store.fill(private, counts)
        pages = arena.pages(private.slots)
        starts = private.first_page[:, 0].tolist()
        for layer, start in enumerate(starts):
            compact(
                arena.entries,
                scored.slots,
                kept[layer],
                pages[start:],
                key_base=arena.key_base(layer),
                value_offset=arena.value_offset,
            )


class _timed:
    """Adds the time of a block to a request's compression seconds."""

    def __init__(self, state: State) -> None:
        self._state = state

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._state.seconds += time.perf_counter() - self._started


def iterate_finishing(batch: Any) -> Iterator[tuple[Any, State]]:
    """Requests of an extend batch whose prompt ends in it, with their state."""
    for request in batch.reqs:
        state = state_of(request)
        if state is not None and request.extend_end == state.prompt:
            yield request, state
