"""Queries of decode forwards, noted for policies that are taken through the steps later.

Every decode forward with a request that needs it copies each layer's queries, after RoPE, into one
buffer `[L, rows, H, D]`, inside the CUDA graph where one is replayed; after the forward one copy
keeps the rows of the requests whose policies go on (pending_steps.py).

The buffer has as many rows as the largest captured batch and is allocated before the capture:
graphs remember its address. A larger batch, which runs without a graph, gets another buffer, as do
all batches of a server that captures nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from kvpolicy.dsl.ir.nodes import Program
from kvpolicy.dsl.ir.traverse import merge_roots, nodes_of, state_roots
from kvpolicy.sglang_ext.face import compat
from kvpolicy.sglang_ext.face.host import to_device
from kvpolicy.sglang_ext.request.pending_steps import LONGEST, NotedSteps, PendingSteps

logger = logging.getLogger(__name__)

# Most bytes of queries that all requests of a forward hold, if these suffice for the steps between
# two folds; see `most_steps`.
LARGEST = 2**28


def may_read(program: Program) -> bool:
    """Whether a policy, whatever its parameters, reads queries of decode steps."""
    rules = program.decode
    if rules is None:
        return False
    states, merge = state_roots(rules.states), merge_roots(rules.merge)
    roots = [rules.keep, rules.score, rules.budget, *states, *merge]
    return any(node.type.window for node in nodes_of(roots))


def most_bytes(step: int, interval: int) -> int:
    """Most bytes of queries: those of a step in the buffer and those noted for later.

    Args:
        step: bytes of one step's queries, of all requests that note them at once.
        interval: decode steps from one fold to the next.
    """
    return step * (1 + _fitting(step, interval))


def _fitting(step: int, interval: int) -> int:
    # Taking policies through steps more often than they fold would cost as much for nothing.
    return min(LONGEST, max(LARGEST // step, interval))


class QueryBuffer:
    """The queries of the running decode forward, of all layers.

    Attributes:
        needed: whether any served policy reads them.
    """

    def __init__(self, programs: Sequence[Program], interval: int = 1) -> None:
        """
        Args:
            interval: decode steps from one fold to the next.
        """
        self._interval = interval
        self.needed = any(may_read(program) for program in programs)
        self.captured: torch.Tensor | None = None  # graphs write to it, so it is never replaced
        self.larger: torch.Tensor | None = None  # for batches that no graph serves
        self._layers: dict[int, Any] = {}

    def reserve(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the buffer of batches that are about to be captured, if any policy needs it.

        Args:
            shape: [L, rows, H, D] for the largest batch.
        """
        if not self.needed:
            return
        self.captured = torch.zeros(tuple(shape), dtype=dtype, device=device)
        logger.info(
            "KV-cache policies: %.1f MiB for queries of a decode step of %d requests, and up to "
            "%.1f MiB for those of steps that policies have not been taken through.",
            self.captured.nbytes / 2**20,
            shape[1],
            self.most_steps(shape[1]) * self.captured.nbytes / 2**20,
        )

    def write(self, layer: Any, heads: torch.Tensor, own: range) -> None:
        """Note the queries of a layer; inside a capture, too.

        Args:
            layer: SGLang's attention layer.
            heads: [rows, H, D] after RoPE.
            own: the L layers of this stage.
        """
        place, rows = layer.layer_id - own.start, heads.shape[0]
        self._layers[place] = layer
        buffer = self._buffer_for(rows)
        if buffer is None or rows > buffer.shape[1]:
            buffer = self.larger = heads.new_zeros((len(own), *heads.shape))
        buffer[place, :rows].copy_(heads)

    def take(self, rows: torch.Tensor, batch: int) -> torch.Tensor:
        """[F, L, H, D] copies of the queries of F rows of the forward that is over.

        Args:
            rows: int64 [F] on the device.
            batch: number of rows of the forward.

        Raises:
            RuntimeError: no queries of the forward were noted.
        """
        buffer = self._buffer_for(batch)
        if buffer is None:
            raise RuntimeError("no queries of this forward were noted")
        return buffer.transpose(0, 1).index_select(0, rows)

    def most_steps(self, requests: int) -> int:
        """Number of steps that `requests` note before their policies are taken through them.

        It is what fits into `LARGEST`, but at least the steps between two folds and at most
        `LONGEST`; so with many requests more than `LARGEST` may be held.
        """
        buffer = self.captured if self.larger is None else self.larger
        if buffer is None or not requests:
            return LONGEST
        return _fitting(requests * buffer[:, 0].numel() * buffer.element_size(), self._interval)

    def scaled(self, queries: torch.Tensor) -> torch.Tensor:
        """Queries [B, L, H, T, D] as a policy sees them."""
        factors = [compat.scale(self._layers[layer]) for layer in range(queries.shape[1])]
        if all(factor == 1.0 for factor in factors):
            return queries
        device_factors = to_device(factors, queries.dtype, queries.device)
        return queries * device_factors[:, None, None, None]

    def _buffer_for(self, rows: int) -> torch.Tensor | None:
        """The buffer for a forward of `rows` rows; None if there is none yet."""
        captured = self.captured
        return captured if captured is not None and rows <= captured.shape[1] else self.larger


def queries_of(pending: Sequence[PendingSteps], buffer: QueryBuffer) -> torch.Tensor:
    """[B * L * H, T, D] queries of B requests' last T steps as policies see them.

    All requests have noted T steps. Those noted in the same batches, as a rule all, are read at
    once.
    """
    by_batch: dict[tuple[int, ...], list[int]] = {}
    for number, steps in enumerate(pending):
        by_batch.setdefault(tuple(id(part.steps) for part in steps.parts), []).append(number)
    groups = list(by_batch.values())
    group_queries = [_together([pending[number].parts for number in group]) for group in groups]
    if len(groups) == 1:
        return buffer.scaled(group_queries[0]).flatten(0, 2)
    order = np.argsort(np.concatenate(groups))
    queries = torch.cat(group_queries)
    queries = queries.index_select(0, to_device(order.tolist(), torch.int64, queries.device))
    return buffer.scaled(queries).flatten(0, 2)


def _together(requests: Sequence[Sequence[NotedSteps]]) -> torch.Tensor:
    """[B, L, H, T, D] queries of requests that were noted in the same batches."""
    pieces = []
    for parts in zip(*requests, strict=True):
        queries = torch.stack(list(parts[0].steps), 3)
        places = [part.place for part in parts]
        if places != list(range(queries.shape[0])):
            queries = queries.index_select(0, to_device(places, torch.int64, queries.device))
        pieces.append(queries)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 3)
