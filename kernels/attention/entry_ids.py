"""Where the entries of decoding requests lie in the pool, all layers at once."""

from __future__ import annotations

import torch
from kvpolicy.kernels.entries.requests import Requests
from kvpolicy.kernels.launch.arguments import refused


def entry_ids(requests: Requests, holds: torch.Tensor) -> torch.Tensor:
    """Key entries of B requests, as rows of their storage seen as [E, D]; nothing is written.

    Args:
        holds: bool [B * L * G, M]; the j-th True in a row is the list's j-th entry, first those in
            private pages, then the tail. As many are True as the list has entries.

    Returns:
        int64 [B * L * G, M]; 0 where `holds` is False.

    Raises:
        ValueError: names the argument, what was expected and what was given.
    """
    check(requests, holds)
    layers, kv_heads = requests.storage.shape[0], requests.storage.shape[3]
    result = torch.zeros(holds.shape, dtype=torch.int64, device=holds.device)
    lists = holds.view(len(requests.rows), layers, kv_heads, holds.shape[1])
    for number, request in enumerate(requests.on_host()):
        for layer, held in enumerate(lists[number]):
            request.check_holds(layer, held.sum(dim=1))
            head, column = held.nonzero(as_tuple=True)
            entries = request.entries(layer, head, held.cumsum(dim=1)[head, column] - 1)
            result.view(lists.shape)[number, layer, head, column] = entries
    return result


def check(requests: Requests, holds: torch.Tensor) -> None:
    """Refuse wrong shapes and dtypes; read no tensor."""
    requests.check()
    if holds.dtype != torch.bool or holds.dim() != 2 or len(holds) != requests.lists:
        raise refused("holds", holds, f"bool [{requests.lists}, M]")
