"""Retracted requests: their earlier output is computed again as their policy had it.

After a retraction the prompt is prefilled again and compressed as it was. The output follows in
passes that end where entries left, so that every token sees the entries that it saw before; after
each pass the policy is taken through its tokens, as after decode steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from kvpolicy.dsl.execute.decode import Memory, Read
from kvpolicy.dsl.execute.kernels import Entries, Keys, dense
from kvpolicy.sglang_ext.face import compat
from kvpolicy.sglang_ext.forward.attend import attend
from kvpolicy.sglang_ext.forward.failures import DECODING, FOLD, READING
from kvpolicy.sglang_ext.forward.fold import Fold, Room
from kvpolicy.sglang_ext.forward.follow import Following, ListReader, Reader, may_leave, no_queries
from kvpolicy.sglang_ext.forward.frame import Frame
from kvpolicy.sglang_ext.request.notes import LONGEST
from kvpolicy.sglang_ext.request.request import State, iterate_rows

if TYPE_CHECKING:
    from kvpolicy.sglang_ext.forward.services import Services


@dataclass
class _Resumed:
    """A request whose rows in an extend forward are output.

    Attributes:
        first, end: tokens before the forward and after it.
        reader: of its entries, up to `end`.
        queries: per layer, [H, T, D] of its rows.
    """

    request: Any
    state: State
    first: int
    end: int
    reader: Reader
    queries: dict[int, torch.Tensor] = field(default_factory=dict)

    def following(self, memory: Memory, first: int, end: int, nothing: torch.Tensor) -> Following:
        """The steps of its tokens from `first` to before `end`.

        Args:
            memory: what its policy remembers.
            nothing: [H, 1, D] zeros, for a policy that reads no queries.
        """
        shift = self.state.progress.shift

        def queries(layer: int) -> torch.Tensor:
            if layer not in self.queries:
                return nothing.expand(-1, end - first, -1)
            return self.queries[layer][:, first - self.first : end - self.first]

        positions = range(first - shift, end - shift)
        read = None if end == self.end else self._until(end)
        return Following(
            self.request, self.state, memory, end, positions, queries, self.reader, read
        )

    def _until(self, length: int) -> Read:
        """Reads its entries up to its first `length` tokens."""
        later = self.end - length

        def read(layer: int, there: torch.Tensor | None) -> tuple[Keys, Keys]:
            if there is not None:
                there = torch.cat([there, there.new_ones(there.shape[0], later)], dim=1)
            k, v = self.reader.given(layer, there)
            return _without_last(k, later), _without_last(v, later)

        return read


def _without_last(x: Keys, later: int) -> Keys:
    """Keys or values [G, M, D] without those of the last tokens."""
    if isinstance(x, Entries):
        return replace(x, ids=x.ids[:, : x.ids.shape[1] - later])
    return dense(x)[:, : x.shape[1] - later]


class ResumeStep:
    """The resumed requests of one extend forward."""

    def __init__(self, services: Services, batch: Any, frame: Frame) -> None:
        self._services, self._frame = services, frame
        self._resumed: list[_Resumed] = []
        arena, table = services.arena, batch.req_to_token_pool.req_to_token
        for request, state, rows, prefix in iterate_rows(batch):
            if prefix < state.prompt:
                continue
            length = prefix + rows.stop - rows.start
            with services.failures.contained(request, READING):
                reader = Reader.of(arena, table, request, state, length)
                self._resumed.append(_Resumed(request, state, prefix, length, reader))

    def overwrite(
        self, layer: Any, heads: torch.Tensor, out: torch.Tensor, read: Callable[..., torch.Tensor]
    ) -> None:
        """Replace the attention of resumed rows, which the stock backend read from freed slots.

        Args:
            heads, out: [rows, H, D] queries and attention of the forward; out is written in place.
        """
        for each in self._resumed:
            rows, reader = self._frame.rows(each.request), each.reader
            if rows is None or not isinstance(reader, ListReader) or each.state.failed:
                continue
            with self._services.failures.contained(each.request, READING):
                queries = heads[rows].unsqueeze(0)
                out[rows] = attend(self._services.arena, layer, read, reader.lists, queries)[0]

    def observe(self, layer: Any, heads: torch.Tensor) -> None:
        """Note the queries of a layer for the policies that go on.

        Args:
            heads: [rows, H, D] queries of the forward after RoPE.
        """
        for each in self._resumed:
            rows = self._frame.rows(each.request)
            decoding = each.state.decoding
            if rows is not None and decoding is not None and decoding.notes.wanted != 0:
                queries = compat.scaled(heads[rows], layer).transpose(0, 1)
                each.queries[layer.layer_id] = queries.clone()

    def finish(self) -> None:
        """After the forward: take the policies through its tokens, and fold what stays.

        Entries leave at a pass's last token only; before it come as many steps at once as are
        noted at most while decoding.
        """
        room = Room(self._services)
        for each in self._resumed:
            decoding = each.state.decoding
            if decoding is None:
                continue
            fold = None
            with self._services.failures.contained(each.request, DECODING):
                fold = self._follow(each, decoding.memory, room)
            if fold is not None:
                with self._services.failures.contained(each.request, FOLD):
                    fold.finish()

    def _follow(self, resumed: _Resumed, memory: Memory, room: Room) -> Fold | None:
        """Take the policy through all tokens of the pass; what is to be written, if any leave."""
        fold, services = None, self._services
        nothing = no_queries(resumed.state, services.arena)
        for first in range(resumed.first, resumed.end, LONGEST):
            end = min(first + LONGEST, resumed.end)
            leaves = end == resumed.end and may_leave(
                services, room, resumed.request, resumed.state, end
            )
            following = resumed.following(memory, first, end, nothing)
            fold = following.go(services, leaves=leaves)
        return fold
