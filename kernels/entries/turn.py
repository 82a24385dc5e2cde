"""After a fold in place: turn kept keys to their new places in the cache."""

from __future__ import annotations

import torch
from kvpolicy.kernels.entries.compact_in_place import check_proceed
from kvpolicy.kernels.entries.requests import Requests
from kvpolicy.kernels.entries.rotate import rotate
from kvpolicy.kernels.entries.rounding import movable
from kvpolicy.kernels.launch.arguments import refused


def turn(
    requests: Requests,
    kept: torch.Tensor,
    holds: torch.Tensor,
    proceed: torch.Tensor,
    inv_freq: torch.Tensor,
    *,
    interleaved: bool = False,
) -> None:
    """Rotate each key that `compact_in_place` kept forward by the number of later entries dropped.

    Args:
        requests, kept, holds, proceed: as of `compact_in_place`, which must have been called with
            the same. Keys in their storage are rotated in place.
        inv_freq, interleaved: as of `rotate`.

    Raises:
        ValueError: names the argument, what was expected and what was given.
    """
    check(requests, kept, holds, proceed, inv_freq)
    layers, _, _, kv_heads, size = requests.storage.shape
    entries = requests.storage.view(-1, size)
    lists = (len(requests.rows), layers, kv_heads, kept.shape[1])
    held, stays = holds.view(lists), (kept & holds).view(lists)
    later_drops = (held & ~stays).long().flip(-1).cumsum(-1).flip(-1)
    for number, request in enumerate(requests.on_host()):
        if not bool(proceed[number].all()):
            continue
        for layer, layer_stays in enumerate(stays[number]):
            head, column = layer_stays.nonzero(as_tuple=True)
            place = request.private(layer, head, layer_stays.cumsum(1)[head, column] - 1)
            shift = later_drops[number, layer, head, column]
            turned_keys = rotate(entries[place], shift, inv_freq, interleaved=interleaved)
            movable(entries).index_copy_(0, place, movable(turned_keys))


def check(
    requests: Requests,
    kept: torch.Tensor,
    holds: torch.Tensor,
    proceed: torch.Tensor,
    inv_freq: torch.Tensor,
) -> None:
    """Refuse wrong shapes and dtypes; read no tensor."""
    requests.check()
    lists, max_pairs = requests.lists, requests.storage.shape[4] // 2
    for name, x in (("kept", kept), ("holds", holds)):
        if x.dtype != torch.bool or x.dim() != 2 or len(x) != lists or x.shape != kept.shape:
            raise refused(name, x, f"bool [{lists}, M]")
    check_proceed(proceed, len(requests.rows))
    if inv_freq.dim() != 1 or len(inv_freq) > max_pairs:
        raise ValueError(f"inv_freq: expected [<= {max_pairs}], got {list(inv_freq.shape)}")
