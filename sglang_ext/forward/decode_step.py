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
        self._rows = rows = self._rows_of(requests)
        self._private = rows.private
        self._noted_rows = rows.noted(self._lengths)
        self._most_steps = services.queries.most_steps(len(self._noted_rows))
        self.leaving: list[Leaving] = []
        self.folds: list[GroupFold] = []

    def _rows_of(self, requests: Sequence[Any]) -> DecodeRows:
        """What is known of the requests, from the last forward if they are the same."""
        services, rows = self._services, self._services.rows
        if rows is None or not rows.of(requests):
            services.forget_rows()
            rows = DecodeRows(requests, services.queries, self._table.device)
            for row, state in enumerate(rows.states):
                if state is not None:
                    self._renew(rows, row, int(self._lengths[row]))
            services.rows = rows
        return rows

    def _renew(self, rows: DecodeRows, row: int, length: int) -> None:
        with self._services.failures.contained(rows.requests[row], DECODING):
            rows.renew(row, length)
        rows.hold(row)

    @cached_property
    def _lists(self) -> Lists:
        lengths = self._lengths[list(self._private)].tolist()
        privates = list(self._private.values())
        return Lists(self._arena, privates, lengths, self._table, remember=True)

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
        return [0 if private is None else private.tail_start for private in self.private_of_rows]

    @property
    def tail(self) -> int:
        """Number of tokens that all rows together read in ordinary slots."""
        return int(self._all_lengths.sum()) - sum(self.tail_starts)

    @property
    def notes(self) -> bool:
        """Whether queries of this forward are to be noted."""
        return len(self._noted_rows) > 0

    @cached_property
    def plain(self) -> torch.Tensor:
        """int64 [B''] rows that read no compressed entries."""
        plain_rows = [i for i in range(len(self._all_lengths)) if i not in self._private]
        return to_device(plain_rows, torch.int64, self._table.device)

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
        for row in {*self._private, *self._noted_rows.tolist()}:
            self._services.failures.note(self._rows.requests[row], READING, error)
        self._private, self._noted_rows = {}, self._noted_rows[:0]
        for cached in ("_lists", "_index", "plain"):
            self.__dict__.pop(cached, None)

    def finish(self) -> None:
        """After the forward: note its queries, take policies through steps, and fold what stays."""
        failures, rows, lengths = self._services.failures, self._rows, self._lengths
        if len(self._noted_rows):
            rows.note(self._noted_rows, lengths, len(self._all_lengths))
            if self._services.rows is not rows:  # given up meanwhile: a prompt's policy has failed
                rows.hand_over()
        candidates = rows.leaving(lengths).tolist()
        full_rows = rows.must_advance(lengths, self._most_steps).tolist()
        leaving = self._leaving(candidates)
        due_rows = sorted({*leaving, *full_rows})
        grouped = self._going_on(due_rows, leaving)
        # The same on all ranks, even if one fails.
        if failures.due(anyway=bool(candidates or full_rows)):
            failures.agree(self._concerned)
        if self._services.in_stages:
            self.leaving = self._known_to_leave(leaving)
        groups: dict[tuple[Hashable, bool], list[Member]] = {}
        for group, member in grouped:
            if not member.state.broken:
                groups.setdefault(group, []).append(member)
        # Work of all groups has been launched before the host waits for numbers.
        folds = [
            fold
            for (_, leaves), members in groups.items()
            for portion in portions_of(members, self._arena)
            for fold in self._advance(portion, leaves=leaves)
        ]
        if self._services.in_stages:
            self.folds, folds = folds, []
        for fold in folds:
            fold.finish()
        if folds:
            failures.agree(self._concerned)
        for row in due_rows:
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
        grouped: list[tuple[tuple[Hashable, bool], Member]] = []
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
                grouped.append(((group, leaves), member))
        return grouped

    def _known_to_leave(self, rows: set[int]) -> list[Leaving]:
        """The requests that may lose entries on any stage, in order of their rows.

        Args:
            rows: those that lose entries on this stage.
        """
        leaving = []
        for row, state in enumerate(self._rows.states):
            length = int(self._lengths[row])
            leaves = row in rows and state is not None and state.goes_on
            if state is not None and state.goes_on_elsewhere:
                leaves = state.leaves_at(length - state.prompt)
            if leaves and state is not None:
                leaving.append(Leaving(self._rows.requests[row], state, length))
        return leaving

    def _leaving(self, candidates: Sequence[int]) -> set[int]:
        """The rows that lose entries now, of those that may."""
        room, rows, leaving = Room(self._services), self._rows, set()
        for row in candidates:
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
        pending = [member.state.pending for member in members]
        queries = partial(queries_of, pending, self._services.queries)
        try:
            fold = Group(self._services, self._table, members, queries).advance(leaves=leaves)
            for steps in pending:
                steps.clear()
            return [] if fold is None else [fold]
        except Exception as error:
            common_error = met(self._services.ranks, error)
            if len(members) == 1:
                self._services.failures.note(members[0].request, DECODING, common_error or error)
                self._services.failures.agree([members[0].request])
                return []
            self._services.failures.one_by_one(len(members), error)
        return [fold for member in members for fold in self._advance([member], leaves=leaves)]
