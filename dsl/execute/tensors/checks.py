"""Whether the model's tensors hold neither NaN nor infinity, as far as a policy reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import torch
from kvpolicy.dsl.execute.tensors.heads import Heads


class FiniteChecks:
    """Checks of the tensors read so far, for the KV heads of one layer or of several.

    Attributes:
        results: a tensor per check: bool, 0-d or one per KV head, false if NaN or infinity was
            read; or a 0-d float that is NaN or infinite itself then. All these are tested in one
            operation.
    """

    def __init__(self) -> None:
        self.results: list[torch.Tensor] = []
        self._awaited: tuple[int, Callable[[], list[torch.Tensor]]] | None = None

    def extend(self, checks: Sequence[torch.Tensor]) -> None:
        """Adds checks."""
        self.results.extend(checks)

    def here(self, kv: int) -> torch.Tensor | None:
        """Bool [kv], per KV head here whether what was read is finite; None: nothing was read."""
        by_head = [x for x in self.results if x.ndim]
        scalars = [x for x in self.results if not x.ndim]
        numbers = [x for x in scalars if x.is_floating_point()]
        truths = [x for x in scalars if not x.is_floating_point()]
        if numbers:
            truths.append(torch.stack(numbers).isfinite().all())
        if truths:
            by_head.append(torch.stack(truths).all().expand(kv))
        return reduce(torch.logical_and, by_head) if by_head else None

    def ask(self, heads: Heads, kv: int) -> None:
        """Asks other ranks for their checks, in the next exchange."""
        finite = None if self.all_asked else self.here(kv)
        if finite is not None:
            self._awaited = len(self.results), heads.gathered_later([(finite, 0)])

    @property
    def all_asked(self) -> bool:
        """Whether other ranks have been asked since the last check; True if there are no checks."""
        return len(self.results) == (0 if self._awaited is None else self._awaited[0])

    def everywhere(self, heads: Heads, kv: int, total: int) -> torch.Tensor | None:
        """As `here`; where other ranks hold KV heads, a layer's result is that of all its heads.

        Args:
            kv: number of KV heads here, over all layers.
            total: number of KV heads of one layer of the model.
        """
        if not heads.divided:
            return self.here(kv)
        self.ask(heads, kv)
        if self._awaited is None:
            return None
        (finite,) = self._awaited[1]()
        layers = finite.view(-1, total).all(1)
        return layers.repeat_interleave(kv // len(layers))
