"""Requests with policies in one decode forward: what they read, what is noted, what leaves.

A backend reads either the device tables, all requests at once, or, if it has no kernel for them,
lists of entries that are written out for each forward.

Nothing is shown to policies while the model computes. Queries are noted, and after the forward a
policy is taken through all its pending steps (pending_steps.py) at once: when entries may leave, or
when as many steps are pending as may gather.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from kvpolicy.sglang_ext.face.host import to_device
from kvpolicy.sglang_ext.forward.failures import DECODING, FOLD, READING, met
from kvpolicy.sglang_ext.forward.group_fold import Group, GroupFold, Member, portions_of
from kvpolicy.sglang_ext.forward.leaving import Leaving, Room, check_last_fold, may_leave
from kvpolicy.sglang_ext.memory.lists import Lists
from kvpolicy.sglang_ext.memory.private import Private
from kvpolicy.sglang_ext.request.decode_rows import DecodeRows
from kvpolicy.sglang_ext.request.queries import queries_of

if TYPE_CHECKING:
    from kvpolicy.sglang_ext.forward.services import Services

Attend = Callable[[Lists, torch.Tensor], torch.Tensor]


class DecodeStep:
    """The decoding rows of one forward, in a mixed one the last rows.

    Attributes:
        leaving: with several stages, the requests that may lose entries after this forward, failed
            ones included.
        folds: their folds, to be written when all stages know what stays.
    """

    def __init__(self, services: Services, batch: Any, requests: Sequence[Any]) -> None:
        """
        Args:
            requests: those of the batch that decode, in order of their rows.
        """
        self._services, self._arena = services, services.arena
        self._table = batch.req_to_token_pool.req_to_token
        # There may be more rows than requests: those of further beams come last.
        self._all_lengths = batch.seq_lens_cpu.numpy()[len(batch.reqs) - len(requests) :].copy()
        self._lengths = self._all_lengths[: len(requests)]
        self._rows = rows = self._known(requests)
        self._private = rows.private
        self._noted = rows.noted(self._lengths)
        self._most = services.queries.most_steps(len(self._noted))
        self.leaving: list[Leaving] = []
        self.folds: list[GroupFold] = []

    def _known(self, requests: Sequence[Any]) -> DecodeRows:
        """What is known of the requests, from the last forward if they are the same."""
        services, known = self._services, self._services.rows
        if known is None or not known.of(requests):
            services.forget_rows()
            known = DecodeRows(requests, services.queries, self._table.device)
            for row, state in enumerate(known.states):
                if state is not None:
                    self._renew(known, row, int(self._lengths[row]))
            services.rows = known
        return known

    def _renew(self, known: DecodeRows, row: int, length: int) -> None:
        with self._services.failures.contained(known.requests[row], DECODING):
            known.renew(row, length)
        known.hold(row)

    @cached_property
    def _lists(self) -> Lists:
        lengths = self._lengths[list(self._private)].tolist()
        held = list(self._private.values())
        return Lists(self._arena, held, lengths, self._table, remember=True)

    @property
    def reads(self) -> bool:
        """Whether any row reads compressed entries."""
        return bool(self._private)

    @property
    def private_of_rows(self) -> list[Private | None]:
        """[B] private pages of each row; None for one that reads no compressed entries."""
        return [self._private.get(row) for row in range(len(self._all_lengths))]

    @property
    def tail_starts(self) -> list[int]:
        """[B] position from which each row reads ordinary slots."""
        return [0 if each is None else each.tail_start for each in self.private_of_rows]

    @property
    def tail(self) -> int:
        """Number of tokens that all rows together read in ordinary slots."""
        return int(self._all_lengths.sum()) - sum(self.tail_starts)

    @property
    def notes(self) -> bool:
        """Whether queries of this forward are to be noted."""
        return len(self._noted) > 0

    @cached_property
    def plain(self) -> torch.Tensor:
        """int64 [B''] rows that read no compressed entries."""
        others = [i for i in range(len(self._all_lengths)) if i not in self._private]
        return to_device(others, torch.int64, self._table.device)

    @cached_property
    def _index(self) -> torch.Tensor:
        return to_device(list(self._private), torch.int64, self._table.device)

    def overwrite(self, heads: torch.Tensor, out: torch.Tensor, attend: Attend) -> None:
        """Write the attention of all rows that read compressed entries.

        Args:
            heads: [B, H, D] queries.
            out: [B, H, D], written in place.
            attend: from the lists of B' requests and their queries [B', 1, H, D] to their
                attention, of the same shape.
        """
        out[self._index] = attend(self._lists, heads[self._index].unsqueeze(1))[:, 0]

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A block that reads all rows with compressed entries in one operation.

        An exception is caught and fails all of them, see `fail_reading`.
        """
        try:
            yield
        except Exception as error:
            self.fail_reading(error)

    def fail_reading(self, error: Exception) -> None:
        """Fail all rows with compressed entries or noted queries; now all rows are plain ones."""
        for row in {*self._private, *self._noted.tolist()}:
            self._services.failures.note(self._rows.requests[row], READING, error)
        self._private, self._noted = {}, self._noted[:0]
        for cached in ("_lists", "_index", "plain"):
            self.__dict__.pop(cached, None)

    def finish(self) -> None:
        """After the forward: note its queries, take policies through steps, and fold what stays."""
        failures, rows, lengths = self._services.failures, self._rows, self._lengths
        if len(self._noted):
            rows.note(self._noted, lengths, len(self._all_lengths))
        may = rows.leaving(lengths).tolist()
        must = rows.must_advance(lengths, self._most).tolist()
        leaving = self._leaving(may)
        ends = sorted({*leaving, *must})
        going = self._going_on(ends, leaving)
        if failures.due(anyway=bool(may or must)):  # the same on all ranks, even if one fails
            failures.agree(self._concerned)
        if self._services.stages.size > 1:
            self.leaving = self._known_to_leave(leaving)
        groups: dict[tuple[Hashable, bool], list[Member]] = {}
        for group, member in going:
            if not member.state.broken:
                groups.setdefault(group, []).append(member)
        # Work of all groups has been launched before the host waits for numbers.
        folds = [
            fold
            for (_, leaves), members in groups.items()
            for portion in portions_of(members, self._arena)
            for fold in self._advance(portion, leaves=leaves)
        ]
        if self._services.stages.size > 1:
            self.folds, folds = folds, []
        for fold in folds:
            fold.finish()
        if folds:
            failures.agree(self._concerned)
        for row in ends:
            self._renew(rows, row, int(lengths[row]) + 1)

    @property
    def _concerned(self) -> list[Any]:
        """Requests to which policies apply."""
        rows = zip(self._rows.requests, self._rows.states, strict=True)
        return [request for request, state in rows if state is not None]

    def _going_on(
        self, rows: Sequence[int], leaving: set[int]
    ) -> list[tuple[tuple[Hashable, bool], Member]]:
        """Requests whose policies can be taken through their pending steps, each with its group.

        Args:
            rows: of the requests.
            leaving: the rows that lose entries.

        Returns:
            (group, member) pairs; requests of one group are taken through their steps together.
        """
        if rows:
            self._rows.hand_over()
        found: list[tuple[tuple[Hashable, bool], Member]] = []
        for row in rows:
            request, state, leaves = (
                self._rows.requests[row],
                self._rows.states[row],
                row in leaving,
            )
            if state is None or state.decoding is None or state.broken:
                continue
            memory, length = state.memory, int(self._lengths[row])
            with self._services.failures.contained(request, DECODING):
                check_last_fold(self._services, request, state)
                if memory.not_finite:  # nothing leaves any more
                    state.pending.clear()
                    continue
                member = Member(request, state, length, state.pending_positions(length))
                group = memory.joint_key(len(member.positions), leaves=leaves)
                found.append(((group, leaves), member))
        return found

    def _known_to_leave(self, rows: set[int]) -> list[Leaving]:
        """The requests that may lose entries on any stage, in order of their rows.

        Args:
            rows: those that lose entries on this stage.
        """
        found = []
        for row, state in enumerate(self._rows.states):
            length = int(self._lengths[row])
            leaves = row in rows and state is not None and state.goes_on
            if state is not None and state.goes_on_elsewhere:
                leaves = state.leaves_at(length - state.prompt)
            if leaves and state is not None:
                found.append(Leaving(self._rows.requests[row], state, length))
        return found

    def _leaving(self, may: Sequence[int]) -> set[int]:
        """The rows that lose entries now, of those that may."""
        room, rows, leaving = Room(self._services), self._rows, set()
        for row in may:
            request, state, length = rows.requests[row], rows.states[row], int(self._lengths[row])
            if state is None or state.decoding is None:
                continue
            with self._services.failures.contained(request, FOLD):
                if may_leave(self._services, room, request, state, length):
                    leaving.add(row)
            if row not in leaving:
                self._renew(rows, row, length + 1)
        return leaving

    def _advance(self, members: list[Member], *, leaves: bool) -> list[GroupFold]:
        """Take the policies of a group through their steps; if that fails, one by one."""
        pending = [each.state.pending for each in members]
        queries = partial(queries_of, pending, self._services.queries)
        try:
            fold = Group(self._services, self._table, members, queries).advance(leaves=leaves)
            for each in pending:
                each.clear()
            return [] if fold is None else [fold]
        except Exception as error:
            ended = met(self._services.ranks, error)
            if len(members) == 1:
                self._services.failures.note(members[0].request, DECODING, ended or error)
                self._services.failures.agree([members[0].request])
                return []
            self._services.failures.one_by_one(len(members), error)
        return [fold for each in members for fold in self._advance([each], leaves=leaves)]
