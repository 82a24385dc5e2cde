"""Kernels of a policy, compiled before a request waits for them.

Dimensions: L layers, G KV heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from kvpolicy.dsl.execute.warm import fold
from kvpolicy.kernels.entries.tables import Tables

if TYPE_CHECKING:
    from kvpolicy.sglang_ext.forward.services import Services
    from kvpolicy.sglang_ext.request.request import Served


def warm(services: Services, served: Served) -> None:
    """Compiles all that a prefill and folds launch."""
    served.warm()
    if served.bound.folded.decode is not None and served.kernels.read_the_pool:
        fold(served.program, services.arena.storage.dtype, services.arena.storage.device)
        _move_nothing(services, served)


def _move_nothing(services: Services, served: Served) -> None:
    """What writes a fold, for a request that has no entries: nothing in the pool changes."""
    arena, kernels, storage = services.arena, served.kernels, services.arena.storage
    layers, heads, device = arena.layers, arena.kv_heads, storage.device
    number, table = torch.zeros(1, dtype=torch.int64, device=device), Tables.empty
    slots = torch.zeros(1, 1, dtype=torch.int32, device=device)
    where = (storage, table(1, layers, heads, 1, device), number, number, slots)
    # Not of one column: Triton compiles anew for a number that is 1.
    lists = torch.zeros(heads * layers, 2, dtype=torch.bool, device=device)
    kernels.entry_ids(*where, lists)
    # As many are said to proceed as there are layers where nobody waits for numbers, or one.
    together = lists[:layers, :1].reshape(1, layers)
    alone = together[:, :1]
    for proceed in (together, alone):
        kernels.settle(*where, lists, lists, proceed)
    own = lists[:heads]
    ends = number.expand(heads + 1).contiguous()
    k, v = kernels.gather(arena.entries, arena.values, ends, number, own)
    if served.bound.positions == "slots":
        for proceed in (alone, together):
            services.rotary.turn(kernels.turn, *where, lists, lists, proceed)
        k = services.rotary.move(k, torch.zeros_like(own, dtype=torch.int64), kernels.rotate)
    first = torch.zeros(heads, dtype=torch.int32, device=device)
    given = (k, v, own, number)
    kernels.place(arena.entries, *given, value_offset=arena.value_offset, first_page=first)
