"""After a fold in place: turn kept keys to their new places in the cache."""

from __future__ import annotations

import torch
from kvpolicy.kernels.entries.compact_in_place import Cached, check_proceed, check_requests
from kvpolicy.kernels.entries.rotate import rotate
from kvpolicy.kernels.entries.rounding import movable
from kvpolicy.kernels.entries.tables import Tables
from kvpolicy.kernels.launch.arguments import refused


def turn(
    storage: torch.Tensor,
    tables: Tables,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    req_to_token: torch.Tensor,
    kept: torch.Tensor,
    holds: torch.Tensor,
    proceed: torch.Tensor,
    inv_freq: torch.Tensor,
    *,
    interleaved: bool = False,
) -> None:
    """Rotate each key that `compact_in_place` kept forward by the number of later entries dropped.

    Args:
        storage, tables, rows, lengths, req_to_token, kept, holds, proceed: as of
            `compact_in_place`, which must have been called with the same. Keys in `storage` are
            rotated in place.
        inv_freq, interleaved: as of `rotate`.

    Raises:
        ValueError: names the argument, what was expected and what was given.
    """
    check(storage, tables, rows, lengths, req_to_token, kept, holds, proceed, inv_freq)
    layers, kv_heads, size = storage.shape[0], *storage.shape[3:]
    entries = storage.view(-1, size)
    lists = (len(rows), layers, kv_heads, kept.shape[1])
    held, stays = holds.view(lists), (kept & holds).view(lists)
    after = (held & ~stays).long().flip(-1).cumsum(-1).flip(-1)
    for number, row in enumerate(rows.tolist()):
        if not bool(proceed[number].all()):
            continue
        own = Cached.of(storage, tables, row, int(lengths[number]), req_to_token)
        for layer, part in enumerate(stays[number]):
            head, column = part.nonzero(as_tuple=True)
            place = own.private(layer, head, part.cumsum(1)[head, column] - 1)
            shift = after[number, layer, head, column]
            turned = rotate(entries[place], shift, inv_freq, interleaved=interleaved)
            movable(entries).index_copy_(0, place, movable(turned))


def check(
    storage: torch.Tensor,
    tables: Tables,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    req_to_token: torch.Tensor,
    kept: torch.Tensor,
    holds: torch.Tensor,
    proceed: torch.Tensor,
    inv_freq: torch.Tensor,
) -> None:
    """Refuse wrong shapes and dtypes; read no tensor."""
    check_requests(storage, tables, rows, lengths, req_to_token)
    lists = len(rows) * storage.shape[0] * storage.shape[3]
    for name, x in (("kept", kept), ("holds", holds)):
        if x.dtype != torch.bool or x.dim() != 2 or len(x) != lists or x.shape != kept.shape:
            raise refused(name, x, f"bool [{lists}, M]")
    check_proceed(proceed, len(rows))
    if inv_freq.dim() != 1 or 2 * len(inv_freq) > storage.shape[4]:
        raise ValueError(
            f"inv_freq: expected [<= {storage.shape[4] // 2}], got {list(inv_freq.shape)}"
        )
