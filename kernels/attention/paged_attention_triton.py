"""`paged_attention` in Triton: split-KV over lists of entries, for one or many new tokens.

One program reads one split of one list for a block of its query rows: the tokens of the request
times the query heads of the group, GQA-packed. Grid and allocations depend on shapes only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from kvpolicy.kernels.attention.paged_attention import UNPAIRED, PairReading, check
from kvpolicy.kernels.attention.paged_attention_tiles_triton import (
    LOG2_E,
    SplitTile,
    Workspace,
    attend_tile,
    columns_of,
    launched,
    merged_at_once,
    outputs_of_splits,
    put_split,
    split_length_of,
    tile_and_cut,
    tile_of,
    used_splits,
)
from kvpolicy.kernels.launch.kernel import kernel
from kvpolicy.kernels.launch.occupancy import is_hopper

_ALL_REGISTERS = 255


def paged_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    *,
    scale: float,
    reading: PairReading = UNPAIRED,
    splits: int | None = None,
    workspace: Workspace | None = None,
    tile: SplitTile | None = None,
    programs: int | None = None,
) -> torch.Tensor:
    """As the reference; the host reads no tensor.

    Args:
        reading: with q in float16 `value_scale` is at most 65,504: it multiplies the weights.
        splits, workspace, tile, programs: as of `decode_attention`.

    Raises:
        ValueError: as the reference; keys or values are not contiguous; too many splits; workspace
            too small or of another dtype.
        TunedError: as `tuned.load`.
    """
    kv_heads = check(q, keys, values, indptr, indices, reading)
    for name, tensor in (("keys", keys), ("values", values)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor")
    requests, tokens, heads, size = q.shape
    result = torch.empty_like(q, memory_format=torch.contiguous_format)
    if q.numel() == 0:
        return result
    group = heads // kv_heads
    rows = query_rows(tokens * group, q.dtype, size)
    blocks = triton.cdiv(tokens * group, rows)
    call = ("paged_attention", q.device, keys.dtype, size, rows)
    lists = requests * kv_heads * blocks
    tile, parts = tile_and_cut(*call, lists, splits=splits, tile=tile, programs=programs)
    compiled = _paged[(requests * kv_heads, blocks, parts.splits)](
        q.contiguous(),
        keys,
        values,
        indptr,
        (indices, reading.value_indices),
        (reading.key_scale, reading.value_scale),
        outputs_of_splits(result, lists, parts.splits, workspace),
        scale * LOG2_E,
        requests * kv_heads,
        tokens,
        blocks,
        parts.target_splits,
        parts.splits,
        KV_HEADS=kv_heads,
        GROUP=group,
        SIZE=size,
        COLUMNS=columns_of(size),
        ROWS=rows,
        MERGED_AT_ONCE=merged_at_once(rows, size, tile.warps),
        BALANCE=parts.target_splits > 0,
        SPLIT=parts.splits > 1,
        N=tile.entries,
        STAGES=tile.stages,
        UPCAST=q.device.type == "cpu",  # the interpreter has no bf16
        num_warps=tile.warps,
        maxnreg=_registers(q, group, rows, tile, reading),
    )
    launched(*call, tile, compiled)
    return result


def query_rows(queries: int, dtype: torch.dtype, size: int) -> int:
    """Query rows of a program, for a list with `queries` of them.

    At least the 16 of a tensor core, at most as many as fit the registers.
    """
    max_rows = 32 if dtype == torch.float32 or size > 128 else 64
    return min(max(triton.next_power_of_2(queries), 16), max_rows)


def _registers(
    q: torch.Tensor, group: int, rows: int, tile: SplitTile, reading: PairReading
) -> int | None:
    """Most registers of a thread; None: as many as the compiler takes.

    Left to itself the compiler spills 4 to 16 bytes in some programs with heads of 128 columns. On
    Hopper, programs for groups of 32 query heads need no more registers than let two of them share
    a multiprocessor; others of 32 rows with `value_indices` need more. Elsewhere a program of 64
    rows takes the shared memory of a multiprocessor, so it may have all registers.
    """
    size = q.shape[-1]
    if columns_of(size) != 128 or tile != tile_of(size, q.dtype, rows) or q.dtype == torch.float32:
        return None
    if q.device.type != "cuda":
        return None
    if not is_hopper(q.device):
        return _ALL_REGISTERS if rows == 64 else None
    if rows != 32:
        return None
    if group == 32:
        return 128
    return None if reading.value_indices is None else _ALL_REGISTERS


@kernel(aligned=["q", "keys", "values"])
def _paged(
    q,
    keys,
    values,
    indptr,
    entries,
    scales,
    outputs,
    scale,
    lists,
    tokens,
    blocks,
    target_splits,
    splits,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    MERGED_AT_ONCE: tl.constexpr,
    BALANCE: tl.constexpr,
    SPLIT: tl.constexpr,
    N: tl.constexpr,
    STAGES: tl.constexpr,
    UPCAST: tl.constexpr,
):
    indices, value_indices = entries
    key_scale, value_scale = scales
    this_list = tl.program_id(0)
    block = tl.program_id(1)
    split = tl.program_id(2)
    begin = tl.load(indptr + this_list)
    length = (tl.load(indptr + this_list + 1) - begin).to(tl.int32)

    row = block * ROWS + tl.arange(0, ROWS)
    token = row // GROUP
    exists = token < tokens
    query_row = ((this_list // KV_HEADS).to(tl.int64) * tokens + token) * (KV_HEADS * GROUP)
    query_row += this_list % KV_HEADS * GROUP + row % GROUP
    # A query sees no later token of the request; the block's last one sees the most.
    sees = length - tokens + 1 + token
    last_token = tl.minimum((block * ROWS + ROWS - 1) // GROUP, tokens - 1)
    reach = tl.maximum(length - tokens + 1 + last_token, 0)

    all_entries = reach.to(tl.int64)
    if BALANCE:
        all_entries = (tl.load(indptr + lists) - tl.load(indptr)) * blocks
    split_length = split_length_of(reach, all_entries, target_splits, splits, N)
    start = split * split_length
    end = tl.minimum(start + split_length, reach)
    used_count = used_splits(reach, split_length)
    if split < used_count:
        column = tl.arange(0, COLUMNS)
        queries = tl.load(
            q + query_row[:, None] * SIZE + column[None, :],
            mask=exists[:, None] & (column < SIZE)[None, :],
            other=0.0,
        )
        if UPCAST:
            queries = queries.to(tl.float32)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        out = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first in tl.range(start, end, N, num_stages=STAGES):
            j = first + tl.arange(0, N)
            inside = j < end
            key_entry = tl.load(indices + begin + j, mask=inside, other=0)
            value_entry = key_entry
            if value_indices is not None:
                value_entry = tl.load(value_indices + begin + j, mask=inside, other=0)
            key_factor = 1.0
            value_factor = 1.0
            if key_scale is not None:
                key_factor = tl.load(key_scale + begin + j, mask=inside, other=0.0)
            if value_scale is not None:
                value_factor = tl.load(value_scale + begin + j, mask=inside, other=0.0)
            top, total, out = attend_tile(
                queries, (keys, values), (key_entry, value_entry, inside),
                inside[None, :] & (j[None, :] < sees[:, None]),
                (scale, key_factor, value_factor), (top, total, out),
                SIZE, COLUMNS, key_scale is not None, value_scale is not None, UPCAST,
            )  # fmt: skip
        lines = (query_row, exists)
        put_split(
            outputs, lines, lines, (this_list * blocks + block, split, splits, used_count),
            (top, total, out), SIZE, COLUMNS, SPLIT, MERGED_AT_ONCE,
        )  # fmt: skip
