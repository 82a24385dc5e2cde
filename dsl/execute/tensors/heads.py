"""The KV heads of the model that an execution holds, and exchange with ranks that hold others.

With tensor parallelism each rank computes what its own KV heads need. For an operation across KV
heads the values of all heads are gathered in order; every rank computes the operation on all of
them and goes on with its own part. Operands of such an operation have no axis `query`
(ir/heads.py), so no attention is ever sent.

With more ranks than KV heads, several ranks hold the same KV head, each with some of the query
heads that read it. Their queries are gathered before a policy sees them, so that these ranks
compute the same.

Dimensions: G KV heads of the model, g of one rank, H query heads, h of one rank, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy

import torch

# From uint8 [n] of this rank to uint8 [R, n] of all ranks, in the order of their KV heads.
Exchange = Callable[[torch.Tensor], torch.Tensor]
# A tensor and its dimension of KV heads: those of one layer, or of several layers one after the
# other. Without a dimension, each rank's tensor is wanted, once for ranks that hold the same head.
Part = tuple[torch.Tensor, int | None]


class Heads:
    """All KV heads of the model: nothing is exchanged.

    Attributes:
        divided: whether other ranks hold other KV heads.
        shared: whether other ranks hold the same KV heads, with other query heads.
        first: number of the first KV head that is here, counted in the model.
    """

    divided, shared, first = False, False, 0

    def number(self, total: int) -> int:
        """Number of KV heads that are here, of `total` in the model."""
        return total

    def total(self, number: int) -> int:
        """Number of KV heads in the model, of which `number` are here."""
        return number

    def joined(self) -> Heads:
        """The same heads with a queue of their own: what waits in it is exchanged together."""
        return self

    def gathered_later(self, parts: Sequence[Part]) -> Callable[[], list[torch.Tensor]]:
        """A function that gives tensors with the KV heads of all ranks.

        The exchange takes place when any waiting result is first needed, and serves all that wait.

        Args:
            parts: every rank gives tensors of the same shapes in the same order.

        Returns:
            Function that gives a tensor per part; [R, ...] of a part without KV heads.
        """
        tensors = [x[None] if dim is None else x for x, dim in parts]
        return lambda: tensors

    def gathered(self, parts: Sequence[tuple[torch.Tensor, int]]) -> list[torch.Tensor]:
        """Tensors with the KV heads of all ranks, exchanged at once; see `gathered_later`."""
        return self.gathered_later(parts)()

    def queries(self, parts: Sequence[tuple[torch.Tensor, int]]) -> list[torch.Tensor]:
        """Tensors with all query heads that read the KV heads held here, in one exchange.

        Args:
            parts: tensors, each with its dimension of the h query heads that are here.
        """
        return [x for x, _ in parts]

    def per_rank(self, x: torch.Tensor) -> torch.Tensor:
        """[R, ...], the tensor of each rank, once for ranks that hold the same KV head."""
        return self.gathered_later([(x, None)])()[0]

    def part(self, x: torch.Tensor, at: int) -> torch.Tensor:
        """The KV heads that are here, of a tensor with all KV heads in dimension `at`."""
        return x

    def agree(self) -> None:
        """Waits until every rank has come this far; if one has failed, all raise."""


ALL = Heads()


class _Waiting:
    """A request to exchange tensors.

    Attributes:
        found: the result of `Heads.gathered_later`; None before the exchange.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self.found: list[torch.Tensor] | None = None


class Divided(Heads):
    """The KV heads of one rank of several.

    Args:
        rank: this rank, from 0.
        ranks: R.
        total: G; a multiple of R, or a divisor of it.
        exchange: with the other ranks, which call it equally often, with equally many bytes.
        agree: see `Heads.agree`.
    """

    divided = True

    def __init__(
        self, rank: int, ranks: int, total: int, exchange: Exchange, agree: Callable[[], None]
    ) -> None:
        self.first, self._number, self._total = rank * total // ranks, max(total // ranks, 1), total
        self._holders = max(ranks // total, 1)  # consecutive ranks per KV head
        self.shared = self._holders > 1
        self._exchange, self._agree = exchange, agree
        self._waiting: list[_Waiting] = []

    def number(self, total: int) -> int:
        return self._number

    def total(self, number: int) -> int:
        return self._total

    def joined(self) -> Heads:
        heads = copy(self)
        heads._waiting = []
        return heads

    def gathered_later(self, parts: Sequence[Part]) -> Callable[[], list[torch.Tensor]]:
        waiting = _Waiting(parts)
        self._waiting.append(waiting)

        def gathered() -> list[torch.Tensor]:
            if waiting.found is None:
                self._exchange_waiting()
            return waiting.found or []

        return gathered

    def _exchange_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        parts = [part for item in waiting for part in item.parts]
        tensors = iter(self._all([x for x, _ in parts]) if parts else [])
        for item in waiting:
            item.found = [self._all_heads(next(tensors), dim) for _, dim in item.parts]

    def _all_heads(self, by_rank: torch.Tensor, dim: int | None) -> torch.Tensor:
        parts = by_rank[:: self._holders]
        if dim is None:
            return parts
        layers = parts.unflatten(dim + 1, (-1, self._number))  # [R, ..., layers, g, ...]
        heads: torch.Tensor = layers.movedim(0, dim + 1).flatten(dim, dim + 2)
        return heads

    def queries(self, parts: Sequence[tuple[torch.Tensor, int]]) -> list[torch.Tensor]:
        if not self.shared:
            return super().queries(parts)
        if not any(x.numel() for x, _ in parts):  # the policy reads no queries
            return [torch.cat([x] * self._holders, dim) for x, dim in parts]
        first_rank = self.first * self._holders  # first rank that holds the same KV head
        return [
            by_rank[first_rank : first_rank + self._holders].movedim(0, dim).flatten(dim, dim + 1)
            for (_, dim), by_rank in zip(parts, self._all([x for x, _ in parts]), strict=True)
        ]

    def part(self, x: torch.Tensor, at: int) -> torch.Tensor:
        layers = x.unflatten(at, (-1, self._total))
        heads: torch.Tensor = layers.narrow(at + 1, self.first, self._number).flatten(at, at + 1)
        return heads

    def agree(self) -> None:
        self._agree()

    def _all(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """[R, ...] of each tensor, all in one exchange of bytes."""
        # `contiguous` leaves one number its stride of 0, which a view as bytes refuses.
        flat = [
            x.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
            for x in tensors
        ]
        gathered = self._exchange(torch.cat(flat))
        return [
            part.reshape(-1).view(x.dtype).view(len(gathered), *x.shape)
            for part, x in zip(gathered.split([x.numel() for x in flat], 1), tensors, strict=True)
        ]
