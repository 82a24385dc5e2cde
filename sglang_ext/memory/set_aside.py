"""Slots set aside for internal requests, so that these take none from other requests.

They are taken from SGLang's allocator at the start and are no part of the capacity that it
schedules. While an internal request is computed, as many as it needs are lent to the allocator: all
others find as many free slots as without it, and no prompt leaves the radix cache for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

AMPLE = 0.1  # share of the pool; free slots beyond it may be taken too


class Allocator(Protocol):
    """The part of SGLang's slot allocator that is used."""

    page_size: int
    size: int

    def alloc(self, need_size: int) -> torch.Tensor | None: ...
    def free_segment(self, free_index: torch.Tensor, *, start_pos: int) -> None: ...
    def available_size(self) -> int: ...


def whole_pages(allocator: Allocator, slots: int) -> int:
    """Slots rounded up to what an allocator hands out."""
    return -(-slots // allocator.page_size) * allocator.page_size


class SetAside:
    """The slots of one scheduler's internal requests."""

    def __init__(self, allocator: Allocator, slots: int) -> None:
        """
        Args:
            slots: number of slots, rounded down to whole pages.
        """
        self._allocator = allocator
        self.total = slots // allocator.page_size * allocator.page_size
        self._lent: dict[str, int] = {}
        self._used: dict[str, Callable[[], int]] = {}
        self._ended: set[str] = set()
        self.take()

    def take(self) -> None:
        """Take all of them from an allocator all of whose slots are free."""
        self._lent.clear()
        self._used.clear()
        self._ended.clear()
        self.slots = torch.empty(0, dtype=torch.int64)  # int64 [S] that are not lent
        if self.total:
            slots = self._allocator.alloc(self.total)
            if slots is None:
                raise RuntimeError(f"{self.total} slots cannot be set aside in an empty pool")
            self.slots = slots.to(torch.int64)

    @property
    def lent(self) -> int:
        """Slots that the allocator has on loan."""
        return sum(self._lent.values())

    @property
    def unused(self) -> int:
        """Slots on loan that no internal request has taken: they are free, but not for others."""
        return sum(self._unused(rid, lent) for rid, lent in self._lent.items())

    def _unused(self, rid: str, lent: int) -> int:
        return (
            lent
            if rid in self._ended
            else max(lent - whole_pages(self._allocator, self._used[rid]()), 0)
        )

    def lend(self, rid: str, tokens: int, used: Callable[[], int]) -> bool:
        """Lend what a request of `tokens` tokens needs; False, and nothing, if that is too much.

        A request whose earlier loan has not been taken back gets none either. If too few slots are
        left here, the rest may be slots that SGLang has free beyond `AMPLE`.

        Args:
            used: gives the number of slots that the request uses now, parts of pages included.
        """
        if rid in self._lent:
            return False
        # SGLang wants a page more for each request.
        needed = whole_pages(self._allocator, tokens) + self._allocator.page_size
        lent = min(needed, self.slots.numel())
        spare = self._allocator.available_size() - AMPLE * self._allocator.size
        if needed - lent > max(spare, 0):
            return False
        if lent:
            self._allocator.free_segment(self.slots[:lent], start_pos=0)
            self.slots = self.slots[lent:].clone()
        self._lent[rid], self._used[rid] = lent, used
        return True

    def ended(self, rid: str) -> None:
        """Note that a request's slots are free, or will be at the end of this step."""
        if rid in self._lent:
            self._ended.add(rid)

    def take_back(self, evict: Callable[[int], object]) -> None:
        """Take back what was lent to requests that have ended.

        Args:
            evict: asks the radix cache to make slots available, as others may have taken the page
                that SGLang wants more for each request and does not use.
        """
        for rid in sorted(self._ended):
            lent = self._lent[rid]
            if lent > self._allocator.available_size():
                evict(lent)
            slots = self._allocator.alloc(lent) if lent else self.slots[:0]
            if slots is None:
                continue  # until more are free
            self.slots = torch.cat([self.slots, slots.to(torch.int64)])
            self._ended.remove(rid)
            del self._lent[rid], self._used[rid]
