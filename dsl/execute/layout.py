"""What is cached of a request at a layer while it decodes, and what stays after a step.

Dimensions: L layers, H query heads, G KV heads, M cached positions of a layer, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch


def shift_of(kept: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """How many entries after each kept one are dropped.

    Args:
        kept, there: bool [G, n], in order of position.

    Returns:
        int64 [G, n]; 0 where nothing is kept.
    """
    dropped = (there & ~kept).long()
    after = dropped.flip(-1).cumsum(-1).flip(-1)
    return after * kept


@dataclass(frozen=True)
class Held:
    """What the host knows of a layer's kept entries.

    Attributes:
        positions: M, how many positions some KV head keeps.
        alike: whether all KV heads keep the same.
    """

    positions: int
    alike: bool

    @staticmethod
    def of(kept: torch.Tensor) -> torch.Tensor:
        """int64 [..., 2], positions and alike, on the device of kept: bool [..., G, N]."""
        some = kept.any(-2)
        alike = (kept == some.unsqueeze(-2)).all(-1).all(-1)
        return torch.stack([some.sum(-1), alike.long()], -1)


# Keys and values [G, M, D] after a merge; None for those that it leaves alone.
Rows = tuple[torch.Tensor | None, torch.Tensor | None]


@dataclass
class Choice:
    """What stays at a layer after a step.

    Attributes:
        kept: bool [G, M], of the layout before the step's entries left.
        shift: int64 [G, M]: by how many positions each kept key moves forward, for `positions:
            slots`; None otherwise.
        there: bool [G, M], which entries there were; None where all KV heads held all.
        merged: makes `rows`.
    """

    kept: torch.Tensor
    shift: torch.Tensor | None = None
    there: torch.Tensor | None = None
    merged: Callable[[], Rows] = lambda: (None, None)

    @cached_property
    def rows(self) -> Rows:
        """Float64, after a merge, made of what is cached when they are asked for first."""
        return self.merged()
