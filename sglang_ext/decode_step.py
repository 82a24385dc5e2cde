"""Requests of a policy in one decode forward: what they read, what their policies see and drop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from kvpolicy.sglang_ext.backend import attend
from kvpolicy.sglang_ext.fold import Room
from kvpolicy.sglang_ext.follow import Follower, Read, read_lists, read_slots
from kvpolicy.sglang_ext.lists import Lists
from kvpolicy.sglang_ext.prefill_step import scaled
from kvpolicy.sglang_ext.request import state_of

if TYPE_CHECKING:
    from kvpolicy.sglang_ext.runtime import Runtime


class DecodeStep:
    """The rows of one decode forward.

    Attributes:
        compressed, plain: [B'] int64 rows that read compressed entries, and the others.
    """

    def __init__(self, runtime: Runtime, batch: Any) -> None:
        self._arena = runtime.arena
        self._lists: Lists | None = None
        self._table = batch.req_to_token_pool.req_to_token
        states = [state_of(request) for request in batch.reqs]
        lengths = batch.seq_lens_cpu.tolist()
        private = {i: s.private for i, s in enumerate(states) if s is not None and s.private}
        if private:
            # There may be more rows than requests: beams of one request follow the others.
            others = [i for i in range(len(lengths)) if i not in private]
            device = self._table.device
            self.compressed = torch.tensor(list(private), device=device)
            self.plain = torch.tensor(others, dtype=torch.int64, device=device)
            own = [lengths[i] for i in private]
            self._lists = Lists(runtime.arena, list(private.values()), own, self._table)
        self._followers = self._follow(runtime, batch.reqs, lengths, list(private))

    def _follow(
        self,
        runtime: Runtime,
        requests: Sequence[Any],
        lengths: Sequence[int],
        compressed: list[int],
    ) -> dict[int, Follower]:
        """Requests whose policies go on, by row."""
        room, found = Room(runtime), {}
        for i, request in enumerate(requests):
            state = state_of(request)
            if state is not None and state.memory is not None:
                read = self._reader(request, lengths[i], i, compressed)
                found[i] = Follower(runtime, room, request, state, lengths[i], read)
        return found

    def _reader(self, request: Any, length: int, row: int, compressed: list[int]) -> Read:
        if row in compressed:
            return read_lists(self._arena, self._lists, compressed.index(row))
        slots = self._table[request.kv.req_pool_idx, :length].to(torch.int64)
        return read_slots(self._arena, slots)

    @property
    def reads(self) -> bool:
        """Whether any row reads compressed entries."""
        return self._lists is not None

    def attend(
        self, layer: Any, heads: torch.Tensor, read: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        """Attention of the compressed rows: [B', H, D] of the queries [B, H, D]."""
        queries = heads[self.compressed].unsqueeze(1)
        return attend(self._arena, self._lists, layer, queries, read)[:, 0]

    def observe(self, layer: Any, heads: torch.Tensor) -> None:
        """Show a layer to the policies that go on, after its attention.

        Args:
            heads: [B, H, D] queries of the forward after RoPE.
        """
        for row, follower in self._followers.items():
            if follower.watches:
                queries = scaled(heads[row : row + 1], layer)
                follower.observe(layer.layer_id, queries.transpose(0, 1))

    def finish(self) -> None:
        """After the forward: write what stays of the requests of which entries leave."""
        for follower in self._followers.values():
            follower.finish()
