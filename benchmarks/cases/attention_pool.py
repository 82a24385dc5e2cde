"""A pool read as ragged lists (private pages and tails) or as uniform lists of the same mean."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from kvpolicy.kernels.entries.tables import Tables

from cases.case import Model

# Layers in the pool: enough that pages of one layer lie in the rows of another.
LAYERS = 2
# Tokens generated since the prompt's end, in ordinary slots.
TAIL = 32
# Slots of a page of the uniform lists.
PAGE = 16


def ragged(rng: np.random.Generator, layers: int, heads: int, mean: int, most: int) -> np.ndarray:
    """int64 [layers, heads]: lengths as unequal as AdaKV's; mean `mean`, none above `most`."""
    weights = rng.lognormal(0, 0.7, (layers, heads))
    total = mean * layers * heads
    counts = np.minimum(np.floor(weights / weights.sum() * total), most).astype(np.int64)
    while (missing := total - counts.sum()) > 0:
        room = np.argwhere(counts < most)
        for place in room[:missing]:
            counts[tuple(place)] += max(1, min(missing // len(room), most - counts[tuple(place)]))
    return counts


@dataclass
class Cache:
    """A pool with B requests of N prompt tokens; a list holds `mean` of these on average.

    Attributes:
        storage: [LAYERS, 2, padded, G, D].
        counts, first_page: int64 [B, LAYERS, G], of the private lists, on the host.
        whole: whether the pool has room for lists of all N tokens.
        rows, lengths, req_to_token, tables: as `decode_attention` takes them.
        uniform: length of the uniform lists in entries, tail included.
    """

    model: Model
    tokens: int
    batch: int
    mean: int
    whole: bool

    def __post_init__(self) -> None:
        shape, device = self.model.shape, self.model.device
        rng = np.random.default_rng([self.tokens, self.batch])
        heads = shape.kv_heads
        self.counts = np.stack(
            [ragged(rng, LAYERS, heads, self.mean, self.tokens) for _ in range(self.batch)]
        )
        self.uniform = self.mean + TAIL
        pages = -(-self.counts // heads)
        before = pages.reshape(self.batch, -1).cumsum(1) - pages.reshape(self.batch, -1)
        private = -(-pages.sum((1, 2)) // LAYERS)
        needed = int(private.sum()) + self.batch * TAIL
        equal = self.batch * -(-(self.tokens + TAIL if self.whole else self.uniform) // PAGE) * PAGE
        padded = PAGE + -(-max(needed, equal) // PAGE) * PAGE
        self.storage = self.model.random(LAYERS, 2, padded, heads, shape.head_dim, seed=self.batch)
        # SGLang never allocates slot 0.
        order = 1 + self.model.permutation(padded - 1, seed=1)
        starts = np.concatenate([[0], private.cumsum()])
        # For `numbers`, on the host.
        self.starts, self.first_page = starts, before.reshape(self.counts.shape)
        self.private = order[: int(starts[-1])].cpu().numpy()
        self.tables = Tables.empty(self.batch + 1, LAYERS, heads, int(starts[-1]), device)
        self.tables.counts[1:] = torch.from_numpy(self.counts)
        self.tables.first_page[1:] = torch.from_numpy(self.first_page)
        self.tables.tail_start[1:] = self.tokens
        self.tables.slots_start[1:] = torch.from_numpy(starts[:-1])
        self.tables.slots.copy_(order[: int(starts[-1])])
        context = self.tokens + TAIL
        self.req_to_token = torch.zeros(self.batch + 1, context, dtype=torch.int32, device=device)
        tails = order[int(starts[-1]) : needed].view(self.batch, TAIL)
        self.req_to_token[1:, self.tokens :] = tails
        self.tails = tails.cpu().numpy()
        self.rows = torch.arange(1, self.batch + 1, device=device)
        self.lengths = torch.full((self.batch,), context, device=device)
        size = (LAYERS, self.batch, shape.heads, shape.head_dim)
        self.q = self.model.random(*size, seed=2)
        self.scale = shape.head_dim**-0.5

    def numbers(self, request: int, layer: int, head: int) -> np.ndarray:
        """int64 [M]: key entries of one list, as the layout of the pages says, then the tail."""
        padded, kv_heads = self.storage.shape[2], self.model.shape.kv_heads
        place = np.arange(self.counts[request, layer, head])
        page = self.first_page[request, layer, head] + place // kv_heads
        slot = self.private[self.starts[request] + page // LAYERS]
        paged = (page % LAYERS * 2 * padded + slot) * kv_heads + place % kv_heads
        return np.concatenate([paged, (layer * 2 * padded + self.tails[request]) * kv_heads + head])

    def entries(self, request: int, layer: int, head: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [M, D] of one list."""
        at = torch.from_numpy(self.numbers(request, layer, head)).to(self.storage.device)
        pool = self.storage.view(-1, self.storage.shape[-1])
        return pool[at], pool[at + self.value_offset]

    @property
    def ragged_bytes(self) -> int:
        """Bytes of the keys and values of all ragged lists, tails included."""
        tails = self.batch * LAYERS * self.model.shape.kv_heads * TAIL
        return (int(self.counts.sum()) + tails) * 2 * self.model.entry_bytes

    @property
    def value_offset(self) -> int:
        """Distance in the pool from a key entry to its value, in entries."""
        return self.storage.shape[2] * self.storage.shape[3]

    def slots_of_uniform(self, length: int) -> torch.Tensor:
        """int32 [B, length / PAGE]: pages of PAGE slots for lists of one length, shuffled."""
        pages = -(-length // PAGE)
        among = self.storage.shape[2] // PAGE
        order = self.model.permutation(among, seed=3)[: self.batch * pages]
        return order.view(self.batch, pages).int()
