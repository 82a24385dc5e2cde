"""Requests of a policy in one decode forward: what they read, and what is noted and drops after it.

A backend reads either the device tables, all requests at once, or, where there is no kernel for
them, lists of entries that are written out for each forward.

Nothing is shown to policies while the model computes. Queries are noted, and after the forward a
policy is taken through all its pending steps (pending_steps.py) at once: where entries may leave,
or where so many have gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from kvpolicy.sglang_ext.face.host import to_device
from kvpolicy.sglang_ext.forward.failures import DECODING, FOLD, READING, met
from kvpolicy.sglang_ext.forward.fold import Room
from kvpolicy.sglang_ext.forward.fold_together import FoldTogether, Member, Together, parts_of
from kvpolicy.sglang_ext.forward.follow import check_last_fold, may_leave
from kvpolicy.sglang_ext.memory.lists import Lists
from kvpolicy.sglang_ext.memory.private import Private
from kvpolicy.sglang_ext.request.pending_steps import Noted
from kvpolicy.sglang_ext.request.queries import queries_of
from kvpolicy.sglang_ext.request.request import Decoding, State, state_of

if TYPE_CHECKING:
    from kvpolicy.sglang_ext.forward.services import Services

Attend = Callable[[Lists, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class _Follower:
    """A request whose policy goes on.

    Attributes:
        decoding: what its policy remembers, and the steps that are noted for it.
        length: its tokens, that of this forward included.
        noted: whether its policy will read the queries of this forward.
    """

    request: Any
    state: State
    decoding: Decoding
    length: int
    noted: bool


class DecodeStep:
    """The rows of one forward that decode, one each: of a mixed one the last ones."""

    def __init__(self, services: Services, batch: Any, requests: Sequence[Any]) -> None:
        """
        Args:
            requests: of the batch, those that decode.
        """
        self._services, self._arena = services, services.arena
        self._table = batch.req_to_token_pool.req_to_token
        self._lengths = batch.seq_lens_cpu.tolist()[len(batch.reqs) - len(requests) :]
        self._requests = requests
        self._followers: dict[int, _Follower] = {}  # by row
        self._private: dict[int, Private] = {}  # by row
        for i, request in enumerate(requests):
            state = state_of(request)
            if state is None:
                continue
            if state.decoding is not None:
                with services.failures.contained(request, DECODING):
                    length = self._lengths[i]
                    noted = state.reads_queries(length - state.prompt)
                    self._followers[i] = _Follower(request, state, state.decoding, length, noted)
            if state.private is not None:
                self._private[i] = state.private
        self._noted = [i for i, each in self._followers.items() if each.noted]
        self._most = services.queries.most_steps(len(self._noted))

    @cached_property
    def _lists(self) -> Lists:
        lengths = [self._lengths[i] for i in self._private]
        held = list(self._private.values())
        return Lists(self._arena, held, lengths, self._table, remember=True)

    @property
    def reads(self) -> bool:
        """Whether any row reads compressed entries."""
        return bool(self._private)

    def entries(self, layer: int) -> int:
        """How many entries all rows read at a layer, of all KV heads; the host knows."""
        heads, made = self._arena.kv_heads, 0
        for row, length in enumerate(self._lengths):
            private = self._private.get(row)
            tail = length if private is None else length - private.tail_start
            made += heads * tail + (sum(private.entries(layer)) if private else 0)
        return made

    @property
    def notes(self) -> bool:
        """Whether queries of this forward are to be noted."""
        return bool(self._noted)

    @cached_property
    def plain(self) -> torch.Tensor:
        """[B''] int64 rows that read no compressed entries."""
        # There may be more rows than requests: beams of one request follow the others.
        others = [i for i in range(len(self._lengths)) if i not in self._private]
        return to_device(others, torch.int64, self._table.device)

    @cached_property
    def _index(self) -> torch.Tensor:
        return to_device(list(self._private), torch.int64, self._table.device)

    def overwrite(self, heads: torch.Tensor, out: torch.Tensor, attend: Attend) -> None:
        """Write the attention of all rows that read compressed entries.

        Args:
            heads: [B, H, D] queries.
            out: [B, H, D], written in place.
            attend: from lists of B' requests and queries [B', 1, H, D] to as much attention.
        """
        out[self._index] = attend(self._lists, heads[self._index].unsqueeze(1))[:, 0]

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A block in which the rows that policies concern are read, in one operation.

        If it fails, it has failed for all of them, and none is read so any more in this forward.
        """
        try:
            yield
        except Exception as error:
            for row in {*self._private, *self._noted}:
                self._services.failures.note(self._requests[row], READING, error)
            self._private, self._noted = {}, []
            for cached in ("_lists", "_index", "plain"):
                self.__dict__.pop(cached, None)

    def finish(self) -> None:
        """After the forward: note its step; take policies through theirs, and fold what stays."""
        failures = self._services.failures
        concerned = [each for each in self._requests if state_of(each) is not None]
        if not self._followers:
            if concerned and failures.due():
                failures.agree(concerned)
            return
        self._note()
        room, leaving = Room(self._services), set()
        for row, each in self._followers.items():
            with failures.contained(each.request, FOLD):
                if may_leave(self._services, room, each.request, each.state, each.length):
                    leaving.add(row)
        full = [each for each in self._followers.values() if each.decoding.pending.full(self._most)]
        if leaving or full or failures.due():
            failures.agree(concerned)
        groups: dict[tuple[Hashable, bool], list[Member]] = {}
        for row, each in self._followers.items():
            leaves, pending, memory = row in leaving, each.decoding.pending, each.decoding.memory
            if each.state.failed or not (leaves or pending.full(self._most)):
                continue
            with failures.contained(each.request, DECODING):
                check_last_fold(each.request, each.state, memory)
                if memory.not_finite:  # nothing leaves any more
                    pending.clear()
                    continue
                group = memory.together(len(pending.positions), leaves=leaves)
                member = Member(each.request, each.state, each.length, list(pending.positions))
                groups.setdefault((group, leaves), []).append(member)
        # All policies have been asked before the host waits for the first one's numbers.
        folds = [
            fold
            for (_, leaves), members in groups.items()
            for part in parts_of(members, self._arena)
            for fold in self._follow_together(part, leaves=leaves)
        ]
        for fold in folds:
            fold.finish()
        if folds:
            failures.agree(concerned)

    def _follow_together(self, members: list[Member], *, leaves: bool) -> list[FoldTogether]:
        """Take the policies of a group through their steps; where that fails, one by one."""
        pending = [each.state.pending for each in members]
        queries = partial(queries_of, pending, self._services.queries)
        try:
            fold = Together(self._services, self._table, members, queries).follow(leaves=leaves)
            for each in pending:
                each.clear()
            return [] if fold is None else [fold]
        except Exception as error:
            ended = met(self._services.ranks, error)
            if len(members) == 1:
                self._services.failures.note(members[0].request, DECODING, ended or error)
                self._services.failures.agree([members[0].request])
                return []
        return [fold for each in members for fold in self._follow_together([each], leaves=leaves)]

    def _note(self) -> None:
        noted: dict[int, Noted] = {}
        if self._noted:
            taken = self._services.queries.take(self._noted, len(self._lengths))
            noted = {row: (taken, place) for place, row in enumerate(self._noted)}
        for row, each in self._followers.items():
            if each.state.failed:
                continue
            position = each.length - 1 - each.state.progress.shift
            each.decoding.pending.add(position, noted.get(row))
