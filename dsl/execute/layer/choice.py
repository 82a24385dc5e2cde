"""The entries of a layer that stay after a decode step, and by how far their keys move.

Dimensions: L layers, H query heads, G KV heads, M cached positions of a layer, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch


def shift_of(kept: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """Number of dropped entries after each kept one.

    Args:
        kept, held: bool [G, n], in order of position: the entries that stay, and all entries.

    Returns:
        int64 [G, n]; 0 where the entry is not kept.
    """
    dropped = (held & ~kept).long()
    dropped_after = dropped.flip(-1).cumsum(-1).flip(-1)
    return dropped_after * kept


@dataclass(frozen=True)
class Held:
    """What the host knows of a layer's kept entries.

    Attributes:
        positions: number of positions that get a column, see `FinishedPrefill.columns`.
        alike: whether each KV head here keeps all of them.
    """

    positions: int
    alike: bool

    @staticmethod
    def of(kept: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """int64 [..., 2], positions and alike, on the same device.

        Args:
            kept: bool [..., G, N]; columns: bool [..., N].
        """
        alike = (kept == columns.unsqueeze(-2)).all(-1).all(-1)
        return torch.stack([columns.sum(-1), alike.long()], -1)

    @classmethod
    def each(cls, numbers: torch.Tensor) -> list[Held]:
        """The same of each layer, from [L, 2] of `of`."""
        return [cls(positions, bool(alike)) for positions, alike in numbers.tolist()]


# Keys and values [G, M, D] after a merge; None for those that it leaves alone.
Rows = tuple[torch.Tensor | None, torch.Tensor | None]


@dataclass
class Choice:
    """What stays at a layer after a step.

    Attributes:
        kept: bool [G, M], over the entries before any left.
        shift: int64 [G, M]: by how many positions each kept key moves forward, for `positions:
            slots`; None otherwise.
        held_mask: bool [G, M], the entries that each KV head held before; None if all held all.
        merged: makes `rows`.
    """

    kept: torch.Tensor
    shift: torch.Tensor | None = None
    held_mask: torch.Tensor | None = None
    merged: Callable[[], Rows] = lambda: (None, None)

    @cached_property
    def rows(self) -> Rows:
        """Float64 keys and values after a merge, computed from the cache at the first access."""
        return self.merged()
