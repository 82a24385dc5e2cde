"""Whether the model's tensors hold neither NaN nor infinity, as far as a policy reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import torch
from kvpolicy.dsl.execute.heads import Heads


class Checks:
    """Checks of what has been read so far, of one layer's KV heads or of those of several layers.

    Attributes:
        own: bool tensors, false if what was read is not finite: 0-d, or one per KV head; or 0-d
            numbers that are then not finite themselves, so that all are looked at in one go.
    """

    def __init__(self) -> None:
        self.own: list[torch.Tensor] = []
        self._asked: tuple[int, Callable[[], list[torch.Tensor]]] | None = None

    def extend(self, checks: Sequence[torch.Tensor]) -> None:
        """More of them."""
        self.own.extend(checks)

    def here(self, kv: int) -> torch.Tensor | None:
        """Bool [kv], whether all is finite of each KV head here; None: nothing was read."""
        each = [x for x in self.own if x.ndim]
        whole = [x for x in self.own if not x.ndim]
        numbers = [x for x in whole if x.is_floating_point()]
        truths = [x for x in whole if not x.is_floating_point()]
        if numbers:
            truths.append(torch.stack(numbers).isfinite().all())
        if truths:
            each.append(torch.stack(truths).all().expand(kv))
        return reduce(torch.logical_and, each) if each else None

    def ask(self, heads: Heads, kv: int) -> None:
        """Asks other ranks about theirs, together with what is exchanged next."""
        own = None if self.told else self.here(kv)
        if own is not None:
            self._asked = len(self.own), heads.later([(own, 0)])

    @property
    def told(self) -> bool:
        """Whether other ranks have been asked since the last check, or nothing was read."""
        return len(self.own) == (0 if self._asked is None else self._asked[0])

    def everywhere(self, heads: Heads, kv: int, total: int) -> torch.Tensor | None:
        """As of `here`, whether all is finite of all KV heads of each one's layer, on all ranks.

        Args:
            kv: KV heads here; total: those of a layer of the model.
        """
        if not heads.divided:
            return self.here(kv)
        self.ask(heads, kv)
        if self._asked is None:
            return None
        (whole,) = self._asked[1]()
        layers = whole.view(-1, total).all(1)
        return layers.repeat_interleave(kv // len(layers))
