"""Where the entries of compressed requests lie, as the lists that paged attention reads."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
from kvpolicy.kernels.attention.paged_attention import UNPAIRED, PairReading
from kvpolicy.sglang_ext.face.host import to_device
from kvpolicy.sglang_ext.memory.arena import Arena
from kvpolicy.sglang_ext.memory.private import Listed, Private

# indptr, indices and `reading` of `paged_attention`, of one layer.
_OfLayer = tuple[torch.Tensor, torch.Tensor, PairReading]


class Lists:
    """Entry lists of B compressed requests for one forward, built layer by layer.

    A list is the entries of one (request, KV head): its private pages, then its tail, the tokens
    since these were written, in ordinary slots.
    """

    def __init__(
        self,
        arena: Arena,
        requests: Sequence[Private],
        lengths: Sequence[int],
        req_to_token: torch.Tensor,
        *,
        remember: bool = False,
    ) -> None:
        """
        Args:
            requests: B compressed requests.
            lengths: [B] tokens of each, prompt included, after this forward.
            req_to_token: [rows, context] SGLang's table of ordinary slots.
            remember: whether lists of private pages are kept in `Layout.listed` for the next
                forward: 8 bytes per entry, 24 if layers are stored in pairs.
        """
        self._arena, self._requests, self._remember = arena, list(requests), remember
        self._latest: tuple[int, _OfLayer] | None = None
        self._indptr: dict[tuple[int, ...], torch.Tensor] = {}
        device, heads = req_to_token.device, arena.kv_heads
        rows = zip(self._requests, lengths, strict=True)
        tails = [req_to_token[r.row, r.tail_start : n] for r, n in rows]
        self._tails = [tail.numel() for tail in tails for _ in range(heads)]  # [B * G]
        head = torch.arange(heads, device=device)[:, None]
        entries = [(tail.to(torch.int64) * heads + head).flatten() for tail in tails]
        self._tail = torch.cat([torch.empty(0, dtype=torch.int64, device=device), *entries])

    def layer(self, layer: int) -> _OfLayer:
        """Entry lists of one layer.

        Returns:
            int64 indptr [B * G + 1], int64 indices [nnz] and `reading` of `paged_attention`.
        """
        if self._latest is None or self._latest[0] != layer:
            self._latest = layer, self._lists(layer)
        return self._latest[1]

    def of(self, request: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Lists of one request alone: int64 indptr [G + 1], int64 indices [nnz]."""
        indptr, indices, _ = self.layer(layer)
        groups = self._arena.kv_heads
        sizes = self._sizes(layer)
        start = sum(sizes[: request * groups])
        end = start + sum(sizes[request * groups : (request + 1) * groups])
        request_indptr = indptr[request * groups : (request + 1) * groups + 1]
        return request_indptr - start, indices[start:end]

    def _sizes(self, layer: int) -> tuple[int, ...]:
        """[B * G] lengths of the lists, known to the host."""
        counts = itertools.chain.from_iterable(r.entries(layer) for r in self._requests)
        return tuple(count + tail for count, tail in zip(counts, self._tails, strict=True))

    def _starts(self, sizes: tuple[int, ...]) -> torch.Tensor:
        """int64 [B * G + 1] indptr of lists of these lengths; layers often have the same."""
        if sizes not in self._indptr:
            starts = list(itertools.accumulate(sizes, initial=0))
            self._indptr[sizes] = to_device(starts, torch.int64, self._tail.device)
        return self._indptr[sizes]

    def _lists(self, layer: int) -> _OfLayer:
        """Join private pages and tails; values apart only if a request has the layer in a pair."""
        lists = [self._listed(private, layer) for private in self._requests]
        tail = self._tail + self._arena.key_base(layer)

        def joined(parts: Iterable[Sequence[torch.Tensor]], tail: torch.Tensor) -> torch.Tensor:
            heads = itertools.chain.from_iterable(parts)
            pairs = zip(heads, tail.split(self._tails), strict=True)
            return torch.cat(list(itertools.chain.from_iterable(pairs)))

        indptr, keys = self._starts(self._sizes(layer)), joined((x.keys for x in lists), tail)
        if all(x.key_scale is None for x in lists):
            return indptr, keys, UNPAIRED
        ones = torch.ones(tail.shape, device=tail.device)
        key_scale = joined((x.key_scale or _ones(x.keys) for x in lists), ones)
        value_scale = joined((x.value_scale or _ones(x.values) for x in lists), ones)
        return (
            indptr,
            keys,
            PairReading(joined((x.values for x in lists), tail), key_scale, value_scale),
        )

    def _listed(self, private: Private, layer: int) -> Listed:
        """Entries that one request has in private pages at a layer."""
        by_layer = private.layout.listed
        if layer in by_layer:
            return by_layer[layer]
        listed = _list(self._arena, private, layer)
        if self._remember:
            by_layer[layer] = listed
        return listed


def _list(arena: Arena, private: Private, layer: int) -> Listed:
    page, layout, sizes = arena.kv_heads, private.layout, private.entries(layer)
    pages, first = arena.pages(private.slots), layout.first_page[layer].to(torch.int64)
    which = None if private.shared is None else private.shared.at(layer)
    if private.shared is not None and which is not None:

        def entry_at(place: torch.Tensor) -> torch.Tensor:
            return pages[first[:, None] + place // page] * page + place % page

        (keys, values), (key_scale, value_scale) = private.shared.listed(which, arena, entry_at)
        return Listed(keys.unbind(), values.unbind(), key_scale.unbind(), value_scale.unbind())
    counts = layout.counts[layer].to(torch.int64)
    head = torch.repeat_interleave(counts, output_size=sum(sizes))
    place = torch.arange(head.numel(), device=head.device) - (counts.cumsum(0) - counts)[head]
    entries = (pages[first[head] + place // page] * page + place % page).split(sizes)
    return Listed(entries, entries)


def _ones(like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.ones(tensor.shape, device=tensor.device) for tensor in like]
