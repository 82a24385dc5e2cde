"""Ranks that share a model's KV heads, each in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
from kvpolicy.dsl.execute.heads import Divided, Heads

PATIENCE = 60  # seconds that a rank waits for the others
T = TypeVar("T")


class Ranks:
    """So many ranks, and what they sent.

    Attributes:
        sent: bytes of each exchange, as each rank sent them.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.sent: list[int] = []
        self._barrier = threading.Barrier(number, timeout=PATIENCE)
        self._parts: list[torch.Tensor] = [torch.empty(0)] * number

    def heads(self, rank: int, total: int) -> Divided:
        """The KV heads of one."""

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
        """The work of every rank at once; one that fails fails the others."""

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
    """The part of a rank in an array with heads along a dimension; of fewer heads, one of them."""
    parts = min(ranks, x.shape[at])
    return np.split(x, parts, at)[rank * parts // ranks]


def queries_of(heads: Heads, own: np.ndarray, at: int = 1) -> np.ndarray:
    """As a policy sees them, of an array of those of a rank with heads along a dimension."""
    (whole,) = heads.queries([(torch.from_numpy(own), at)])
    return whole.numpy()
