"""The compressed copy of one request: which slots hold it, and what its pages contain.

Dimensions: L layers and G KV heads of the model, l and g those that are here, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from kvpolicy.sglang_ext.memory.paired_layers import PairedLayers


class Listed(NamedTuple):
    """Where the entries of one request's private pages lie at a layer, KV head by KV head.

    Attributes:
        keys, values: int64 [n] entries per KV head.
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
        counts: int32 [l, g] entries of each list that is here, on the device.
        first_page: int32 [l, g] index of each list's first page among the request's pages, on the
            device.
        laid_out: [L][G] entries of each list, those of other ranks and stages included, which hold
            as many slots.
        laid_out_here: [l][g] of `laid_out`, the lists that are here.
        room: int64 [L, G] entries for which each list has pages.
        layer_starts: [l] `first_page` of each layer's first list, on the host.
        needs: number of further tokens -> slots that all entries then take, as far as asked.
        listed: layer -> where its entries lie, as far as decode steps have listed them.
    """

    counts: torch.Tensor
    first_page: torch.Tensor
    laid_out: list[list[int]]
    laid_out_here: list[list[int]]
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
        slots: int32 [S], on the device.
        tail_start: position from which tokens lie in ordinary slots: the number of tokens when the
            copy was last written. The request may still own slots of some tokens before it, since
            it gives up whole pages of SGLang's.
        shared: layers that are stored in pairs, if any.
        every_list_lost: whether every list lost entries at the last fold.
        keeps_size: whether its lists, if each lost entries, keep their sizes at every fold; None:
            not asked since they were laid out.
        borrowed: number of its first slots that the request's row still owns: the prompt was
            compacted within them, and the row has not been given up yet.
    """

    row: int
    policy: str
    slots: torch.Tensor
    tail_start: int
    shared: PairedLayers | None = None
    every_list_lost: bool = False
    keeps_size: bool | None = None
    borrowed: int = 0
    _layout: Layout | None = None

    @property
    def ready(self) -> bool:
        """Whether decode steps may read it: its lists are laid out."""
        return self._layout is not None

    @property
    def layout(self) -> Layout:
        """Where its lists lie in its pages.

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
        """[g] entries that each KV head reads in private pages at a layer, known to the host."""
        counts = self.layout.laid_out_here[layer]
        # Two layers of a pair read one list, each as many entries as the prompt has tokens.
        return counts if self.shared is None else [self.tail_start] * len(counts)
