"""Where the entries of compressed requests lie, as the lists that paged attention reads."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from kvpolicy.kernels.attention.paged_attention import Apart
from kvpolicy.sglang_ext.face.host import to_device
from kvpolicy.sglang_ext.memory.arena import Arena
from kvpolicy.sglang_ext.memory.private import Private
from kvpolicy.sglang_ext.memory.shared import separate

# indptr, indices and what is known of them besides, of one layer.
_OfLayer = tuple[torch.Tensor, torch.Tensor, Apart]


class Lists:
    """Entry lists of B compressed requests for one forward, built layer by layer.

    A list is the entries of one (request, KV head): its private pages, then its tail, the tokens
    since these were written, in ordinary slots. What does not depend on the layer is computed
    once; ids are made per layer because all of them together would be a table of 1 to 3 % of the
    entries' own memory.
    """

    def __init__(
        self,
        arena: Arena,
        requests: Sequence[Private],
        lengths: Sequence[int],
        req_to_token: torch.Tensor,
    ) -> None:
        """
        Args:
            requests: B compressed requests.
            lengths: tokens of each, prompt included, after this forward.
            req_to_token: [rows, context] SGLang's table of ordinary slots.
        """
        self._arena = arena
        self._latest: tuple[int, _OfLayer] | None = None
        device, lengths = req_to_token.device, list(lengths)
        self._requests = list(requests)
        pages = [arena.pages(r.slots) for r in requests]
        before = itertools.accumulate((p.numel() for p in pages), initial=0)
        self._pages = torch.cat(pages)
        layouts = [r.layout for r in requests]
        self._counts = torch.stack([x.counts for x in layouts]).to(torch.int64)  # [B, L, G]
        first = [x.first_page.to(torch.int64) + n for x, n in zip(layouts, before, strict=False)]
        self._first = torch.stack(first)
        rows = zip(requests, lengths, strict=True)
        tails = [req_to_token[r.row, r.tail_start : n] for r, n in rows]
        self._tail = torch.cat(tails).to(torch.int64)
        self._tails = [t.numel() for t in tails]
        self._tail_length = to_device(self._tails, torch.int64, device)
        self._tail_first = self._tail_length.cumsum(0) - self._tail_length
        self._shared = {i: r.shared for i, r in enumerate(requests) if r.shared is not None}

    def layer(self, layer: int) -> _OfLayer:
        """Entry lists of one layer.

        Returns:
            indptr [B * G + 1] int64, indices [nnz] int64 and what `paged_attention` takes besides.
        """
        if self._latest is None or self._latest[0] != layer:
            self._latest = layer, self._lists(layer)
        return self._latest[1]

    def of(self, request: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of one request alone: indptr [G + 1], indices [nnz] int64."""
        indptr, indices, _ = self.layer(layer)
        groups = self._arena.kv_heads
        sizes = self._sizes(layer)
        start = sum(sizes[: request * groups])
        end = start + sum(sizes[request * groups : (request + 1) * groups])
        own = indptr[request * groups : (request + 1) * groups + 1]
        return own - start, indices[start:end]

    def _sizes(self, layer: int) -> list[int]:
        """[B * G] lengths of the lists, without asking the device."""
        requests = zip(self._requests, self._tails, strict=True)
        return [count + tail for r, tail in requests for count in r.entries(layer)]

    def _lists(self, layer: int) -> _OfLayer:
        """Made anew: keys and values together, then apart where layers are stored in pairs."""
        indptr, indices = self._together(layer)

        def entry_at(request: int, place: torch.Tensor) -> torch.Tensor:
            page = self._arena.kv_heads
            first = self._first[request, layer, :, None]
            return self._pages[first + place // page] * page + place % page

        # On the host, which alone is asked where lists begin.
        starts = torch.tensor([0, *itertools.accumulate(self._sizes(layer))])
        apart = separate(self._shared, layer, self._arena, starts, indices, entry_at)
        return indptr, *apart

    def _together(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        arena = self._arena
        page = groups = arena.kv_heads
        count = self._counts[:, layer].flatten()  # [B * G]
        length = count + self._tail_length.repeat_interleave(groups)
        indptr = torch.zeros(length.numel() + 1, dtype=torch.int64, device=length.device)
        torch.cumsum(length, 0, out=indptr[1:])
        owner = torch.repeat_interleave(length, output_size=sum(self._sizes(layer)))
        place = torch.arange(owner.numel(), device=owner.device) - indptr[owner]

        count = count[owner]
        compressed = place < count
        paged = self._first[:, layer].flatten()[owner] + place // page
        # An empty list of pages (nothing kept) still needs an index that exists.
        paged = paged.masked_fill(~compressed, 0).clamp(max=max(self._pages.numel() - 1, 0))
        paged = self._pages[paged] * page + place % page if self._pages.numel() else place
        tail = self._tail_first[owner // groups] + place - count
        tail = self._tail[tail.masked_fill(compressed, 0)] * groups + owner % groups
        return indptr, torch.where(compressed, paged, tail + arena.key_base(layer))
