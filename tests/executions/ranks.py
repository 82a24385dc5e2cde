"""Ranks that divide a model's KV heads, each in its own thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.data.result import Steps
from kvpolicy.dsl.execute.program import TorchProgram
from kvpolicy.dsl.execute.tensors.heads import Divided, Heads
from moments import Moment, joined, kept

PATIENCE = 60  # seconds that a rank waits for the others
T = TypeVar("T")


class Ranks:
    """`number` ranks and their exchanges.

    Attributes:
        sent: bytes that each rank sent, per exchange.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.sent: list[int] = []
        self._barrier = threading.Barrier(number, timeout=PATIENCE)
        self._parts: list[torch.Tensor] = [torch.empty(0)] * number

    def heads(self, rank: int, total: int) -> Divided:
        """KV heads of one rank, of `total` KV heads."""

        def exchange(x: torch.Tensor) -> torch.Tensor:
            self._parts[rank] = x
            self._barrier.wait()
            sizes = {part.numel() for part in self._parts}
            assert len(sizes) == 1, f"ranks sent {sizes} bytes"
            found = torch.stack(self._parts)
            if rank == 0:
                self.sent.append(x.numel())
            self._barrier.wait()
            return found

        def agree() -> None:
            self._barrier.wait()

        return Divided(rank, self.number, total, exchange, agree)

    def run(self, work: Callable[[int], T]) -> list[T]:
        """Runs the work of all ranks at once; results by rank, or the error of one that failed."""

        def contained(rank: int) -> T:
            try:
                return work(rank)
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.number) as pool:
            futures = [pool.submit(contained, rank) for rank in range(self.number)]
        errors = [each.exception() for each in futures]
        for error in errors:
            if error is not None and not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [each.result() for each in futures]


def divided(x: np.ndarray, ranks: int, rank: int, at: int = 1) -> np.ndarray:
    """A rank's part of an array with heads along `at`; with fewer heads than ranks, one head."""
    parts = min(ranks, x.shape[at])
    return np.split(x, parts, at)[rank * parts // ranks]


def queries_of(heads: Heads, own: np.ndarray, at: int = 1) -> np.ndarray:
    """The queries that a policy sees on a rank, from `own`, the rank's with heads along `at`."""
    (whole,) = heads.queries([(torch.from_numpy(own), at)])
    return whole.numpy()


def kept_by_ranks(
    ranks: Ranks, bound: Bound, recording, steps: Steps, done: Callable = lambda: None, **more
) -> list[Moment]:
    """What all KV heads hold at each moment, after which the first rank calls `done`.

    With more ranks than KV heads, ranks that hold the same KV head are checked to hold the same.

    Args:
        recording: q [L, H, N, D], k and v [L, G, N, D].
        more: of each rank's program.
    """
    number, total = ranks.number, bound.shape.kv_heads

    def work(rank: int) -> list[Moment]:
        heads = ranks.heads(rank, total)
        own = [divided(x, number, rank) for x in recording]
        later = [divided(x, number, rank, 2) for x in steps]
        own[0], later[0] = queries_of(heads, own[0]), queries_of(heads, later[0], 2)
        program = TorchProgram(bound, heads=heads, **more)
        return kept(bound, own, tuple(later), program, done if rank == 0 else lambda: None)

    found = ranks.run(work)
    holders = max(number // total, 1)
    for i, each in enumerate(found):
        same = found[i // holders * holders]
        assert [held for held, _ in each] == [held for held, _ in same]
    return joined(found[::holders])
