"""Retracted requests: their earlier output is computed again as their policy had it.

After a retraction the prompt is prefilled again and compressed as it was. The output follows in
passes that end where entries left, so that every token sees the entries that it saw before; after
each pass the policy goes through its tokens one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from kvpolicy.sglang_ext.backend import attend
from kvpolicy.sglang_ext.fold import Room
from kvpolicy.sglang_ext.follow import Follower, Read, read_lists, read_slots
from kvpolicy.sglang_ext.frame import Frame
from kvpolicy.sglang_ext.lists import Lists
from kvpolicy.sglang_ext.prefill_step import scaled
from kvpolicy.sglang_ext.request import State, iterate_rows

if TYPE_CHECKING:
    from kvpolicy.sglang_ext.runtime import Runtime


@dataclass
class _Resumed:
    """A request whose rows in an extend forward are output.

    Attributes:
        first, end: tokens before the forward and after it.
        lists: where its entries are, if some are in private pages.
        read: of its entries, up to `end`.
        queries: per layer, [H, T, D] of its rows.
    """

    request: Any
    state: State
    first: int
    end: int
    lists: Lists | None
    read: Read
    queries: dict[int, torch.Tensor] = field(default_factory=dict)

    def until(self, length: int) -> Read:
        """Reads its entries up to its first `length` tokens."""

        def read(layer: int, there: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            later = self.end - length
            if there is not None and later:
                there = torch.cat([there, there.new_ones(there.shape[0], later)], dim=1)
            k, v = self.read(layer, there)
            return k[:, : k.shape[1] - later], v[:, : v.shape[1] - later]

        return read


class ResumeStep:
    """The resumed requests of one extend forward."""

    def __init__(self, runtime: Runtime, batch: Any, frame: Frame) -> None:
        self._runtime, self._frame = runtime, frame
        self._resumed: list[_Resumed] = []
        arena, table = runtime.arena, batch.req_to_token_pool.req_to_token
        for request, state, rows, prefix in iterate_rows(batch):
            if prefix < state.prompt:
                continue
            length, lists = prefix + rows.stop - rows.start, None
            if state.private is not None:
                lists = Lists(arena, [state.private], [length], table)
                read = read_lists(arena, lists, 0, state.served.kernels.gather)
            else:
                slots = table[request.kv.req_pool_idx, :length].to(torch.int64)
                read = read_slots(arena, slots)
            self._resumed.append(_Resumed(request, state, prefix, length, lists, read))

    def overwrite(
        self, layer: Any, heads: torch.Tensor, out: torch.Tensor, read: Callable[..., torch.Tensor]
    ) -> None:
        """Replace the attention of resumed rows, which the stock backend read from freed slots.

        Args:
            heads, out: [rows, H, D] queries and attention of the forward; out is written in place.
        """
        for each in self._resumed:
            rows = self._frame.rows(each.request)
            if rows is not None and each.lists is not None:
                queries = heads[rows].unsqueeze(0)
                out[rows] = attend(self._runtime.arena, layer, read, each.lists, queries)[0]

    def observe(self, layer: Any, heads: torch.Tensor) -> None:
        """Note the queries of a layer for the policies that go on.

        Args:
            heads: [rows, H, D] queries of the forward after RoPE.
        """
        for each in self._resumed:
            rows = self._frame.rows(each.request)
            if rows is not None and each.state.memory is not None:
                queries = scaled(heads[rows], layer).transpose(0, 1)
                each.queries[layer.layer_id] = queries.clone()

    def finish(self) -> None:
        """After the forward: take the policies through its tokens."""
        room = Room(self._runtime)
        for each in self._resumed:
            if each.state.memory is None:
                continue
            for length in range(each.first + 1, each.end + 1):
                self._follow(each, room, length)

    def _follow(self, resumed: _Resumed, room: Room, length: int) -> None:
        read = resumed.until(length)
        request, state = resumed.request, resumed.state
        follower = Follower(self._runtime, room, request, state, length, read)
        if follower.watches:
            row = length - 1 - resumed.first
            for layer, queries in resumed.queries.items():
                follower.observe(layer, queries[:, row : row + 1])
        follower.finish()
