"""The compressed copy of one request: which slots hold it, and what its pages contain."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from kvpolicy.sglang_ext.memory.shared import Shared


@dataclass(frozen=True)
class Layout:
    """Where the lists of a copy lie in its pages; as of `Private`."""

    counts: torch.Tensor
    first_page: torch.Tensor
    layer_starts: list[int]


@dataclass
class Private:
    """The compressed copy of what one request has cached.

    Attributes:
        row: row of the request in SGLang's request pool.
        policy: name of the policy.
        slots: [S] int64.
        counts: [L, G] int32 entries of each (layer, KV head); None until they are written.
        first_page: [L, G] int32, index of the list's first page among the request's pages.
        laid_out: per layer and KV head, entries that the pages hold; empty until then.
        room: [L, G] entries for which each list has pages, on the host.
        layer_starts: per layer, `first_page` of its first list, for the host.
        tail_start: position from which entries lie in ordinary slots: what was there when the
            copy was last written. Of these slots the request may own some before that position:
            the boundary of ownership is a multiple of SGLang's page size.
        shared: layers that are stored in pairs, if any.
        full: whether every list lost entries when it was written last.
        borrowed: how many of the slots, the first ones, are still the prompt's, in the request's
            row: it was compacted within them, and the row has not been given up yet.
        needs: slots that all its entries take with so many tokens more, as far as asked.
    """

    row: int
    policy: str
    slots: torch.Tensor
    tail_start: int
    counts: torch.Tensor | None = None
    first_page: torch.Tensor | None = None
    laid_out: list[list[int]] = field(default_factory=list)
    room: torch.Tensor | None = None
    layer_starts: list[int] | None = None
    shared: Shared | None = None
    full: bool = False
    borrowed: int = 0
    needs: dict[int, int] = field(default_factory=dict)

    @property
    def ready(self) -> bool:
        """Whether decode steps may read it."""
        return self.counts is not None

    @property
    def layout(self) -> Layout:
        """Where its lists lie.

        Raises:
            RuntimeError: nothing has been laid out yet.
        """
        if self.counts is None or self.first_page is None or self.layer_starts is None:
            raise RuntimeError(f"row {self.row}: nothing is laid out in its private pages")
        return Layout(self.counts, self.first_page, self.layer_starts)

    def entries(self, layer: int) -> list[int]:
        """How many entries each KV head reads in private pages at a layer; the host knows."""
        if self.shared is None:
            return self.laid_out[layer]
        # Two layers of a pair read one list, of which each takes as many as there are tokens.
        return [self.tail_start] * len(self.laid_out[layer])

    @property
    def table_bytes(self) -> int:
        """Memory of the tables that describe it."""
        tables = (self.slots, self.counts, self.first_page)
        return sum(t.numel() * t.element_size() for t in tables if t is not None)
