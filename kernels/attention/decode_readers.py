"""Decode attention by whichever reader was measured to be the fastest for such a batch.

Triton's kernel reads the tables on the device, so that a CUDA graph may hold it. FlashInfer and
FlashAttention 3 plan on the host and need the lists written out: they serve only batches that run
without a graph, and only where the file of measured choices (see `tuned`) says so for the GPU. What
was measured there includes writing out the lists and planning, for every layer.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from kvpolicy.kernels.attention import paged_attention_fa3, paged_attention_flashinfer
from kvpolicy.kernels.attention.decode_attention import check
from kvpolicy.kernels.attention.decode_attention_triton import Workspace
from kvpolicy.kernels.attention.decode_attention_triton import decode_attention as by_triton
from kvpolicy.kernels.attention.entry_table_triton import entry_table
from kvpolicy.kernels.attention.paged_attention_packages import Attend
from kvpolicy.kernels.entries.tables import Tables
from kvpolicy.kernels.launch import tuned

logger = logging.getLogger(__name__)

TRITON = "triton"
OTHERS = {"flashinfer": paged_attention_flashinfer, "fa3": paged_attention_fa3}


def decode_attention(
    q: torch.Tensor,
    storage: torch.Tensor,
    tables: Tables,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    req_to_token: torch.Tensor,
    *,
    layer: int,
    scale: float,
    workspace: Workspace | None = None,
    entries: int | None = None,
) -> torch.Tensor:
    """As the reference.

    Args:
        workspace: as of Triton's `decode_attention`, for when that reads.
        entries: of all lists of the batch in this layer, as the host knows them; None: it does
            not, or a CUDA graph is to hold the call. Then Triton's kernel reads.

    Raises:
        ValueError: as the reference, or workspace is too small.
        TunedError: as `tuned.load`.
    """
    given = (q, storage, tables, rows, lengths, req_to_token)
    # Only Triton's kernel multiplies what it reads, as layers in pairs need, and widens 8 bits.
    alone = tables.paired.numel() or storage.dtype != q.dtype
    reader = TRITON if alone else reader_of(q, storage, entries)
    if reader == TRITON:
        return by_triton(*given, layer=layer, scale=scale, workspace=workspace)
    return by_lists(reader, *given, layer=layer, scale=scale)


def reader_of(q: torch.Tensor, storage: torch.Tensor, entries: int | None) -> str:
    """One of `tuned.READERS`; arguments as of `decode_attention`."""
    if entries is None or not q.numel() or (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        return TRITON
    requests, heads, size = q.shape
    groups = storage.shape[3]
    lists = requests * groups
    shape = (q.dtype, size, heads // groups, lists, -(-entries // lists))
    reader = tuned.choice("decode_reader", q.device, *shape).get("reader", TRITON)
    # The others number entries in int32.
    numbered = storage.numel() // size <= 2**31
    return reader if reader == TRITON or (numbered and is_there(reader)) else TRITON


def others_may_read(device: torch.device) -> bool:
    """Whether any batch may be read by another reader: else the host need not count entries.

    Raises:
        TunedError: as `tuned.load`.
    """
    choices = tuned.load(device).choices.get("decode_reader", ())
    return any(choice.get("reader", TRITON) != TRITON for _, choice in choices)


def by_lists(
    reader: str,
    q: torch.Tensor,
    storage: torch.Tensor,
    tables: Tables,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    req_to_token: torch.Tensor,
    *,
    layer: int,
    scale: float,
) -> torch.Tensor:
    """As the reference: the lists are written out, and a package reads them.

    The host waits for the longest list's length, and for what FlashInfer plans with.

    Args:
        reader: `flashinfer` or `fa3`.

    Raises:
        ValueError: as the reference, layers may be stored in pairs, or the reader cannot do it.
        ImportError: its package is not installed.
    """
    check(q, storage, tables, rows, lengths, req_to_token, layer)
    if not q.numel():
        return torch.zeros_like(q)
    row = rows.long()
    tail = (lengths - tables.tail_start[row]).clamp(min=0)
    longest = int((tables.counts[row, layer] + tail[:, None]).max())
    given = (q, storage, tables, rows, lengths, req_to_token)
    table, entries = entry_table(*given, layer=layer, longest=longest)
    groups, size = storage.shape[3:]
    shape = {"heads": q.shape[1] // groups, "size": size, "dtype": q.dtype, "scale": scale}
    attend = _plan(reader, table, entries, **shape)
    pool = storage.view(-1, size)
    return attend(q.unsqueeze(1), pool, pool[storage.shape[2] * groups :])[:, 0]


def _plan(reader: str, table: torch.Tensor, entries: torch.Tensor, **shape: Any) -> Attend:
    """The plan of a reader for lists that `entry_table` has written."""
    if reader == "fa3":
        return paged_attention_fa3.plan_table(table, entries, **shape)
    indptr = torch.nn.functional.pad(entries.cumsum(0), (1, 0))
    inside = torch.arange(table.shape[1], device=table.device) < entries[:, None]
    return paged_attention_flashinfer.plan(indptr, table[inside], **shape)


@functools.lru_cache
def is_there(reader: str) -> bool:
    """Whether a reader's package is installed; says once that it is not."""
    try:
        OTHERS[reader].package()
    except ImportError as error:
        logger.warning("Decode attention: measured to be fastest by %s, but %s.", reader, error)
        return False
    return True
