"""`decode_attention` in Triton: split-KV over ragged lists, read straight from the device tables.

One program reads one split of the list of one (request, KV head) for all query heads of the group
(GQA-packed: one matrix product for them). It finds its entries and the length of its split in the
tables when it runs: grid and allocations depend on shapes only, so that a CUDA graph may hold it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from kvpolicy.kernels.attention.decode_attention import check
from kvpolicy.kernels.attention.paged_attention_tiles_triton import (
    LOG2_E,
    SplitTile,
    Workspace,
    attend_tile,
    columns_of,
    elements_of_call,
    launched,
    merged_at_once,
    outputs_of_splits,
    put_split,
    split_length_of,
    tile_and_cut,
    used_splits,
)
from kvpolicy.kernels.entries import layer_pairs
from kvpolicy.kernels.entries.requests import Requests
from kvpolicy.kernels.entries.rounding import FLOAT8
from kvpolicy.kernels.launch.kernel import kernel


def decode_attention(
    q: torch.Tensor,
    requests: Requests,
    *,
    layer: int,
    scale: float,
    splits: int | None = None,
    workspace: Workspace | None = None,
    tile: SplitTile | None = None,
    programs: int | None = None,
) -> torch.Tensor:
    """As the reference; the host reads no tensor.

    Args:
        splits: splits into which every list is cut; a request's result then depends on the request
            alone. None: as measured for the GPU (see `tuned`), else splits of one length for the
            whole batch, as many as the GPU runs at once, so that long lists do not end last;
            rounding then depends on the batch's total.
        workspace: of at least `workspace_elements`. Calls that may run at the same time need one
            each. None: allocated.
        tile: how a program reads. None: as measured, else `tile_of`.
        programs: programs that run at once on a multiprocessor, for splits of one length. None: as
            measured, else as compiled (`programs_at_once`).

    Raises:
        ValueError: as the reference; too many splits; workspace too small or of another dtype.
        TunedError: as `tuned.load`.
    """
    check(q, requests, layer)
    storage, tables, rows, lengths, req_to_token = requests
    batch, heads, size = q.shape
    layers, _, padded, kv_heads, _ = storage.shape
    result = torch.empty_like(q, memory_format=torch.contiguous_format)
    if batch == 0:
        return result
    group = heads // kv_heads
    block = query_rows(group)
    call = ("decode_attention", q.device, storage.dtype, size, block)
    lists = batch * kv_heads
    tile, parts = tile_and_cut(*call, lists, splits=splits, tile=tile, programs=programs)
    may_be_paired = tables.paired.numel() > 0
    lines = triton.next_power_of_2(group)
    # KV heads change fastest: those of one ordinary slot lie side by side. Splits change slowest:
    # those without entries, the last of each list, start when the others already run.
    compiled = _decode[(kv_heads, batch, parts.splits)](
        q.contiguous(),
        storage,
        (
            tables.counts, tables.first_page, tables.tail_start, tables.slots_start, tables.slots,
            tables.paired,
        ),
        storage.view(torch.float32) if may_be_paired else None,
        rows,
        lengths,
        req_to_token,
        outputs_of_splits(result, lists, parts.splits, workspace),
        layer,
        scale * LOG2_E,
        padded,
        req_to_token.stride(0),
        batch,
        parts.target_splits,
        parts.splits,
        LAYERS=layers,
        KV_HEADS=kv_heads,
        GROUP=group,
        SIZE=size,
        COLUMNS=columns_of(size),
        ROWS=block,
        LINES=lines,
        MERGED_AT_ONCE=merged_at_once(lines, size, tile.warps),
        REQUESTS=32,
        KV_HEADS_P=triton.next_power_of_2(kv_heads),
        FLOATS=layer_pairs.floats_of_row(size, storage.dtype) if may_be_paired else 1,
        BALANCE=parts.target_splits > 0,
        SPLIT=parts.splits > 1,
        N=tile.entries,
        STAGES=tile.stages,
        UPCAST=q.device.type == "cpu",  # the interpreter has no bf16
        num_warps=tile.warps,
    )  # fmt: skip
    launched(*call, tile, compiled)
    return result


def workspace_elements(
    requests: int,
    heads: int,
    kv_heads: int,
    size: int,
    device: torch.device,
    splits: int | None = None,
    programs: int | None = None,
) -> tuple[int, int]:
    """Elements (partial, arrived) of a `Workspace` for any batch of up to `requests` requests.

    Args:
        splits, programs: as given to `decode_attention`.

    Raises:
        TunedError: as `tuned.load`.
    """
    rows, elements = query_rows(heads // kv_heads), []
    for n in range(1, requests + 1):
        # The measured choice depends on the dtype, which is not known here.
        for dtype in (torch.float32, torch.float16, torch.bfloat16, *FLOAT8):
            shape = (device, dtype, size, rows, n * kv_heads)
            _, parts = tile_and_cut("decode_attention", *shape, splits=splits, programs=programs)
            elements.append(elements_of_call(n * heads, size, n * kv_heads, parts.splits))
    partial, arrived = zip(*elements, strict=True)
    return max(partial), max(arrived)


def query_rows(group: int) -> int:
    """Query rows of a program, padded, for the query heads of a KV head.

    Even one row is padded to 16: the program waits for memory either way, and with tensor cores 15
    empty rows cost fewer registers and less shared memory than a product without them.
    """
    return max(triton.next_power_of_2(group), 16)


@kernel(aligned=["q", "storage"])
def _decode(
    q,
    storage,
    tables,
    numbers,
    rows,
    lengths,
    req_to_token,
    outputs,
    layer,
    scale,
    padded,
    context,
    requests,
    target_splits,
    splits,
    LAYERS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    LINES: tl.constexpr,
    MERGED_AT_ONCE: tl.constexpr,
    REQUESTS: tl.constexpr,
    KV_HEADS_P: tl.constexpr,
    FLOATS: tl.constexpr,
    BALANCE: tl.constexpr,
    SPLIT: tl.constexpr,
    N: tl.constexpr,
    STAGES: tl.constexpr,
    UPCAST: tl.constexpr,
):
    counts, first_pages, tail_starts, slots_starts, slots, paired = tables
    PAIRS: tl.constexpr = numbers is not None
    kv_head = tl.program_id(0)
    request = tl.program_id(1)
    split = tl.program_id(2)
    row = tl.load(rows + request).to(tl.int64)
    this_list = (row * LAYERS + layer) * KV_HEADS + kv_head
    count = tl.load(counts + this_list)
    tail_start = tl.load(tail_starts + row)
    length = count + tl.maximum(tl.load(lengths + request).to(tl.int32) - tail_start, 0)

    entries = length.to(tl.int64)
    if BALANCE:
        entries = _all_entries(
            counts, tail_starts, rows, lengths, layer, requests, LAYERS, KV_HEADS, KV_HEADS_P,
            REQUESTS,
        )  # fmt: skip
    split_length = split_length_of(length, entries, target_splits, splits, N)
    start = split * split_length
    end = tl.minimum(start + split_length, length)
    used_count = used_splits(length, split_length)
    if split < used_count:
        head = tl.arange(0, ROWS)
        exists = head < GROUP
        list_of_batch = request * KV_HEADS + kv_head
        first_query = list_of_batch.to(tl.int64) * GROUP
        query_row = first_query + head
        column = tl.arange(0, COLUMNS)
        queries = tl.load(
            q + query_row[:, None] * SIZE + column[None, :],
            mask=exists[:, None] & (column < SIZE)[None, :],
            other=0.0,
        )
        if UPCAST:
            queries = queries.to(tl.float32)
        first_page = tl.load(first_pages + this_list)
        own_slots = slots + tl.load(slots_starts + row)
        tail_slots = req_to_token + row * context + tail_start
        slots_per_layer = padded.to(tl.int64) * 2  # slots of a layer's keys and values
        value_offset = padded.to(tl.int64) * KV_HEADS
        if PAIRS:
            pair = tl.load(paired + row * LAYERS + layer)
            coded = tl.where(pair > 0, count, 0)  # entries with codes
            code_rows = (coded + FLOATS - 1) // FLOATS
            first_code = (pair - 1) * code_rows
            first_row = 2 * code_rows
            coded = tl.minimum(coded, end)
            value_numbers = numbers + value_offset * FLOATS
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        out = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first in tl.range(start, end, N, num_stages=STAGES):
            j = first + tl.arange(0, N)
            inside = j < end
            key_place = j
            value_place = j
            key_factor = 1.0
            value_factor = 1.0
            if PAIRS:
                # Entries that are not paired have no rows of codes; their code is 1.
                has_code = j < coded
                code = entry_at(
                    first_code + j // FLOATS, 0, count, has_code, own_slots, tail_slots, first_page,
                    layer, kv_head, slots_per_layer, LAYERS, KV_HEADS,
                ) * FLOATS + j % FLOATS  # fmt: skip
                key_factor = tl.load(numbers + code, mask=has_code, other=1.0)
                value_factor = tl.load(value_numbers + code, mask=has_code, other=1.0)
                key_place = first_row + tl.where(key_factor < 0.0, (-key_factor).to(tl.int32), j)
                value_place = first_row + tl.where(
                    value_factor < 0.0, (-value_factor).to(tl.int32), j
                )
                key_factor = tl.where(key_factor < 0.0, 1.0, key_factor)
                value_factor = tl.where(value_factor < 0.0, 1.0, value_factor)
            key_entry = entry_at(
                key_place, j, count, inside, own_slots, tail_slots, first_page,
                layer, kv_head, slots_per_layer, LAYERS, KV_HEADS,
            )  # fmt: skip
            value_entry = key_entry
            if PAIRS:
                value_entry = entry_at(
                    value_place, j, count, inside, own_slots, tail_slots, first_page,
                    layer, kv_head, slots_per_layer, LAYERS, KV_HEADS,
                )  # fmt: skip
            top, total, out = attend_tile(
                queries, (storage, storage), (key_entry, value_entry + value_offset, inside),
                inside[None, :], (scale, key_factor, value_factor), (top, total, out),
                SIZE, COLUMNS, PAIRS, PAIRS, UPCAST,
            )  # fmt: skip
        line = tl.arange(0, LINES)
        put_split(
            outputs, (query_row, exists), (first_query + line, line < GROUP),
            (list_of_batch, split, splits, used_count), (top, total, out),
            SIZE, COLUMNS, SPLIT, MERGED_AT_ONCE,
        )  # fmt: skip


@triton.jit
def entry_at(
    at,
    j,
    count,
    inside,
    own_slots,
    tail_slots,
    first_page,
    layer,
    kv_head,
    slots_per_layer,
    LAYERS: tl.constexpr,
    KV_HEADS: tl.constexpr,
):
    """int64 key entries: place `at` of the list's pages where j < count, else tail j - count."""
    paged = j < count
    page = first_page + at // KV_HEADS
    # One load finds the slot, private or ordinary.
    slot = tl.load(
        tl.where(paged, own_slots + page // LAYERS, tail_slots + (j - count)), mask=inside, other=0
    )
    row_layer = tl.where(paged, page % LAYERS, layer)
    place = tl.where(paged, at % KV_HEADS, kv_head)
    # int64: a pool may have more than 2^31 entries.
    return row_layer * (slots_per_layer * KV_HEADS) + slot.to(tl.int64) * KV_HEADS + place


@triton.jit
def _all_entries(
    counts,
    tail_starts,
    rows,
    lengths,
    layer,
    requests,
    LAYERS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KV_HEADS_P: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    """Number of entries that the batch reads in this layer, added up by every program for itself.

    This small read before the loop costs less than a launch. REQUESTS: requests read at a time.
    """
    kv_head = tl.arange(0, KV_HEADS_P)
    total = tl.full((), 0, tl.int64)
    for first in range(0, requests, REQUESTS):
        request = first + tl.arange(0, REQUESTS)
        exists = request < requests
        row = tl.load(rows + request, mask=exists, other=0).to(tl.int64)
        tail = tl.load(lengths + request, mask=exists, other=0).to(tl.int32)
        tail = tl.maximum(tail - tl.load(tail_starts + row, mask=exists, other=0), 0)
        list_ = ((row * LAYERS + layer) * KV_HEADS)[:, None] + kv_head[None, :]
        mask = exists[:, None] & (kv_head < KV_HEADS)[None, :]
        private = tl.load(counts + list_, mask=mask, other=0).to(tl.int64)
        total += tl.sum(tl.sum(private, axis=1) + tail.to(tl.int64) * KV_HEADS, axis=0)
    return total
