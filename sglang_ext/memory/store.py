"""Private slots of compressed requests: who holds which, and what their pages contain.

Slots come from SGLang's own allocator and are counted in its unit, so that admission, eviction,
retraction and the leak checks see one pool:
available + evictable + protected + session + uncached + private == total at every step, where
slots set aside for internal requests are counted only while they are lent.
The store is also the pool's "aux cache": SGLang tells it when a request's row is freed or when
everything is flushed. Tensors of private slots belong to the scheduler's stream, wherever they are
taken; layouts belong to the forwards' stream (see streams.py).

Dimensions: L layers and G KV heads of the model, l and g those that are here, R ranks, S slots.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from kvpolicy.dsl.execute.tensors.heads import ALL, Heads
from kvpolicy.kernels.entries.tables import Tables
from kvpolicy.sglang_ext.face.host import to_device
from kvpolicy.sglang_ext.face.streams import Streams
from kvpolicy.sglang_ext.memory.arena import Arena, slots_of
from kvpolicy.sglang_ext.memory.private import Layout, Private
from kvpolicy.sglang_ext.memory.set_aside import Allocator, SetAside, whole_pages
from kvpolicy.sglang_ext.memory.tables import DeviceTables


class Store:
    """All private slots of one scheduler."""

    def __init__(
        self,
        arena: Arena,
        allocator: Allocator,
        changed: Callable[[str, int], None] = lambda policy, slots: None,
        tables: DeviceTables | None = None,
        streams: Streams | None = None,
        set_aside: SetAside | None = None,
        heads: Heads = ALL,
    ) -> None:
        """
        Args:
            changed: called with a policy's name and the slots it now holds, after every change.
            tables: device tables to keep current; None if decode steps read none.
            streams: of the scheduler, on which slots are taken and given back, and of forwards.
            set_aside: slots of internal requests, if there are any.
            heads: which of the model's KV heads are here. A request has the same number of slots
                on every rank: as many as the rank needs that needs most.
        """
        self.arena = arena
        self.allocator = allocator
        self._changed = changed
        self._tables = tables
        self._streams = streams or Streams()
        self.set_aside = set_aside or SetAside(allocator, 0)
        self._heads = heads
        self.by_row: dict[int, Private] = {}
        self._held: dict[str, int] = {}
        self._when_empty: Callable[[], None] = lambda: None

    @property
    def held(self) -> int:
        """Slots held by all requests."""
        return sum(self._held.values())

    @property
    def dense_capacity(self) -> int:
        """Tokens that SGLang may schedule: all but what is set aside."""
        return self.allocator.size - self.set_aside.total

    @property
    def uncached(self) -> int:
        """Slots of that capacity that are neither free nor SGLang's own."""
        return self.held - self.set_aside.lent + self.set_aside.unused

    def whole_pages(self, slots: int) -> int:
        """`slots`, rounded up to whole pages of the allocator."""
        return whole_pages(self.allocator, slots)

    def allocate(
        self, row: int, policy: str, slots: int, tail_start: int, evict: Callable[[int], object]
    ) -> Private | None:
        """Take slots for a request, evicting from the radix cache if needed; None if too few.

        Args:
            evict: asks the radix cache to make a number of slots available.

        Raises:
            RuntimeError: the row has private slots already.
        """
        if row in self.by_row:
            raise RuntimeError(f"row {row} already holds private slots")
        slots = self.whole_pages(slots)
        no_slots = torch.empty(0, dtype=torch.int32, device=self.arena.storage.device)
        private_slots = self._take([slots], evict, [no_slots])
        if private_slots is None:
            return None
        private = Private(row, policy, private_slots, tail_start)
        self.by_row[row] = private
        self._count(policy, slots)
        return private

    def borrow(self, row: int, policy: str, slots: torch.Tensor, tail_start: int) -> Private:
        """Use slots of a request's prompt as private slots; its row owns them until `own`.

        Args:
            slots: int32 [S], whole pages of the allocator.

        Raises:
            RuntimeError: as of `allocate`.
        """
        if row in self.by_row:
            raise RuntimeError(f"row {row} already holds private slots")
        private = Private(row, policy, slots, tail_start, borrowed=slots.numel())
        self.by_row[row] = private
        return private

    def take_over(self, private: Private) -> None:
        """Count borrowed slots as private: the rest of the request's row has been given up."""
        self._count(private.policy, private.borrowed)
        private.borrowed = 0

    def _take(
        self, missing: Sequence[int], evict: Callable[[int], object], held: Sequence[torch.Tensor]
    ) -> torch.Tensor | None:
        """int32 slots of each request: those held, then new ones; None if too few are left."""
        with self._streams.scheduling():
            evict(sum(missing))
            new_slots = self.allocator.alloc(sum(missing))
            if new_slots is None:
                return None
            try:
                return self._streams.shared(_joined(held, new_slots, missing))
            except Exception:  # such as no memory of the device for the copy
                self.allocator.free_segment(new_slots, start_pos=0)
                raise

    def _give_back(self, private: Private, keep: int = 0) -> None:
        """Give back all slots of a request but the first `keep`."""
        start = max(keep, private.borrowed)  # what is borrowed is given back with the row
        with self._streams.scheduling():
            kept = self._streams.shared(private.slots[:keep].clone())
            surplus = private.slots[start:].to(torch.int64)
            # Whole pages: `free` would look for equal ones by `unique`, for which the host waits.
            self.allocator.free_segment(surplus, start_pos=0)
        private.slots, private.borrowed = kept, min(keep, private.borrowed)
        self._count(private.policy, -surplus.numel())

    @property
    def kv_heads(self) -> int:
        """G, KV heads of the model, those of other ranks included."""
        return self._heads.total(self.arena.kv_heads)

    def slots_for(self, counts: torch.Tensor) -> int:
        """Slots that [L, G] entries take, on the rank and stage where they take most."""
        return self._slots_for(counts.numpy())

    def _slots_for(self, counts: np.ndarray) -> int:
        stages = self.ends_of_layers(counts)
        return self.whole_pages(max(slots_of(int(ends[-1].max()), len(ends)) for ends in stages))

    def ends_of_layers(self, counts: np.ndarray) -> list[np.ndarray]:
        """Pages up to the end of each layer, if lists of [L, G] entries follow each other.

        Returns:
            int64 [l, R] for each stage: of its layers, by rank.
        """
        lists = self._pages(counts).reshape(len(counts), -1, self.arena.kv_heads)
        pages = lists.sum(axis=2)
        return [pages[span.start : span.stop].cumsum(axis=0) for span in self.arena.spans]

    def here(self, counts: torch.Tensor) -> torch.Tensor:
        """[l, g] entries of the lists that are here, of [L, G]."""
        span = self.arena.span
        return self._heads.part(counts[span.start : span.stop], 1)

    def _pages(self, counts: np.ndarray) -> np.ndarray:
        """Pages that entries take, list by list."""
        return -(-counts // self.arena.kv_heads)

    def entries_with(self, private: Private | None, length: int) -> np.ndarray:
        """int64 [L, G] entries of a request with `length` tokens, if none leaves now.

        Args:
            private: its private pages; None if nothing has left so far.
        """
        if private is None:
            return np.full((self.arena.model_layers, self.kv_heads), length, dtype=np.int64)
        return np.array(private.laid_out, dtype=np.int64) + (length - private.tail_start)

    def slots_with(self, private: Private | None, length: int) -> int:
        """Slots that the entries of `entries_with` take."""
        if private is None:
            return self._slots_for(self.entries_with(None, length))
        needs, tail = private.layout.needs, length - private.tail_start
        if tail not in needs:
            needs[tail] = self._slots_for(self.entries_with(private, length))
        return needs[tail]

    def grow(self, private: Private, slots: int, evict: Callable[[int], object]) -> bool:
        """Take slots until a request has `slots`; False, and none, if too few are left.

        Args:
            evict: as for `allocate`.
        """
        return self.grow_together([private], [slots], evict) is not None

    def grow_together(
        self, requests: Sequence[Private], slots: Sequence[int], evict: Callable[[int], object]
    ) -> torch.Tensor | None:
        """As `grow`, for several requests at once: for all of them, or for none.

        Returns:
            int32 slots of all, one request's after the other's; None if too few are left.
        """
        pairs = zip(requests, slots, strict=True)
        missing = [max(number - private.slots.numel(), 0) for private, number in pairs]
        held = [private.slots for private in requests]
        if not any(missing):
            return torch.cat(held)
        all_slots = self._take(missing, evict, held)
        if all_slots is None:
            return None
        sizes = [part.numel() + number for part, number in zip(held, missing, strict=True)]
        for private, part, number in zip(requests, all_slots.split(sizes), missing, strict=True):
            private.slots = part
            self._count(private.policy, number)
        return all_slots

    def fill(self, private: Private, counts: torch.Tensor) -> None:
        """Lay out the pages for what was kept and give back the slots that are not needed.

        Args:
            counts: int64 [L, G] entries that will be written, on the host.
        """
        slots = self.slots_for(counts)
        if private.slots.numel() > slots:
            self._give_back(private, keep=slots)
        self.fill_together([private], [counts], private.slots)

    def fill_together(
        self, requests: Sequence[Private], counts: Sequence[torch.Tensor], slots: torch.Tensor
    ) -> Tables:
        """As `fill`, for several requests at once, which keep all their slots.

        Args:
            slots: int32, of all requests, one's after the other's.

        Returns:
            Tables whose row i says where the lists of the i-th request lie.
        """
        device, page = self.arena.storage.device, self.arena.kv_heads
        counts_here = [self.here(model_counts) for model_counts in counts]
        first_pages = [_before(self._pages(here.numpy())) for here in counts_here]
        starts = itertools.accumulate(
            (private.slots.numel() for private in requests[:-1]), initial=0
        )
        lists = np.stack([np.stack([here.numpy() for here in counts_here]), np.stack(first_pages)])
        rows = np.array([[private.tail_start for private in requests], list(starts)])
        numbers = to_device(np.concatenate([lists, rows], None).tolist(), torch.int32, device)
        list_numbers, row_numbers = numbers.split([lists.size, rows.size])
        all_counts, all_first_pages = list_numbers.view(lists.shape).unbind(0)
        tails, slots_start = row_numbers.view(rows.shape).unbind(0)
        for private, model_counts, here, host_first_page, device_counts, device_first_page in zip(
            requests, counts, counts_here, first_pages, all_counts, all_first_pages, strict=True
        ):
            private.layout = Layout(
                counts=device_counts,
                first_page=device_first_page,
                laid_out=model_counts.tolist(),
                laid_out_here=here.tolist(),
                room=self._pages(model_counts.numpy()) * page,
                layer_starts=host_first_page[:, 0].tolist(),
            )
            if self._tables is not None:
                self._tables.note(private)
        return Tables(
            all_counts, all_first_pages, tails, slots_start, slots, paired=all_counts[:0, :, 0]
        )

    def lay_out(self, counts: torch.Tensor) -> torch.Tensor:
        """Where the lists of a request that are here begin, if they follow each other.

        Args:
            counts: int64 [L, G] entries, on the host.

        Returns:
            int64 [l, g] first page of each list, on the host.
        """
        return torch.tensor(_before(self._pages(self.here(counts).numpy())))

    def resized_in_place(
        self, private: Private, counts: torch.Tensor, written: torch.Tensor
    ) -> None:
        """Note that the lists of a request have other sizes, in the pages that they had.

        Args:
            counts: int64 [L, G] entries that they hold, on the host.
            written: int32 [l, g] of `counts`, the lists that are here, on the device.
        """
        laid_out_here = self.here(counts).tolist()
        private.layout = replace(
            private.layout, laid_out=counts.tolist(), laid_out_here=laid_out_here, counts=written
        )
        if self._tables is not None:
            self._tables.note(private)

    def tail_moved(self, private: Private) -> None:
        """Note that a request's tail begins elsewhere; its lists have the same sizes."""
        if self._tables is not None:
            self._tables.note_tail(private)

    def empty(self, private: Private, tail_start: int) -> None:
        """Give back every slot of a request that goes on without what it held.

        Args:
            tail_start: position from which it reads ordinary slots.
        """
        private.tail_start, private.shared = tail_start, None
        self.fill(private, self._nothing)

    def hold(self, private: Private, slots: int, evict: Callable[[int], object]) -> None:
        """Have a request hold `slots` slots, without entries in them.

        Args:
            evict: as for `allocate`.

        Raises:
            RuntimeError: too few are left.
        """
        if not self.grow(private, slots, evict):
            raise RuntimeError(f"row {private.row}: there are no {slots} slots")
        if private.slots.numel() > slots:
            self._give_back(private, keep=slots)
        self.fill_together([private], [self._nothing], private.slots)

    @property
    def _nothing(self) -> torch.Tensor:
        """int64 [L, G] zeros: entries of a request that holds none."""
        return torch.zeros((self.arena.model_layers, self.kv_heads), dtype=torch.int64)

    def release(self, private: Private) -> None:
        """Give back every slot of a request."""
        if self.by_row.get(private.row) is not private:
            raise RuntimeError(f"row {private.row} does not hold these private slots")
        self._give_back(private)
        del self.by_row[private.row]
        if self._tables is not None:
            self._tables.forget(private.row)

    def free(self, row: int) -> None:
        """SGLang has freed a row: its request finished, was aborted or retracted."""
        private = self.by_row.get(row)
        if private is not None:
            self.release(private)

    def clear(self) -> None:
        """SGLang flushes everything; it empties the allocator itself next."""
        self.by_row.clear()
        if self._tables is not None:
            self._tables.forget_all()
        for policy, slots in list(self._held.items()):
            self._count(policy, -slots)

    def reset_allocator(self) -> None:
        """SGLang has emptied its allocator; private slots come with the next requests."""
        self.set_aside.take()
        self._when_empty()

    def when_empty(self, do: Callable[[], None]) -> None:
        """Call `do` now, and whenever SGLang has emptied its pool, as for new weights."""
        self._when_empty = do
        do()

    def alloc_to_lengths(self, **_: object) -> None:
        """SGLang has lengthened rows; private slots do not grow."""

    def check_integrity(self, free: torch.Tensor) -> None:
        """Raise unless every private slot is held exactly once and none is free.

        Args:
            free: slots on the allocator's free list.

        Raises:
            RuntimeError: says which slots or rows are wrong.
        """
        slots = [p.slots[p.borrowed :].to(torch.int64) for p in self.by_row.values()]
        held = torch.cat([*slots, self.set_aside.slots.to(free.device)])
        counted = self.held + self.set_aside.total - self.set_aside.lent
        if held.numel() != counted:
            raise RuntimeError(f"{held.numel()} slots are listed but {counted} are counted")
        unique, times = held.unique(return_counts=True)
        if (times > 1).any():
            raise RuntimeError(f"slots held twice: {unique[times > 1][:8].tolist()}")
        overlap = unique[torch.isin(unique, free)]
        if overlap.numel():
            raise RuntimeError(f"slots both private and free: {overlap[:8].tolist()}")
        for private in self.by_row.values():
            self._check_pages(private)
        if self._tables is not None:
            self._tables.check(private for private in self.by_row.values() if private.ready)

    def _check_pages(self, private: Private) -> None:
        if not private.ready:
            return
        page = self.arena.kv_heads
        ends = private.first_page + (private.counts + page - 1) // page
        last = int(ends.max())
        if last > self.arena.layers * private.slots.numel():
            raise RuntimeError(f"row {private.row}: {last} pages in {private.slots.numel()} slots")
        overlap = private.first_page.flatten()[1:] < ends.flatten()[:-1]
        if private.shared is None and bool(overlap.any()):
            raise RuntimeError(f"row {private.row}: two lists share a page")

    def _count(self, policy: str, slots: int) -> None:
        self._held[policy] = self._held.get(policy, 0) + slots
        self._changed(policy, self._held[policy])


def _joined(
    held: Sequence[torch.Tensor], new_slots: torch.Tensor, missing: Sequence[int]
) -> torch.Tensor:
    """int32 slots of each request, its earlier ones first.

    A copy: what the allocator hands out is a view of its whole free list, and keeps that alive.
    """
    parts = zip(held, new_slots.to(torch.int32).split(list(missing)), strict=True)
    return torch.cat(list(itertools.chain.from_iterable(parts)))


def _before(pages: np.ndarray) -> np.ndarray:
    """Number of pages that the lists before each one take."""
    first_pages: np.ndarray = pages.cumsum().reshape(pages.shape) - pages
    return first_pages
