"""Where the cached entries of requests that decode lie in the pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from kvpolicy.kernels.entries.tables import Tables
from kvpolicy.kernels.launch.arguments import check_axes, refused


class Requests(NamedTuple):
    """B requests in the pool, each with a list of entries per layer and KV head.

    The list of (layer l, KV head g) of the request in a row is `tables.counts[row, l, g]` entries
    in private pages, then the tokens `tables.tail_start[row] .. length - 1` in ordinary slots.
    Entry j of the private part is place j % G of page p = first_page + j // G; page p lies in the
    request's private slot number p // L, in the rows of layer p % L.

    Attributes:
        storage: [L, 2, padded slots, G, D] any dtype, contiguous; [:, 0] keys, [:, 1] values.
        tables: of R rows.
        rows: int64 [B], row of each request in SGLang's request pool, without duplicates.
        lengths: int64 [B], tokens of each request, those dropped and the newest included.
        req_to_token: int32 [>= R, context], the ordinary slot of each token.
    """

    storage: torch.Tensor
    tables: Tables
    rows: torch.Tensor
    lengths: torch.Tensor
    req_to_token: torch.Tensor

    @property
    def lists(self) -> int:
        """B * L * G, number of their lists."""
        return len(self.rows) * self.storage.shape[0] * self.storage.shape[3]

    def on_host(self) -> list[Cached]:
        """Where the entries of each lie; the host waits for the device."""
        numbers = zip(self.rows.tolist(), self.lengths.tolist(), strict=True)
        return [Cached.of(self, row, length) for row, length in numbers]

    def check(self, dtypes: Sequence[torch.dtype] = (torch.int64,)) -> None:
        """Refuse wrong shapes and dtypes; read no tensor.

        Args:
            dtypes: those that `rows` and `lengths` may have.
        """
        storage, tables = self.storage, self.tables
        if storage.dim() != 5 or storage.shape[1] != 2 or not storage.is_contiguous():
            raise ValueError(
                f"storage: expected contiguous [L, 2, padded, G, D], got {list(storage.shape)}"
            )
        shape = [tables.tail_start.shape[0], storage.shape[0], storage.shape[3]]
        for name, tensor in (("counts", tables.counts), ("first_page", tables.first_page)):
            if list(tensor.shape) != shape:
                raise ValueError(f"tables.{name}: expected {shape}, got {list(tensor.shape)}")
        check_axes("req_to_token", self.req_to_token, torch.int32, "[rows, context]")
        number = len(self.rows)
        for name, tensor in (("rows", self.rows), ("lengths", self.lengths)):
            fits = tensor.dim() == 1 and len(tensor) == number and tensor.is_contiguous()
            if tensor.dtype not in dtypes or not fits:
                kinds = " or ".join(str(x).removeprefix("torch.") for x in dtypes)
                raise refused(name, tensor, f"contiguous {kinds} [{number}]")


@dataclass(frozen=True)
class Cached:
    """Where the cached entries of one request lie.

    Attributes:
        counts, first_page: int64 [L, G], the request's row of the tables.
        slots: int64 [>= S], its S private slots, then other requests'.
        tail: int64 [length - tail_start], ordinary slots of tokens since its pages were written.
        padded: slots of the pool, padding included.
    """

    counts: torch.Tensor
    first_page: torch.Tensor
    slots: torch.Tensor
    tail: torch.Tensor
    padded: int

    @classmethod
    def of(cls, requests: Requests, row: int, length: int) -> Cached:
        """Read the request's row of the tables, on the host."""
        tables = requests.tables
        tail = requests.req_to_token[row, int(tables.tail_start[row]) : length]
        slots = tables.slots[int(tables.slots_start[row]) :]
        return cls(
            tables.counts[row].long(),
            tables.first_page[row].long(),
            slots.long(),
            tail.long(),
            requests.storage.shape[2],
        )

    def private(self, layer: int, head: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        """Key entries of the pool for places in the private pages of a layer's lists."""
        layers, kv_heads = self.counts.shape
        page = self.first_page[layer, head] + place // kv_heads
        slot = self.slots[page // layers]
        return (page % layers * 2 * self.padded + slot) * kv_heads + place % kv_heads

    def entries(self, layer: int, head: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        """Key entries of the pool for places in a layer's lists, tail included."""
        private = self.counts[layer, head]
        paged = place < private
        entry = torch.empty_like(place)
        entry[paged] = self.private(layer, head[paged], place[paged])
        slot = self.tail[(place - private)[~paged]]
        row_of_slot = layer * 2 * self.padded + slot
        entry[~paged] = row_of_slot * self.counts.shape[1] + head[~paged]
        return entry

    def check_holds(self, layer: int, held: torch.Tensor) -> None:
        """Refuse candidates whose number per KV head, held [G], is not the length of the list."""
        cached = self.counts[layer] + len(self.tail)
        if not torch.equal(held, cached):
            raise ValueError(
                f"holds: expected {cached.tolist()} True per KV head at layer {layer}, "
                f"got {held.tolist()}"
            )

    def check_room(self, counts: torch.Tensor) -> None:
        """Refuse lists that need pages of others; counts [L, G]: entries that each keeps."""
        layers, kv_heads = counts.shape
        begin = self.first_page.flatten()
        end = begin + ((counts + kv_heads - 1) // kv_heads).flatten()
        order = begin.argsort(stable=True)
        pages_end = torch.full_like(begin[:1], len(self.slots) * layers)
        limit = torch.cat([begin[order[1:]], pages_end])  # where the next list begins
        overflows = (end[order] > limit).nonzero()
        if len(overflows):
            index = int(overflows[0])
            list_ = int(order[index])
            room = int(limit[index] - begin[list_]) * kv_heads
            raise ValueError(
                f"kept: expected at most {room} entries at layer "
                f"{list_ // kv_heads}, KV head {list_ % kv_heads}, for which there are pages, "
                f"got {int(counts.flatten()[list_])}"
            )
