"""Where kernels take the place of torch operations, and where a server's keys and values lie.

A program is given a table of kernels by name; what is not in the table is computed by torch. A
kernel keeps exactly what torch keeps, ties included, from the same values.

top(keys, number) -> bool [R, n]
    The `number` (int, or int64 [R, 1]) highest of int32 keys [R, n] per row, of equal ones the
    first; the lowest int32 is absent and never chosen.

Dimensions: G KV heads, n tokens of a layer, D head size, S slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

Kernels = Mapping[str, Callable]
NONE: Kernels = MappingProxyType({})


@dataclass(frozen=True)
class Slots:
    """Keys or values of one layer in a server's pool: token t of KV head g is pool[slots[t], g].

    Attributes:
        pool: [S, G, D].
        slots: int64 [n].
    """

    pool: torch.Tensor
    slots: torch.Tensor

    @property
    def device(self) -> torch.device:
        return self.slots.device

    @property
    def shape(self) -> tuple[int, int, int]:
        """(G, n, D), as of the dense tensor."""
        return self.pool.shape[1], self.slots.shape[0], self.pool.shape[2]

    def dense(self) -> torch.Tensor:
        """[G, n, D], a copy."""
        return self.pool[self.slots].transpose(0, 1)
