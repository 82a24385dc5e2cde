"""A forward batch that holds only some rows of the one that SGLang made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from kvpolicy.sglang_ext import compat
from kvpolicy.sglang_ext.propagation import Rows


@dataclass(frozen=True)
class Extent:
    """One request in a view.

    Attributes:
        row: of SGLang's table of slots, whose first `length` elements are its tokens' slots.
        length: tokens there, those without rows included.
        rows: of its last tokens.
        index: of the request in SGLang's batch.
    """

    row: int
    length: int
    rows: int
    index: int


def make(runner: Any, batch: Any, extents: Sequence[Extent], rows: Rows) -> Any:
    """A view of a batch: the given requests with the given rows.

    Args:
        runner: SGLang's model runner.
        batch: the forward batch that SGLang made.
        extents: the requests, in order of their rows.
        rows: of all of them; their entries are written to `rows.slots`.
    """
    device = rows.positions.device

    def tensor(values: list[int], dtype: torch.dtype, where: Any = device) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=where)

    lengths = [e.length for e in extents]
    counts = [e.rows for e in extents]
    prefixes = [e.length - e.rows for e in extents]
    starts = [sum(counts[:i]) for i in range(len(counts))]
    fields = {
        "batch_size": len(extents),
        "input_ids": rows.ids,
        "positions": rows.positions,
        "out_cache_loc": rows.slots,
        "req_pool_indices": tensor([e.row for e in extents], batch.req_pool_indices.dtype),
        "req_pool_indices_cpu": tensor([e.row for e in extents], torch.int64, "cpu"),
        "seq_lens": tensor(lengths, batch.seq_lens.dtype),
        "seq_lens_cpu": tensor(lengths, torch.int64, "cpu"),
        "seq_lens_sum": sum(lengths),
        "orig_seq_lens": tensor(lengths, torch.int32),
        "extend_num_tokens": sum(counts),
        "extend_seq_lens": tensor(counts, torch.int32),
        "extend_seq_lens_cpu": counts,
        "extend_prefix_lens": tensor(prefixes, torch.int32),
        "extend_prefix_lens_cpu": prefixes,
        "extend_start_loc": tensor(starts, torch.int32),
        "global_num_token_non_padded_cpu": sum(counts),
        "rids": [batch.rids[e.index] for e in extents],
        "lora_ids": [batch.lora_ids[e.index] for e in extents],
    }
    return compat.view_of(runner, batch, fields)


def take_rows(hidden: Any, batch: Any) -> tuple[Rows, Any]:
    """The rows that a layer returned for a batch, and how the next one adds them up.

    Args:
        hidden: what the layer returned.
        batch: SGLang's forward batch, or a view.
    """
    output, residual, update = compat.take_stream(hidden, batch)
    return Rows(output, residual, batch.input_ids, batch.positions, batch.out_cache_loc), update
