"""Keeps the tables that a decode step reads on the device up to date.

What changes is noted where it happens, in the scheduler or at the end of a forward, and written at
the beginning of the next forward. So everything is written on the stream of the forwards, after the
steps that read the earlier state and before those that read the new one, and a captured CUDA graph
finds the tensors where they always were.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from kvpolicy.kernels.entries.tables import Tables
from kvpolicy.sglang_ext.face.host import to_device
from kvpolicy.sglang_ext.face.streams import Streams
from kvpolicy.sglang_ext.memory.arena import Arena

if TYPE_CHECKING:
    from kvpolicy.sglang_ext.memory.private import Private


class DeviceTables:
    """The tables of one scheduler.

    Private slots of one row lie together in `tables.slots`. Places there are given out from front
    to back; when the end is reached, all rows are written again from the front, which always makes
    room because there are twice as many places as the pool has slots.

    Attributes:
        tables: what kernels read.
    """

    def __init__(
        self,
        arena: Arena,
        rows: int,
        slots: int,
        streams: Streams | None = None,
        *,
        pairs: bool = False,
    ) -> None:
        """
        Args:
            rows: R of SGLang's table of slots, the padding row included.
            slots: number of slots of the pool.
            pairs: whether a request may store layers in pairs.
        """
        sizes, device = (rows, arena.layers, arena.kv_heads, slots), arena.storage.device
        self.tables = self.empty(*sizes, device, pairs=pairs)
        self._streams = streams or Streams()
        self._changed: dict[int, Private | None] = {}
        self._moved: dict[int, Private] = {}
        self._written: dict[int, Private] = {}
        self._places: dict[int, range] = {}
        self._versions: dict[int, int] = {}  # of the rows that are written
        self._latest = 0
        self.end = 0  # of the places in `tables.slots` that are taken

    @staticmethod
    def empty(
        rows: int,
        layers: int,
        kv_heads: int,
        slots: int,
        device: torch.device | str,
        *,
        pairs: bool,
    ) -> Tables:
        """Tables for a pool of `slots` slots, in which no row has private pages."""
        return Tables.empty(rows, layers, kv_heads, 2 * slots, device, pairs=pairs)

    def note(self, private: Private) -> None:
        """Note private pages that are laid out anew; they are read when the tables are written."""
        self._changed[private.row] = private

    def note_tail(self, private: Private) -> None:
        """Note a tail that begins elsewhere; it is read when the tables are written."""
        self._moved[private.row] = private

    def forget(self, row: int) -> None:
        """Note that a row has no private pages any more."""
        self._changed[row] = None

    def forget_all(self) -> None:
        """Note that no row has private pages any more."""
        self._changed = dict.fromkeys((*self._changed, *self._written))

    def version(self, row: int) -> int:
        """Number of the layout of a row's private pages that is written; 0 if there are none.

        No two layouts have the same number, in whatever rows: while a row's number stays, so do its
        lists and the places of their pages.
        """
        return self._versions.get(row, 0)

    def write(self) -> None:
        """Write what has changed, on the current stream, without waiting for the device."""
        changed, self._changed = self._changed, {}
        moved, self._moved = self._moved, {}
        tails = [private for row, private in moved.items() if row not in changed]
        if tails:
            self._write_tails(self._rows(tails), tails)
        empty_rows = [row for row, private in changed.items() if private is None]
        laid_out = [private for private in changed.values() if private is not None]
        for row in empty_rows:
            for by_row in (self._written, self._versions, self._places):
                by_row.pop(row, None)
        for private in laid_out:
            self._latest += 1
            self._versions[private.row] = self._latest
            self._written[private.row] = private
        self._clear(empty_rows)
        placed = self._find_places(laid_out)
        self._write_lists(laid_out)
        self._write_slots(placed)

    def _clear(self, empty_rows: Sequence[int]) -> None:
        if empty_rows:
            rows = to_device(empty_rows, torch.int64, self.tables.counts.device)
            for table in (self.tables.counts, self.tables.tail_start):
                table.index_fill_(0, rows, 0)

    def _write_tails(self, rows: torch.Tensor, moved: Sequence[Private]) -> None:
        tails = self.tables.tail_start
        starts = to_device([private.tail_start for private in moved], torch.int32, tails.device)
        tails.index_copy_(0, rows, starts)

    def _find_places(self, changed: Sequence[Private]) -> Sequence[Private]:
        """Find places for slots; return the requests whose slots are to be written."""
        for private in changed:
            place, count = self._places.get(private.row), private.slots.numel()
            if place is not None and count <= len(place):
                self._places[private.row] = place[:count]
                continue
            if self.end + count > self.tables.slots.shape[0]:
                return self._compact()
            self._places[private.row] = range(self.end, self.end + count)
            self.end += count
        return changed

    def _compact(self) -> Sequence[Private]:
        self._places, self.end = {}, 0
        for private in self._written.values():
            end = self.end + private.slots.numel()
            self._places[private.row] = range(self.end, end)
            self.end = end
        return list(self._written.values())

    def _write_lists(self, changed: Sequence[Private]) -> None:
        if not changed:
            return
        tables, rows = self.tables, self._rows(changed)
        tables.counts.index_copy_(0, rows, torch.stack([private.counts for private in changed]))
        tables.first_page.index_copy_(
            0, rows, torch.stack([private.first_page for private in changed])
        )
        if tables.paired.numel():
            unpaired = torch.zeros_like(tables.paired[0])
            paired = [
                unpaired if private.shared is None else private.shared.paired for private in changed
            ]
            tables.paired.index_copy_(0, rows, torch.stack(paired))
        self._write_tails(rows, changed)

    def _write_slots(self, placed: Sequence[Private]) -> None:
        if not placed:
            return
        tables, device = self.tables, self.tables.slots.device
        starts = [self._places[private.row].start for private in placed]
        sizes = [private.slots.numel() for private in placed]
        tables.slots_start.index_copy_(
            0, self._rows(placed), to_device(starts, torch.int32, device)
        )
        slots = torch.cat([self._streams.shared(private.slots) for private in placed])
        firsts = itertools.accumulate(sizes[:-1], initial=0)
        distances = [start - first for start, first in zip(starts, firsts, strict=True)]
        shifts, repeats = to_device([distances, sizes], torch.int64, device).unbind(0)
        places = torch.arange(len(slots), device=device)
        places += shifts.repeat_interleave(repeats, output_size=len(slots))
        tables.slots.index_copy_(0, places, slots)

    def _rows(self, requests: Sequence[Private]) -> torch.Tensor:
        return to_device(
            [private.row for private in requests], torch.int64, self.tables.slots.device
        )

    def check(self, held: Iterable[Private]) -> None:
        """Raise unless the tables are what requests hold; changes not yet written are left out.

        Args:
            held: the private pages of every row that are laid out.

        Raises:
            RuntimeError: says which row is wrong.
        """
        tables, rows = self.tables, {*self._changed, *self._moved}
        for private in held:
            row = private.row
            if row in self._changed or row in self._moved:
                continue
            rows.add(row)
            start = int(tables.slots_start[row])
            slots = tables.slots[start : start + private.slots.numel()]
            same = (
                torch.equal(slots, private.slots)
                and torch.equal(tables.counts[row], private.counts)
                and self._says_pairs(private)
                and torch.equal(tables.first_page[row], private.first_page)
                and int(tables.tail_start[row]) == private.tail_start
            )
            if not same:
                raise RuntimeError(f"row {row}: the device tables are not what it holds")
        other_rows = [row for row in range(tables.tail_start.shape[0]) if row not in rows]
        if tables.counts[other_rows].any() or tables.tail_start[other_rows].any():
            raise RuntimeError("the device tables list private pages of a row that has none")

    def _says_pairs(self, private: Private) -> bool:
        paired, row = self.tables.paired, private.row
        if private.shared is not None:
            return torch.equal(paired[row], private.shared.paired)
        return not paired.numel() or not bool(paired[row].any())
