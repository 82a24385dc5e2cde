"""The compressed copy of one request: which slots hold it, and what its pages contain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from kvpolicy.sglang_ext.memory.shared import Shared


class Listed(NamedTuple):
    """Where the entries of one request's private pages lie at a layer, KV head by KV head.

    Attributes:
        keys, values: int64 [n] per KV head.
        key_scale, value_scale: float32 [n] per KV head, by which what lies there is multiplied;
            None: by 1.
    """

    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    key_scale: Sequence[torch.Tensor] | None = None
    value_scale: Sequence[torch.Tensor] | None = None


@dataclass(frozen=True)
class Layout:
    """Where the lists of a copy lie in its pages.

    Attributes:
        counts: [L, g] int32 entries of each (layer, KV head) that is here.
        first_page: [L, g] int32, index of the list's first page among the request's pages.
        laid_out: per layer and KV head of the model, entries that the pages hold, those of other
            ranks as well: they have as many slots for them.
        held: of these, the lists that are here.
        room: [L, G] entries for which each list has pages, on the host; as `laid_out`.
        layer_starts: per layer, `first_page` of its first list, for the host.
        needs: slots that all entries take with so many tokens more, as far as asked.
        listed: per layer, where its entries lie, as far as decode steps have listed them.
    """

    counts: torch.Tensor
    first_page: torch.Tensor
    laid_out: list[list[int]]
    held: list[list[int]]
    room: np.ndarray
    layer_starts: list[int]
    needs: dict[int, int] = field(default_factory=dict, init=False)
    listed: dict[int, Listed] = field(default_factory=dict, init=False)


@dataclass
class Private:
    """The compressed copy of what one request has cached.

    Attributes:
        row: row of the request in SGLang's request pool.
        policy: name of the policy.
        slots: [S] int64.
        tail_start: position from which entries lie in ordinary slots: what was there when the
            copy was last written. Of these slots the request may own some before that position:
            the boundary of ownership is a multiple of SGLang's page size.
        shared: layers that are stored in pairs, if any.
        full: whether every list lost entries when it was written last.
        keeps_size: whether its lists, if they are full, stay as long at every fold; None: nobody
            has asked since they were laid out.
        borrowed: how many of the slots, the first ones, are still the prompt's, in the request's
            row: it was compacted within them, and the row has not been given up yet.
    """

    row: int
    policy: str
    slots: torch.Tensor
    tail_start: int
    shared: Shared | None = None
    full: bool = False
    keeps_size: bool | None = None
    borrowed: int = 0
    _layout: Layout | None = None

    @property
    def ready(self) -> bool:
        """Whether decode steps may read it: its lists are laid out."""
        return self._layout is not None

    @property
    def layout(self) -> Layout:
        """Where its lists lie.

        Raises:
            RuntimeError: nothing has been laid out yet.
        """
        if self._layout is None:
            raise RuntimeError(f"row {self.row}: nothing is laid out in its private pages")
        return self._layout

    @layout.setter
    def layout(self, layout: Layout) -> None:
        self._layout, self.keeps_size = layout, None

    @property
    def counts(self) -> torch.Tensor:
        """As of `Layout`."""
        return self.layout.counts

    @property
    def first_page(self) -> torch.Tensor:
        """As of `Layout`."""
        return self.layout.first_page

    @property
    def laid_out(self) -> list[list[int]]:
        """As of `Layout`; empty before anything is laid out."""
        return self._layout.laid_out if self._layout is not None else []

    def entries(self, layer: int) -> list[int]:
        """How many entries each KV head reads in private pages at a layer; the host knows."""
        held = self.layout.held[layer]
        # Two layers of a pair read one list, of which each takes as many as there are tokens.
        return held if self.shared is None else [self.tail_start] * len(held)

    @property
    def table_bytes(self) -> int:
        """Memory of the tables that describe it."""
        lists = (self.counts, self.first_page) if self.ready else ()
        return sum(t.nbytes for t in (self.slots, *lists))
