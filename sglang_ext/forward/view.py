"""A forward batch that holds only some rows of the one that SGLang made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from kvpolicy.sglang_ext.face import compat
from kvpolicy.sglang_ext.face.host import to_device
from kvpolicy.sglang_ext.request.propagation import LayerRows


@dataclass(frozen=True)
class ViewedRequest:
    """One request in a view.

    Attributes:
        row: row of SGLang's table of slots; its first `length` elements are its tokens' slots.
        length: number of these tokens, those without rows in the view included.
        rows: number of its rows in the view: those of its last tokens.
        index: of the request in SGLang's batch.
    """

    row: int
    length: int
    rows: int
    index: int


def make(
    runner: Any,
    batch: Any,
    extents: Sequence[ViewedRequest],
    ids: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
) -> Any:
    """A view of a batch: the given requests with the given rows.

    Args:
        runner: SGLang's model runner.
        batch: the forward batch that SGLang made.
        extents: the requests, in order of their rows.
        ids, positions, slots: [rows] of all requests' rows; entries are written to `slots`.
    """
    lengths = [extent.length for extent in extents]
    counts = [extent.rows for extent in extents]
    prefixes = [extent.length - extent.rows for extent in extents]
    starts = [sum(counts[:i]) for i in range(len(counts))]
    table_rows = [extent.row for extent in extents]
    numbers = to_device(
        [table_rows, lengths, counts, prefixes, starts], torch.int64, positions.device
    )
    fields = {
        "batch_size": len(extents),
        "input_ids": ids,
        "positions": positions,
        "out_cache_loc": slots,
        "req_pool_indices": numbers[0].to(batch.req_pool_indices.dtype),
        "req_pool_indices_cpu": torch.tensor(table_rows, dtype=torch.int64),
        "seq_lens": numbers[1].to(batch.seq_lens.dtype),
        "seq_lens_cpu": torch.tensor(lengths, dtype=torch.int64),
        "seq_lens_sum": sum(lengths),
        "orig_seq_lens": numbers[1].to(torch.int32),
        "extend_num_tokens": sum(counts),
        "extend_seq_lens": numbers[2].to(torch.int32),
        "extend_seq_lens_cpu": counts,
        "extend_prefix_lens": numbers[3].to(torch.int32),
        "extend_prefix_lens_cpu": prefixes,
        "extend_start_loc": numbers[4].to(torch.int32),
        "global_num_token_non_padded_cpu": sum(counts),
        "rids": [batch.rids[extent.index] for extent in extents],
        "lora_ids": [batch.lora_ids[extent.index] for extent in extents],
        "return_logprob": False,  # logits are taken from the whole batch
    }
    view = compat.view_of(batch, fields)
    compat.prepare(runner, view)
    return view


def rows_of(hidden: Any, batch: Any) -> tuple[LayerRows, Any]:
    """The rows that a layer returned for a batch, and how output and residual are added up.

    Args:
        hidden: what the layer returned.
        batch: SGLang's forward batch, or a view.
    """
    output, residual, update = compat.take_stream(hidden, batch)
    return LayerRows(
        output, residual, batch.input_ids, batch.positions, batch.out_cache_loc
    ), update
