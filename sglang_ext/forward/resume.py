"""Retracted requests: their earlier output is computed again under their policy.

After a retraction the prompt is prefilled again and compressed as it was. The output follows in
passes that end where entries left, so that every token sees the entries that it saw before; after
each pass the policy is taken through its tokens, as after decode steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from kvpolicy.sglang_ext.face import compat
from kvpolicy.sglang_ext.forward.attend import attend
from kvpolicy.sglang_ext.forward.failures import DECODING, READING
from kvpolicy.sglang_ext.forward.group_fold import Group, GroupFold, Member
from kvpolicy.sglang_ext.forward.leaving import Leaving, Room, check_last_fold, may_leave
from kvpolicy.sglang_ext.forward.reader import EntryReader, ListReader
from kvpolicy.sglang_ext.forward.row_layout import RowLayout
from kvpolicy.sglang_ext.request.pending_steps import LONGEST
from kvpolicy.sglang_ext.request.request import RequestState, iterate_rows

if TYPE_CHECKING:
    from kvpolicy.sglang_ext.forward.services import Services


@dataclass
class _Resumed:
    """A request whose rows in an extend forward are output.

    Attributes:
        first, end: number of its tokens before the forward and after it.
        reader: of its entries, up to `end`.
        queries: layer -> [H, T, D] queries of its rows.
    """

    request: Any
    state: RequestState
    first: int
    end: int
    reader: EntryReader
    queries: dict[int, torch.Tensor] = field(default_factory=dict)

    def member(self, first: int, end: int) -> Member:
        """The request with the steps of its tokens `first` to `end - 1`."""
        shift = self.state.progress.shift
        return Member(self.request, self.state, end, range(first - shift, end - shift))

    def asked(self, first: int, end: int) -> torch.Tensor:
        """[L * H, T, D] queries of these tokens."""
        queries = [self.queries[layer] for layer in sorted(self.queries)]
        return torch.cat(queries)[:, first - self.first : end - self.first]


class ResumeStep:
    """The resumed requests of one extend forward.

    Attributes:
        leaving, folds: as of `DecodeStep`.
    """

    def __init__(self, services: Services, batch: Any, layout: RowLayout) -> None:
        self._services, self._layout = services, layout
        self._resumed: list[_Resumed] = []
        self._concerned: list[Any] = []
        self.leaving: list[Leaving] = []
        self.folds: list[GroupFold] = []
        arena, self._table = services.arena, batch.req_to_token_pool.req_to_token
        for request, state, rows, prefix in iterate_rows(batch):
            if prefix < state.prompt:
                continue
            self._concerned.append(request)
            length = prefix + rows.stop - rows.start
            goes_on = state.goes_on or state.goes_on_elsewhere
            if services.in_stages and goes_on and state.leaves_at(length - state.prompt):
                self.leaving.append(Leaving(request, state, length))
            with services.failures.contained(request, READING):
                reader = EntryReader.of(arena, self._table, request, state, length)
                self._resumed.append(_Resumed(request, state, prefix, length, reader))

    def overwrite(
        self, layer: Any, heads: torch.Tensor, out: torch.Tensor, read: Callable[..., torch.Tensor]
    ) -> None:
        """Replace the attention of resumed rows, which the stock backend read from freed slots.

        Args:
            heads, out: [rows, H, D] queries and attention of the forward; out is written in place.
        """
        for resumed in self._resumed:
            rows, reader = self._layout.rows(resumed.request), resumed.reader
            if rows is None or not isinstance(reader, ListReader) or resumed.state.broken:
                continue
            with self._services.failures.contained(resumed.request, READING):
                queries = heads[rows].unsqueeze(0)
                out[rows] = attend(self._services.arena, layer, read, reader.lists, queries)[0]

    def observe(self, layer: Any, heads: torch.Tensor) -> None:
        """Note the queries of a layer for the policies that go on.

        Args:
            heads: [rows, H, D] queries of the forward after RoPE.
        """
        for resumed in self._resumed:
            rows = self._layout.rows(resumed.request)
            decoding = resumed.state.decoding
            if rows is not None and decoding is not None and decoding.pending.wanted != 0:
                queries = compat.scaled(heads[rows], layer).transpose(0, 1)
                resumed.queries[layer.layer_id] = queries.clone()

    def finish(self) -> None:
        """After the forward: take the policies through its tokens, and fold what stays.

        Entries leave at a pass's last token only; the steps are taken `LONGEST` at a time, as many
        as may gather while decoding.
        """
        failures, room = self._services.failures, Room(self._services)
        if self._concerned:
            failures.agree(self._concerned)
        for resumed in self._resumed:
            if resumed.state.decoding is None or resumed.state.broken:
                continue
            fold = None
            with failures.contained(resumed.request, DECODING, joint=True):
                fold = self._advance(resumed, room)
            if fold is not None and self._services.in_stages:
                self.folds.append(fold)
            elif fold is not None and not resumed.state.broken:
                fold.finish()
        if self._concerned:
            failures.agree(self._concerned)

    def _advance(self, resumed: _Resumed, room: Room) -> GroupFold | None:
        """Take the policy through all tokens of the pass; return the fold, if entries may leave."""
        fold, services = None, self._services
        for first in range(resumed.first, resumed.end, LONGEST):
            end = min(first + LONGEST, resumed.end)
            leaves = end == resumed.end and may_leave(
                services, room, resumed.request, resumed.state, end
            )
            check_last_fold(services, resumed.request, resumed.state)
            queries = partial(resumed.asked, first, end)
            members = [resumed.member(first, end)]
            fold = Group(services, self._table, members, queries).advance(leaves=leaves)
        return fold
