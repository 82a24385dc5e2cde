"""Which KV heads of the model an execution holds, and how it gets what the others found.

Where a server divides the KV heads over ranks (tensor parallelism), each rank computes what its own
heads need. An operation that looks across KV heads gets the values of all of them: they are
gathered in order, every rank carries out the operation on all, and goes on with its own part. What
enters such an operation has no axis of queries (ir/heads.py), so that no attention is ever sent.

Of more ranks than KV heads several hold the same one, each with some of the query heads that read
it. What a KV head decides is decided from all of these: their queries are gathered before a policy
sees them, so that such ranks compute the same.

Dimensions: G KV heads of the model, g of one rank, H query heads, h of one rank, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy

import torch

# From bytes [n] to those of all ranks [R, n], in the order of their heads.
Exchange = Callable[[torch.Tensor], torch.Tensor]
# A tensor, and the dimension that runs along its KV heads, which are those of one layer or of
# several, one after the other. Without one what each rank has is wanted, of ranks that hold the
# same of one.
Part = tuple[torch.Tensor, int | None]


class Heads:
    """All KV heads of the model: nothing is exchanged.

    Attributes:
        divided: whether other heads are held elsewhere.
        shared: whether those that are here are held elsewhere too, with other query heads.
        first: of the model's heads that is held here.
    """

    divided, shared, first = False, False, 0

    def number(self, total: int) -> int:
        """How many of a model's KV heads are held here."""
        return total

    def total(self, number: int) -> int:
        """How many the model has, of which so many are held here."""
        return number

    def joined(self) -> Heads:
        """The same, whose exchanges take along what has been asked for by `later`."""
        return self

    def later(self, parts: Sequence[Part]) -> Callable[[], list[torch.Tensor]]:
        """Tensors with the KV heads of all ranks; of those without, [R, ...].

        They are exchanged when they are needed, or with what is needed first.

        Args:
            parts: all ranks give tensors of these shapes, in the same order.
        """
        found = [x[None] if at is None else x for x, at in parts]
        return lambda: found

    def gathered(self, parts: Sequence[tuple[torch.Tensor, int]]) -> list[torch.Tensor]:
        """As of `later`, at once: tensors with the KV heads of all ranks."""
        return self.later(parts)()

    def queries(self, parts: Sequence[tuple[torch.Tensor, int]]) -> list[torch.Tensor]:
        """Tensors with all query heads that read the KV heads held here, in one exchange.

        Args:
            parts: as of `gathered`, with a dimension of the h query heads that are here.
        """
        return [x for x, _ in parts]

    def everyone(self, x: torch.Tensor) -> torch.Tensor:
        """[R, ...], what each rank has of a tensor; of ranks that hold the same, one."""
        return self.later([(x, None)])()[0]

    def part(self, x: torch.Tensor, at: int) -> torch.Tensor:
        """What is held here of a tensor with all KV heads in dimension `at`, as of `gathered`."""
        return x

    def agree(self) -> None:
        """Every rank has come as far; if one has failed, all raise."""


ALL = Heads()


class _Asked:
    """What is to be exchanged.

    Attributes:
        found: as of `Heads.later`; None: not yet.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self.found: list[torch.Tensor] | None = None


class Divided(Heads):
    """The KV heads of one rank of several.

    Args:
        rank: of R.
        total: G; a multiple of R, or R is one of G.
        exchange: with the other ranks. Each calls it as often, with as many bytes.
        agree: as the method.
    """

    divided = True

    def __init__(
        self, rank: int, ranks: int, total: int, exchange: Exchange, agree: Callable[[], None]
    ) -> None:
        self.first, self._own, self._total = rank * total // ranks, max(total // ranks, 1), total
        self._holders = max(ranks // total, 1)  # of each KV head, one after the other
        self.shared = self._holders > 1
        self._exchange, self._agree = exchange, agree
        self._waiting: list[_Asked] = []

    def number(self, total: int) -> int:
        return self._own

    def total(self, number: int) -> int:
        return self._total

    def joined(self) -> Heads:
        made = copy(self)
        made._waiting = []
        return made

    def later(self, parts: Sequence[Part]) -> Callable[[], list[torch.Tensor]]:
        asked = _Asked(parts)
        self._waiting.append(asked)

        def found() -> list[torch.Tensor]:
            if asked.found is None:
                self._exchange_waiting()
            return asked.found or []

        return found

    def _exchange_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        parts = [part for each in waiting for part in each.parts]
        found = iter(self._all([x for x, _ in parts]) if parts else [])
        for each in waiting:
            each.found = [self._whole(next(found), at) for _, at in each.parts]

    def _whole(self, found: torch.Tensor, at: int | None) -> torch.Tensor:
        own = found[:: self._holders]
        if at is None:
            return own
        layers = own.unflatten(at + 1, (-1, self._own))  # [R, ..., layers, g, ...]
        whole: torch.Tensor = layers.movedim(0, at + 1).flatten(at, at + 2)
        return whole

    def queries(self, parts: Sequence[tuple[torch.Tensor, int]]) -> list[torch.Tensor]:
        if not self.shared:
            return super().queries(parts)
        if not any(x.numel() for x, _ in parts):  # a policy that reads none
            return [torch.cat([x] * self._holders, at) for x, at in parts]
        first = self.first * self._holders  # rank that holds the same
        return [
            each[first : first + self._holders].movedim(0, at).flatten(at, at + 1)
            for (_, at), each in zip(parts, self._all([x for x, _ in parts]), strict=True)
        ]

    def part(self, x: torch.Tensor, at: int) -> torch.Tensor:
        layers = x.unflatten(at, (-1, self._total))
        own: torch.Tensor = layers.narrow(at + 1, self.first, self._own).flatten(at, at + 1)
        return own

    def agree(self) -> None:
        self._agree()

    def _all(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """[R, ...] of each tensor, all of them sent at once as bytes."""
        # Of one number `contiguous` leaves a stride of 0, which bytes cannot have.
        flat = [
            x.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
            for x in tensors
        ]
        found = self._exchange(torch.cat(flat))
        return [
            part.contiguous().view(x.dtype).view(len(found), *x.shape)
            for part, x in zip(found.split([x.numel() for x in flat], 1), tensors, strict=True)
        ]
