"""Fold in place: move what a request keeps to the front of its own private pages.

The torch implementation is the reference: it defines the result for every other one.
"""

from __future__ import annotations

import torch
from kvpolicy.kernels.entries.requests import Cached, Requests
from kvpolicy.kernels.entries.rounding import movable
from kvpolicy.kernels.launch.arguments import refused


def compact_in_place(
    requests: Requests, kept: torch.Tensor, holds: torch.Tensor, proceed: torch.Tensor
) -> torch.Tensor:
    """Move the kept entries of B requests, in all layers, to the front of their lists' pages.

    The kept ones, tail tokens included, become the first entries of the list's private pages, in
    their order; ordinary slots are only read. What a request without private entries (counts 0,
    tail_start 0) keeps is all copied from ordinary slots.

    Args:
        requests: their storage is written in place, their tables are not. Each list needs pages for
            what it keeps from its `first_page` on, shared with no other list.
        kept, holds: bool [B * L * G, M], candidates that stay and that are cached: the j-th True
            in a row of `holds` is the list's j-th entry. `kept` counts only where `holds` is True.
        proceed: bool [B, P]; a request proceeds if all are True, else nothing of it is written.

    Returns:
        int32 [B, L, G], entries in the private pages of each list afterwards: those kept, or
        `tables.counts[row]` for a request that does not proceed.

    Raises:
        ValueError: names the argument, what was expected and what was given; nothing is written.
    """
    check(requests, kept, holds, proceed)
    counts_before = requests.tables.counts
    counts = counts_before[requests.rows].to(torch.int32)
    shape = (len(counts), *counts_before.shape[1:], kept.shape[1])
    cached, stay = holds.view(shape), (kept & holds).view(shape)
    moves = []
    requests_on_host = zip(requests.on_host(), proceed.all(1).tolist(), strict=True)
    for number, (request, proceeds) in enumerate(requests_on_host):
        if not proceeds:
            continue
        for layer, held in enumerate(cached[number]):
            request.check_holds(layer, held.sum(dim=1))
        request_counts = stay[number].sum(dim=2)
        request.check_room(request_counts)
        counts[number] = request_counts
        layer_masks = zip(cached[number], stay[number], strict=True)
        moves += [(request, layer, held, stays) for layer, (held, stays) in enumerate(layer_masks)]
    for request, layer, held, stays in moves:
        _move(requests.storage, request, layer, held, stays)
    return counts


def _move(
    storage: torch.Tensor, request: Cached, layer: int, held: torch.Tensor, stays: torch.Tensor
) -> None:
    """Move a layer's keys, then its values; all are read before any is written."""
    size, offset = storage.shape[4], storage.shape[2] * storage.shape[3]
    head, column = stays.nonzero(as_tuple=True)
    source = request.entries(layer, head, held.cumsum(dim=1)[head, column] - 1)
    target = request.private(layer, head, stays.cumsum(dim=1)[head, column] - 1)
    moves = source != target
    source, target = source[moves], target[moves]
    entries = movable(storage).view(-1, size)
    for tensor in (0, offset):
        entries.index_copy_(0, target + tensor, entries.index_select(0, source + tensor))


def check(
    requests: Requests, kept: torch.Tensor, holds: torch.Tensor, proceed: torch.Tensor
) -> None:
    """Refuse wrong shapes and dtypes; read no tensor."""
    requests.check()
    for name, mask in (("kept", kept), ("holds", holds)):
        width = kept.shape[1] if kept.dim() == 2 else "M"
        if mask.dtype != torch.bool or list(mask.shape) != [requests.lists, width]:
            raise refused(name, mask, f"bool [{requests.lists}, {width}]")
    check_proceed(proceed, len(requests.rows))


def check_proceed(proceed: torch.Tensor, number: int) -> None:
    """Refuse a `proceed` of another shape or dtype than bool [number, P]."""
    if proceed.dtype != torch.bool or proceed.dim() != 2 or len(proceed) != number:
        raise refused("proceed", proceed, f"bool [{number}, P]")
