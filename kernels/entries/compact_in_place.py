"""Fold in place: move what a request keeps to the front of its own private pages.

The torch implementation is the reference: it defines the result for every other one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from kvpolicy.kernels.entries.rounding import movable
from kvpolicy.kernels.entries.tables import Tables
from kvpolicy.kernels.launch.arguments import check_axes, refused


def compact_in_place(
    storage: torch.Tensor,
    tables: Tables,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    req_to_token: torch.Tensor,
    kept: torch.Tensor,
    holds: torch.Tensor,
    proceed: torch.Tensor,
) -> torch.Tensor:
    """Move the kept entries of B requests, in all layers, to the front of their lists' pages.

    The list of (layer l, KV head g) of the request in a row is `tables.counts[row, l, g]` entries
    in private pages, then the tokens `tables.tail_start[row] .. length - 1` in ordinary slots (see
    `decode_attention` for where these lie). The kept ones, tail tokens included, become the first
    entries of its private pages, in their order; ordinary slots are only read. What a request
    without private entries (counts 0, tail_start 0) keeps is all copied from ordinary slots.

    Args:
        storage: [L, 2, padded slots, G, D] any dtype, contiguous; written in place.
        tables: of R rows; not changed. Each list needs pages for what it keeps from its
            `first_page` on, shared with no other list.
        rows: int64 [B], row of each request in SGLang's request pool, without duplicates.
        lengths: int64 [B], tokens of each request, those dropped and the newest included.
        req_to_token: int32 [>= R, context], the ordinary slot of each token.
        kept, holds: bool [B * L * G, M], candidates that stay and that are cached: the j-th True
            in a row of `holds` is the list's j-th entry. `kept` counts only where `holds` is True.
        proceed: bool [B, P]; a request proceeds if all are True, else nothing of it is written.

    Returns:
        int32 [B, L, G], entries in the private pages of each list afterwards: those kept, or
        `tables.counts[row]` for a request that does not proceed.

    Raises:
        ValueError: names the argument, what was expected and what was given; nothing is written.
    """
    check(storage, tables, rows, lengths, req_to_token, kept, holds, proceed)
    made = tables.counts[rows].to(torch.int32)
    shape = (len(rows), *tables.counts.shape[1:], kept.shape[1])
    cached, stay = holds.view(shape), (kept & holds).view(shape)
    moves = []
    requests = zip(rows.tolist(), lengths.tolist(), proceed.all(1).tolist(), strict=True)
    for number, (row, length, proceeds) in enumerate(requests):
        if not proceeds:
            continue
        own = Cached.of(storage, tables, row, length, req_to_token)
        for layer, held in enumerate(cached[number]):
            own.check_holds(layer, held.sum(dim=1))
        counts = stay[number].sum(dim=2)
        own.check_room(counts)
        made[number] = counts
        each = zip(cached[number], stay[number], strict=True)
        moves += [(own, layer, held, stays) for layer, (held, stays) in enumerate(each)]
    for own, layer, held, stays in moves:
        _move(storage, own, layer, held, stays)
    return made


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
    def of(
        cls,
        storage: torch.Tensor,
        tables: Tables,
        row: int,
        length: int,
        req_to_token: torch.Tensor,
    ) -> Cached:
        """Read the request's row of the tables, on the host."""
        tail = req_to_token[row, int(tables.tail_start[row]) : length]
        slots = tables.slots[int(tables.slots_start[row]) :]
        return cls(
            tables.counts[row].long(),
            tables.first_page[row].long(),
            slots.long(),
            tail.long(),
            storage.shape[2],
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
        last = torch.full_like(begin[:1], len(self.slots) * layers)
        free = torch.cat([begin[order[1:]], last])  # where the next list begins
        wrong = (end[order] > free).nonzero()
        if len(wrong):
            at = int(wrong[0])
            which = int(order[at])
            room = int(free[at] - begin[which]) * kv_heads
            raise ValueError(
                f"kept: expected at most {room} entries at layer "
                f"{which // kv_heads}, KV head {which % kv_heads}, for which there are pages, "
                f"got {int(counts.flatten()[which])}"
            )


def _move(
    storage: torch.Tensor, own: Cached, layer: int, held: torch.Tensor, stays: torch.Tensor
) -> None:
    """Move a layer's keys, then its values; all are read before any is written."""
    size, offset = storage.shape[4], storage.shape[2] * storage.shape[3]
    head, column = stays.nonzero(as_tuple=True)
    source = own.entries(layer, head, held.cumsum(dim=1)[head, column] - 1)
    target = own.private(layer, head, stays.cumsum(dim=1)[head, column] - 1)
    moves = source != target
    source, target = source[moves], target[moves]
    entries = movable(storage).view(-1, size)
    for tensor in (0, offset):
        entries.index_copy_(0, target + tensor, entries.index_select(0, source + tensor))


def check(
    storage: torch.Tensor,
    tables: Tables,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    req_to_token: torch.Tensor,
    kept: torch.Tensor,
    holds: torch.Tensor,
    proceed: torch.Tensor,
) -> None:
    """Refuse wrong shapes and dtypes; read no tensor."""
    check_requests(storage, tables, rows, lengths, req_to_token)
    lists = len(rows) * storage.shape[0] * storage.shape[3]
    for name, mask in (("kept", kept), ("holds", holds)):
        if mask.dtype != torch.bool or mask.dim() != 2 or mask.shape != (lists, kept.shape[1]):
            width = kept.shape[1] if kept.dim() == 2 else "M"
            raise refused(name, mask, f"bool [{lists}, {width}]")
    check_proceed(proceed, len(rows))


def check_proceed(proceed: torch.Tensor, number: int) -> None:
    """Refuse a `proceed` of another shape or dtype than bool [number, P]."""
    if proceed.dtype != torch.bool or proceed.dim() != 2 or len(proceed) != number:
        raise refused("proceed", proceed, f"bool [{number}, P]")


def check_requests(
    storage: torch.Tensor,
    tables: Tables,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    req_to_token: torch.Tensor,
) -> None:
    """Refuse wrong shapes and dtypes of what locates requests' entries; read no tensor."""
    if storage.dim() != 5 or storage.shape[1] != 2 or not storage.is_contiguous():
        raise ValueError(
            f"storage: expected contiguous [L, 2, padded, G, D], got {list(storage.shape)}"
        )
    listed = [tables.tail_start.shape[0], storage.shape[0], storage.shape[3]]
    for name, tensor in (("counts", tables.counts), ("first_page", tables.first_page)):
        if list(tensor.shape) != listed:
            raise ValueError(f"tables.{name}: expected {listed}, got {list(tensor.shape)}")
    check_axes("req_to_token", req_to_token, torch.int32, "[rows, context]")
    for name, tensor in (("rows", rows), ("lengths", lengths)):
        if tensor.dtype != torch.int64 or tensor.dim() != 1 or len(tensor) != len(rows):
            raise refused(name, tensor, f"int64 [{len(rows)}]")
