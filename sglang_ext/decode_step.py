"""Requests of a policy in one decode forward: what they read, what their policies see and drop.

A backend reads either the device tables, all requests at once, or lists of entries that are written
out for each forward: where there is no kernel for the tables, for requests that store layers in
pairs, and for policies that look at entries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from kvpolicy.sglang_ext.fold import Room
from kvpolicy.sglang_ext.follow import Follower, Read, read_lists, read_slots
from kvpolicy.sglang_ext.host import to_device
from kvpolicy.sglang_ext.lists import Lists
from kvpolicy.sglang_ext.prefill_step import scaled
from kvpolicy.sglang_ext.request import state_of

if TYPE_CHECKING:
    from kvpolicy.sglang_ext.runtime import Runtime

Attend = Callable[[Lists, torch.Tensor], torch.Tensor]


class DecodeStep:
    """The rows of one decode forward."""

    def __init__(self, runtime: Runtime, batch: Any) -> None:
        self._arena = runtime.arena
        self._table = batch.req_to_token_pool.req_to_token
        self._lengths = batch.seq_lens_cpu.tolist()
        states = [state_of(request) for request in batch.reqs]
        self._private = {i: s.private for i, s in enumerate(states) if s is not None and s.private}
        self._lists: dict[tuple[int, ...], Lists] = {}
        self._followers = self._follow(runtime, batch.reqs)

    def _follow(self, runtime: Runtime, requests: Sequence[Any]) -> dict[int, Follower]:
        """Requests whose policies go on, by row."""
        room, found = Room(runtime), {}
        for i, request in enumerate(requests):
            state = state_of(request)
            if state is not None and state.memory is not None:
                length = self._lengths[i]
                read = self._reader(i, request.kv.req_pool_idx, state.served.kernels.gather)
                found[i] = Follower(runtime, room, request, state, length, read)
        return found

    def _reader(self, row: int, pool_row: int, gather: Callable[..., Any]) -> Read:
        """Reads a request's entries; nothing is done for it before it does."""

        def read(layer: int, there: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            if row in self._private:
                lists, index = self._lists_with(row)
                return read_lists(self._arena, lists, index, gather)(layer, there)
            slots = self._table[pool_row, : self._lengths[row]].to(torch.int64)
            return read_slots(self._arena, slots)(layer, there)

        return read

    def _lists_with(self, row: int) -> tuple[Lists, int]:
        """Entry lists with those of a row, and which of theirs it is."""
        for rows, lists in self._lists.items():
            if row in rows:
                return lists, rows.index(row)
        return self._lists_of((row,)), 0

    def _lists_of(self, rows: tuple[int, ...]) -> Lists:
        if rows not in self._lists:
            requests = [self._private[i] for i in rows]
            lengths = [self._lengths[i] for i in rows]
            self._lists[rows] = Lists(self._arena, requests, lengths, self._table)
        return self._lists[rows]

    @property
    def reads(self) -> bool:
        """Whether any row reads compressed entries."""
        return bool(self._private)

    @property
    def needs_python(self) -> bool:
        """Whether something is done between the layers that no kernel does."""
        return bool(self._paired) or any(f.watches for f in self._followers.values())

    @cached_property
    def _paired(self) -> tuple[int, ...]:
        return tuple(i for i, private in self._private.items() if private.shared is not None)

    @cached_property
    def plain(self) -> torch.Tensor:
        """[B''] int64 rows that read no compressed entries."""
        # There may be more rows than requests: beams of one request follow the others.
        others = [i for i in range(len(self._lengths)) if i not in self._private]
        return to_device(others, torch.int64, self._table.device)

    @cached_property
    def _index(self) -> dict[tuple[int, ...], torch.Tensor]:
        rows = {tuple(self._private), self._paired}
        return {each: to_device(each, torch.int64, self._table.device) for each in rows if each}

    def overwrite(self, heads: torch.Tensor, out: torch.Tensor, attend: Attend) -> None:
        """Write the attention of all rows that read compressed entries.

        Args:
            heads: [B, H, D] queries.
            out: [B, H, D], written in place.
            attend: from lists of B' requests and queries [B', 1, H, D] to as much attention.
        """
        self._overwrite(tuple(self._private), heads, out, attend)

    def overwrite_paired(self, heads: torch.Tensor, out: torch.Tensor, attend: Attend) -> None:
        """The same of the rows that the device tables do not describe: layers stored in pairs."""
        if self._paired:
            self._overwrite(self._paired, heads, out, attend)

    def _overwrite(
        self, rows: tuple[int, ...], heads: torch.Tensor, out: torch.Tensor, attend: Attend
    ) -> None:
        index = self._index[rows]
        out[index] = attend(self._lists_of(rows), heads[index].unsqueeze(1))[:, 0]

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
