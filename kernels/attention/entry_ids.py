"""Where the entries of decoding requests lie in the pool, all layers at once."""

from __future__ import annotations

import torch
from kvpolicy.kernels.entries.compact_in_place import Cached, check_requests
from kvpolicy.kernels.entries.tables import Tables
from kvpolicy.kernels.launch.arguments import refused


def entry_ids(
    storage: torch.Tensor,
    tables: Tables,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    req_to_token: torch.Tensor,
    holds: torch.Tensor,
) -> torch.Tensor:
    """Key entries of B requests, as rows of the pool `storage` seen as [E, D].

    Args:
        storage, tables, rows, lengths, req_to_token: as of `compact_in_place`; nothing is written.
        holds: bool [B * L * G, M]; the j-th True in a row is the list's j-th entry, first those in
            private pages, then the tail. As many are True as the list has entries.

    Returns:
        int64 [B * L * G, M]; 0 where `holds` is False.

    Raises:
        ValueError: names the argument, what was expected and what was given.
    """
    check(storage, tables, rows, lengths, req_to_token, holds)
    layers, kv_heads = storage.shape[0], storage.shape[3]
    made = torch.zeros(holds.shape, dtype=torch.int64, device=holds.device)
    lists = holds.view(len(rows), layers, kv_heads, holds.shape[1])
    for number, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        own = Cached.of(storage, tables, row, length, req_to_token)
        for layer, held in enumerate(lists[number]):
            own.check_holds(layer, held.sum(dim=1))
            head, column = held.nonzero(as_tuple=True)
            entries = own.entries(layer, head, held.cumsum(dim=1)[head, column] - 1)
            made.view(lists.shape)[number, layer, head, column] = entries
    return made


def check(
    storage: torch.Tensor,
    tables: Tables,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    req_to_token: torch.Tensor,
    holds: torch.Tensor,
) -> None:
    """Refuse wrong shapes and dtypes; read no tensor."""
    check_requests(storage, tables, rows, lengths, req_to_token)
    lists = len(rows) * storage.shape[0] * storage.shape[3]
    if holds.dtype != torch.bool or holds.dim() != 2 or len(holds) != lists:
        raise refused("holds", holds, f"bool [{lists}, M]")
