"""Folds: at a decode step entries leave, and what stays is written to private pages.

A fold takes in everything that a request has cached: its private pages, its tail in ordinary slots
and, the first time, a prompt that still lies in the radix cache, of which it makes a copy. Then the
tail's slots are freed, and the request has as many private slots as it needs.

Where no entry changes, or entries can be changed where they lie, many requests are written at once:
in place if each list has pages for what it keeps, else to other pages (group_fold.py). Any other
request is written by itself, in one of two ways:

* layer by layer: if each list has pages for what it keeps, or each layer's pages in the new layout
  end before those of the next layer began in the old one. What a layer keeps is read, changed as
  the policy says, and written, before the next layer is read.
* all at once: otherwise. Everything that stays is read before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from kvpolicy.kernels.entries.rounding import rounded
from kvpolicy.sglang_ext.face.host import to_device
from kvpolicy.sglang_ext.request.request import RequestState

if TYPE_CHECKING:
    from kvpolicy.dsl.execute.decode.lists import FoldNumbers
    from kvpolicy.dsl.execute.layer.choice import Choice
    from kvpolicy.sglang_ext.forward.services import Services
    from kvpolicy.sglang_ext.memory.private import Private
    from kvpolicy.sglang_ext.memory.store import Store

# From a layer and `there`, bool [G, M] or None, to k, v [G, M, D].
Read = Callable[[int, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]

# A layout is given up when it takes this many times the slots that the entries need.
_WASTEFUL = 1.125


@dataclass(frozen=True)
class Left:
    """How many entries stay and leave at a fold of a request.

    Attributes:
        kept: int64 [L, G] entries that stay, of all ranks and stages, on the host.
        left: number of entries that leave all lists together.
        fewest: number of entries that leave the list that loses fewest.
    """

    kept: torch.Tensor
    left: int
    fewest: int

    @classmethod
    def of(cls, numbers: FoldNumbers) -> Left:
        """From the device's numbers, if there is only one stage."""
        return cls(numbers.counts_after, numbers.left, numbers.fewest)

    @classmethod
    def between(cls, before: torch.Tensor, kept: torch.Tensor) -> Left:
        """From int64 [L, G] entries before and after the fold, on the host."""
        leaving = before - kept
        return cls(kept, int(leaving.sum()), int(leaving.min()))


def begun(services: Services, request: Any, state: RequestState, length: int) -> Private:
    """The private pages of a request of `length` tokens; new, empty ones if it has none yet."""
    if state.private is None:
        row = request.kv.req_pool_idx
        state.private = services.store.allocate(row, state.served.name, 0, length, services.evict)
    return state.compressed_copy


def give_up_tail(services: Services, request: Any, state: RequestState, length: int) -> None:
    """Have a request's tail begin after its `length` tokens, and give up the slots before."""
    state.compressed_copy.tail_start = length
    services.detach([(request, state)])


@dataclass(frozen=True)
class _StayingRows:
    """What stays of one layer.

    Attributes:
        k, v: [G, M, D] in the pool's dtype.
        kept: [G, M] bool.
    """

    k: torch.Tensor
    v: torch.Tensor
    kept: torch.Tensor


def fits(store: Store, private: Private | None, counts: torch.Tensor) -> bool:
    """Whether each list has pages for its kept entries, [L, G], and slots are not wasted."""
    if private is None or not private.ready:
        return False
    if counts.tolist() == private.laid_out:
        return fits_again(store, private)
    roomy = bool((counts.numpy() <= private.layout.room).all())
    return roomy and not wasteful(store, private, counts)


def wasteful(store: Store, private: Private, counts: torch.Tensor) -> bool:
    """Whether a request has many more slots than [L, G] entries need."""
    return private.slots.numel() > _WASTEFUL * store.slots_for(counts)


def fits_again(store: Store, private: Private) -> bool:
    """As `fits`, if each list keeps as many entries as its pages hold now."""
    return private.slots.numel() <= _WASTEFUL * store.slots_with(private, private.tail_start)


class Fold:
    """The fold of one request, written by itself after the forward."""

    def __init__(
        self,
        services: Services,
        request: Any,
        state: RequestState,
        length: int,
        read: Read,
        choices: list[Choice],
    ) -> None:
        """
        Args:
            length: number of the request's tokens, the new one included.
            read: reads its entries, the new token's included.
            choices: what stays at each layer; emptied when it is written.
        """
        self._services, self._request, self._state = services, request, state
        self._length, self._read, self._choices = length, read, choices

    def write(self, left: Left) -> None:
        """Write what stays."""
        private = begun(self._services, self._request, self._state, self._length)
        if self._fits(left.kept) or self._fits_by_layer(left.kept):
            self.write_by_layer(left.kept)
        else:
            self.write_anew(left.kept)
        private.every_list_lost = left.fewest > 0

    def _fits(self, counts: torch.Tensor) -> bool:
        """As the function `fits`."""
        return fits(self._services.store, self._state.private, counts)

    def _fits_by_layer(self, counts: torch.Tensor) -> bool:
        """Whether each layer can be laid out anew and written before the next one is read.

        On every stage, because all stages take the same number of slots.
        """
        private = self._state.compressed_copy
        if not private.ready:
            return False
        store, slots = self._services.store, private.slots.numel()
        stages = zip(
            store.ends_of_layers(counts.numpy()),
            store.ends_of_layers(private.layout.room),
            strict=True,
        )
        return all(
            (ends[:-1] <= limits[:-1]).all() and (ends[-1] <= slots * len(ends)).all()
            for ends, limits in stages
        )

    def write_by_layer(self, counts: torch.Tensor) -> None:
        """Write [L, G] entries that stay, each layer before the next one is read."""
        services, private = self._services, self._state.compressed_copy
        keeps_layout, device = self._fits(counts), private.slots.device
        first_page = private.first_page
        if not keeps_layout:
            first_page = to_device(services.store.lay_out(counts), torch.int32, device)
        self._place(self._rows(), first_page)
        services.ranks.meet()  # from here on slots change hands
        self.give_up_tail()
        if keeps_layout:
            counts_here = services.store.here(counts)
            services.store.resized_in_place(
                private, counts, to_device(counts_here, torch.int32, device)
            )
        else:
            services.store.fill(private, counts)

    def write_anew(self, counts: torch.Tensor) -> None:
        """Read all [L, G] entries that stay, take the slots that they need, and write them."""
        store, private = self._services.store, self._state.compressed_copy
        layers = list(self._rows())
        self._services.ranks.meet()  # from here on slots change hands
        self.give_up_tail()
        if not store.grow(private, store.slots_for(counts), self._services.evict):
            raise RuntimeError(f"request {self._request.rid}: the slots for its fold are gone")
        store.fill(private, counts)
        self._place(layers, private.first_page)

    def give_up_tail(self) -> None:
        """Give up the tail's slots: what stays of their entries has been read."""
        give_up_tail(self._services, self._request, self._state, self._length)

    def _rows(self) -> Iterator[_StayingRows]:
        """What stays of each layer in turn, read on demand."""
        dtype, choices = self._services.arena.storage.dtype, self._choices
        for layer in range(len(choices)):
            choice = choices.pop(0)  # so that its merged rows are freed
            k, v = choice.rows
            if k is None or v is None:
                read_k, read_v = self._read(layer, choice.held_mask)
                k, v = read_k if k is None else k, read_v if v is None else v
            if choice.shift is not None:
                rotate = self._state.served.kernels.rotate
                k = self._services.rotary.move(k, choice.shift, rotate)
            yield _StayingRows(rounded(k, dtype), rounded(v, dtype), choice.kept)

    def _place(self, layers: Iterable[_StayingRows], first_page: torch.Tensor) -> None:
        """Write the rows of each layer in turn; first_page: [l, g] of their lists."""
        arena, place = self._services.arena, self._state.served.kernels.place
        pages = arena.pages(self._state.compressed_copy.slots)
        for rows, first in zip(layers, first_page, strict=True):
            arguments = (rows.k, rows.v, rows.kept, pages)
            place(arena.entries, *arguments, value_offset=arena.value_offset, first_page=first)
