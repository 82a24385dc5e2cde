"""Requests of one policy that are taken through their steps together, and fold together.

One launch finds the entries of all lists of all layers and requests, and one compacts them; between
the two `dsl/execute/decode/requests.py` decides what stays. What a request keeps does not depend on
the others.

The host waits for the device once, for the numbers of entries that stay. It does not wait if these
are known: each list lost entries at the last fold, and no data decide its size
(dsl/bind/entries.py). Then the numbers are only read at the next fold. Lists that outgrow their
pages are written to other pages, of many requests at once. A request that has no private pages yet,
whose lists became much shorter, or whose entries cannot be changed where they lie, is written by
itself (fold.py).

With several stages (`--pp-size`) each finds what stays of its layers, waiting for the device, and
writes it when all know how many entries that is (stages.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from kvpolicy.dsl.execute.decode.requests import Staying, follow_together
from kvpolicy.dsl.execute.tensors.kernels import Entries
from kvpolicy.kernels.entries.requests import Requests
from kvpolicy.sglang_ext.face.host import to_device
from kvpolicy.sglang_ext.forward.failures import FOLD, Contained
from kvpolicy.sglang_ext.forward.fold import (
    Fold,
    Left,
    begun,
    fits,
    fits_again,
    give_up_tail,
    wasteful,
)
from kvpolicy.sglang_ext.forward.reader import EntryReader
from kvpolicy.sglang_ext.request.request import RequestState

if TYPE_CHECKING:
    from kvpolicy.dsl.execute.decode.lists import FoldNumbers
    from kvpolicy.dsl.execute.decode.memory import Memory
    from kvpolicy.sglang_ext.forward.services import Services
    from kvpolicy.sglang_ext.memory.arena import Arena


MOST_LISTS = 65535  # programs along the second or third axis of a grid, at most
LARGEST = 2**28  # bytes of one number per entry, of the requests that are advanced together
MOVED = 2**30  # bytes of entries that are held while they move to other pages


@dataclass(frozen=True)
class Member:
    """One request of a group.

    Attributes:
        length: number of its tokens, those of the steps included.
        positions: [T] of the steps' tokens.
    """

    request: Any
    state: RequestState
    length: int
    positions: Sequence[int]

    @property
    def memory(self) -> Memory:
        """What its policy remembers."""
        return self.state.memory

    @property
    def width(self) -> int:
        """Number of cached positions of its longest layer, those of the steps included."""
        return self.memory.width + len(self.positions)

    @property
    def fold_numbers(self) -> FoldNumbers:
        """Numbers of what stays at this fold in the layers here; the host waits for them."""
        return self.memory.numbers()


def portions_of(members: Sequence[Member], arena: Arena) -> list[list[Member]]:
    """The requests of a group in portions, within `LARGEST` and `MOST_LISTS`, the widest first.

    A portion is as wide as its widest request: less than twice what each of them needs. Its order
    is that of `members`, as at the last fold, whose block then serves as it is.
    """
    lists, portions, left = arena.layers * arena.kv_heads, [], list(members)
    while left:
        widest = max(member.width for member in left)
        alike = [member for member in left if 2 * member.width > widest]
        left = [member for member in left if 2 * member.width <= widest]
        size = max(min(LARGEST // (lists * widest * 8), MOST_LISTS // lists), 1)
        portions += [alike[i : i + size] for i in range(0, len(alike), size)]
    return portions


class Group:
    """B requests of one group, after a forward."""

    def __init__(
        self,
        services: Services,
        table: torch.Tensor,
        members: Sequence[Member],
        queries: Callable[[], torch.Tensor],
    ) -> None:
        """
        Args:
            table: [rows, context] SGLang's table of slots.
            queries: as of `follow_together`, of this rank's query heads.
        """
        self._services, self._table, self._members = services, table, list(members)
        self._rank_queries = queries
        self._kernels = members[0].state.served.kernels
        self._bound = members[0].state.served.bound
        numbers = [
            [member.request.kv.req_pool_idx for member in members],
            [member.length for member in members],
            [member.positions[-1] for member in members],
            list(range(len(members))),
        ]
        device = services.arena.storage.device
        device_numbers = to_device(numbers, torch.int64, device)
        self._rows, self._lengths, self._newest, self._places = device_numbers.unbind(0)

    def advance(self, *, leaves: bool) -> GroupFold | None:
        """Take the policies through the steps; return the folds, None if nothing may leave.

        If it raises, nothing has changed.
        """
        staying = follow_together(
            [member.memory for member in self._members],
            [member.positions for member in self._members],
            self._newest, self._queries, self._read, leaves=leaves,
        )  # fmt: skip
        return None if staying is None else GroupFold(self, staying)

    def _queries(self) -> torch.Tensor:
        """Queries for `follow_together`, of all query heads that read the KV heads held here."""
        lists = len(self._members) * self._services.arena.layers
        rank_queries = self._rank_queries().unflatten(0, (lists, -1))
        (queries,) = self._services.ranks.heads.queries([(rank_queries, 1)])
        return queries.flatten(0, 1)

    def _read(self, holds: torch.Tensor) -> tuple[Entries, Entries]:
        arena = self._services.arena
        ids = self._kernels.entry_ids(
            _requests(self._services, self._table, self._rows, self._lengths), holds
        )
        return arena.at_ids(ids)


class GroupFold:
    """The folds of a group's requests, after the forward."""

    def __init__(self, together: Group, staying: Staying) -> None:
        self._group, self._staying = together, staying
        self._services = together._services
        self._written: dict[int, torch.Tensor] = {}
        self._left: dict[int, Left] = {}  # by place in the group, if the host knows it

    @property
    def members(self) -> Sequence[Member]:
        """The requests, by place in the group."""
        return self._group._members

    def finish(self) -> None:
        """Write what stays; the host waits at most once, and not if it knows how much that is."""
        started, members = time.perf_counter(), self.members
        failures, staying = self._services.failures, self._staying
        # All are in one block: the numbers of one arrive with those of the others.
        first = members[0].memory
        waits = staying.in_place and staying.checks_counts and not first.numbers_arrived()
        fixed: list[int] = []
        for place, member in enumerate(members):
            with failures.contained(member.request, FOLD):
                if waits and self._keeps_size(member):
                    fixed.append(place)
                else:
                    self._left[place] = Left.of(member.fold_numbers)
        self._write(fixed, started)

    def carry_out(self, agreed: Mapping[int, Left]) -> None:
        """Write what stays, when all stages know how much that is.

        Args:
            agreed: by `id` of the requests whose folds are carried out.
        """
        pairs = (
            (place, agreed.get(id(member.request))) for place, member in enumerate(self.members)
        )
        self._left = {place: left for place, left in pairs if left is not None}
        slots = {place: self._slots_after(place) for place, left in self._left.items() if left.left}
        self._write([], time.perf_counter())
        self._services.failures.agree(member.request for member in self.members)
        for place, number in slots.items():
            if self.members[place].state.failure_code:
                self._keep_pace(place, number)

    def _write(self, fixed: list[int], started: float) -> None:
        """Write what stays.

        Args:
            fixed: places of requests whose lists all keep their sizes.
            started: `time.perf_counter` at the beginning of the fold.
        """
        members, failures, staying = self.members, self._services.failures, self._staying
        known: list[int] = []
        moving: list[int] = []
        others: list[int] = []
        for place in self._left:
            with failures.contained(members[place].request, FOLD):
                if self._drops(place):
                    in_place, moved = self._in_place_or_moved(place)
                    (known if in_place else moving if moved else others).append(place)
        failures.agree(member.request for member in members)
        for places in (fixed, known, moving, others):
            places[:] = [place for place in places if not members[place].state.broken]
        if fixed:
            with self._contained(fixed):
                self._launch(fixed, staying.proceed)
        if known or moving:
            proceed = _all(len(members), staying.kept.device)
            if known:
                with self._contained(known):
                    self._launch(known, proceed)
            for places in self._portions(moving):
                with self._contained(places):
                    self._move(places, proceed)
        share = (time.perf_counter() - started) / max(len(members), 1)
        self._finish(fixed, known, moving, share)
        for place in others:
            member, left, started = members[place], self._left[place], time.perf_counter()
            with failures.contained(member.request, FOLD, joint=True):
                self._alone(place, member).write(left)
            self._report(member, left.left, time.perf_counter() - started)

    def _contained(self, places: list[int]) -> Contained:
        requests = [self.members[place].request for place in places]
        return self._services.failures.contained_together(requests, FOLD)

    def _slots_after(self, place: int) -> int:
        """Private slots of a request after its fold, the same number on every stage."""
        store, private = self._services.store, self.members[place].state.private
        kept, slots = self._left[place].kept, 0 if private is None else private.slots.numel()
        in_place, moved = self._in_place_or_moved(place)
        if in_place or fits(store, private, kept):
            return slots
        needs = store.slots_for(kept)
        return max(slots, needs) if moved else needs

    def _keep_pace(self, place: int, slots: int) -> None:
        """Have a request whose fold has failed here hold as many slots as on other stages.

        It reads only its newest token, until all stages know.
        """
        member, services = self.members[place], self._services
        arguments = (services, member.request, member.state, member.length)
        with services.failures.contained(member.request, FOLD):
            private = begun(*arguments)
            give_up_tail(*arguments)
            services.store.hold(private, slots, services.evict)

    def _keeps_size(self, member: Member) -> bool:
        """Whether it is known without waiting that all lists keep their sizes, in their pages."""
        private = member.state.private
        if private is None or not private.every_list_lost:
            return False
        if private.keeps_size is None:
            private.keeps_size = member.memory.keeps_size(private.laid_out)
        return private.keeps_size and fits_again(self._services.store, private)

    def _drops(self, place: int) -> bool:
        """Whether anything leaves; if not, notes that not every list lost entries."""
        private = self.members[place].state.private
        if self._left[place].left:
            return True
        if private is not None:
            private.every_list_lost = False
        return False

    def _in_place_or_moved(self, place: int) -> tuple[bool, bool]:
        """Whether what stays is written in place; whether to other pages, with other requests'."""
        store, private = self._services.store, self.members[place].state.private
        kept = self._left[place].kept
        if private is None or not private.ready or not self._staying.in_place:
            return False, False
        return fits(store, private, kept), not wasteful(store, private, kept)

    def _merged(self, places: list[int], proceed: torch.Tensor) -> list[torch.Tensor]:
        """Merge entries of some requests; return their rows, lengths, kept, holds and proceed."""
        group, staying = self._group, self._staying
        number = len(self.members)
        tensors = [group._rows, group._lengths, staying.kept, staying.held_mask, proceed]
        if len(places) < number:
            index = to_device(places, torch.int64, staying.kept.device)
            tensors = [
                tensor.unflatten(0, (number, -1)).index_select(0, index).flatten(0, 1)
                for tensor in tensors
            ]
        staying.merge(proceed if len(places) == number else self._only(places, proceed))
        return tensors

    def _launch(self, places: list[int], proceed: torch.Tensor) -> None:
        """Move what stays of some requests to the front of their pages."""
        group = self._group
        rows, lengths, kept, holds, proceed = self._merged(places, proceed)
        requests = _requests(self._services, group._table, rows, lengths)
        written = group._kernels.compact_in_place(requests, kept, holds, proceed)
        self._turn(requests, kept, holds, proceed)
        self._written = dict(zip(places, written.unbind(0), strict=True))

    def _move(self, places: list[int], proceed: torch.Tensor) -> None:
        """Read what stays of some requests, lay out their pages for it, and write it."""
        services, group = self._services, self._group
        arena, store, kernels = services.arena, services.store, group._kernels
        members = [self.members[place] for place in places]
        privates = [member.state.compressed_copy for member in members]
        counts = [self._left[place].kept for place in places]
        rows, lengths, kept, holds, proceed = self._merged(places, proceed)
        requests = _requests(services, group._table, rows, lengths)
        ids = kernels.entry_ids(requests, holds)
        number = _number([store.here(model_counts) for model_counts in counts])
        chosen = torch.nonzero_static(kept.flatten(), size=number)[:, 0]
        pool = [arena.entries[: len(arena.values)], arena.values]
        entries = kernels.take_rows(pool, ids.flatten(), chosen)
        services.ranks.meet()  # from here on slots change hands
        for member, private in zip(members, privates, strict=True):
            private.tail_start = member.length
        services.detach([(member.request, member.state) for member in members])
        needs = [store.slots_for(kept) for kept in counts]
        slots = store.grow_together(privates, needs, services.evict)
        if slots is None:
            raise RuntimeError("the slots for folds are gone")
        tables = store.fill_together(privates, counts, slots)
        rows = group._places[: len(places)]
        requests = Requests(arena.storage, tables, rows, lengths, group._table)
        ids = kernels.entry_ids(requests, kept)
        kernels.put_rows(pool, ids.flatten(), entries, chosen)
        self._turn(requests, kept, holds, proceed)

    def _turn(self, requests: Requests, *arguments: Any) -> None:
        """Turn the keys that stay if `positions: slots`; arguments as of the kernel `turn`."""
        group = self._group
        if group._bound.positions == "slots":
            self._services.rotary.turn(group._kernels.turn, requests, *arguments)

    def _portions(self, places: list[int]) -> Iterator[list[int]]:
        """Places of requests in portions, of at most `MOVED` bytes or one request each."""
        entry_bytes = 2 * self._services.arena.entries[0].nbytes
        portion: list[int] = []
        size = 0
        for place in places:
            request_bytes = entry_bytes * _number([self._left[place].kept])
            if portion and size + request_bytes > MOVED:
                yield portion
                portion, size = [], 0
            portion, size = [*portion, place], size + request_bytes
        if portion:
            yield portion

    def _only(self, places: list[int], proceed: torch.Tensor) -> torch.Tensor:
        """bool [B, P], `proceed` of the requests at `places`, false for the others."""
        chosen_places = set(places)
        chosen = [place in chosen_places for place in range(len(proceed))]
        return proceed & to_device(chosen, torch.bool, proceed.device)[:, None]

    def _finish(
        self, fixed: list[int], known: list[int], moving: list[int], seconds: float
    ) -> None:
        """Give up the tails of requests whose lists have been written, and report what left."""
        members, failures = self.members, self._services.failures
        outcomes: list[tuple[Member, int]] = []
        ends = (fixed, self._end_fixed), (known, self._end_known), (moving, self._end_moved)
        for places, end in ends:
            for place in places:
                member = members[place]
                if not member.state.broken:
                    with failures.contained(member.request, FOLD):
                        outcomes.append((member, end(place, member)))
        tails = [(member.request, member.state) for member, _ in outcomes]
        try:
            self._services.detach(tails)
        except Exception as error:
            for request, _ in tails:
                failures.note(request, FOLD, error)
        for member, left in outcomes:
            self._report(member, left, seconds)

    def _report(self, member: Member, left: int, seconds: float) -> None:
        """Report a fold by which `left` entries have left, if it has not failed on any rank."""
        if not member.state.broken:
            with self._services.failures.contained(member.request, FOLD):
                self._services.reports.finished_fold(member.request, member.state, left, seconds)

    def _end_fixed(self, place: int, member: Member) -> int:
        """Note lists that kept their sizes, and so lost what was added; return how many entries."""
        private = member.state.compressed_copy
        lists = len(private.laid_out) * len(private.laid_out[0])
        left = (member.length - private.tail_start) * lists
        self._services.store.tail_moved(private)
        private.tail_start = member.length
        return left

    def _end_known(self, place: int, member: Member) -> int:
        """Note lists that were written in place; return how many entries left."""
        private, store = member.state.compressed_copy, self._services.store
        kept = self._left[place].kept
        if kept.tolist() == private.laid_out:
            store.tail_moved(private)
        else:
            store.resized_in_place(private, kept, self._written[place])
        private.tail_start = member.length
        return self._end_moved(place, member)

    def _end_moved(self, place: int, member: Member) -> int:
        """Note lists that were written to other pages; return how many entries left."""
        member.state.compressed_copy.every_list_lost = self._left[place].fewest > 0
        return self._left[place].left

    def _alone(self, place: int, member: Member) -> Fold:
        """The fold of a request that is written by itself."""
        services, group = self._services, self._group
        slots = group._bound.positions == "slots"
        reader = EntryReader.of(
            services.arena, group._table, member.request, member.state, member.length
        )
        choices = self._staying.choices(place, reader.gathered, slots=slots)
        return Fold(services, member.request, member.state, member.length, reader.gathered, choices)


@lru_cache(maxsize=256)
def _all(number: int, device: torch.device) -> torch.Tensor:
    """bool [B, 1], all true; cached, so never written to."""
    return torch.ones(number, 1, dtype=torch.bool, device=device)


def _requests(
    services: Services, table: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor
) -> Requests:
    """Where the entries of requests lie; int64 [B] rows of the pool, and tokens of each."""
    return Requests(services.arena.storage, services.tables.tables, rows, lengths, table)


def _number(counts: Sequence[torch.Tensor]) -> int:
    """Sum of the entries of all lists, each [L, G] on the host."""
    return sum(sum(map(sum, request_counts.tolist())) for request_counts in counts)
