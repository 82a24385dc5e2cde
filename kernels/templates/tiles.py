"""Tiles of queries and of entries, as all frames load them.

In a prefill token t is entry t of every KV head, and its index serves as its position. At decode
steps (`STEPS`) KV heads may hold different entries, as `holds` says, and `positions` says which
entries a query sees.

Dimensions: G KV heads, H query heads, n tokens or entries of a layer, W queries of a window, D head
size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from kvpolicy.kernels.entries.rounding_triton import widened

AFTER_ALL = tl.constexpr(2**31 - 1)  # position of an entry that is not held: no query sees it


class EntryTile(NamedTuple):
    """A block of one KV head's entries, as a policy's functions take it.

    Attributes:
        head: the KV head.
        tokens, queries: n and W.
        entry: int32 [BLOCK_N], their indices; `owned`: bool, which of them the head holds.
        at: int32 [BLOCK_N], their positions; in a prefill their indices.
        rank: int32 [BLOCK_N], the place of each among the entries that the head holds, from 1;
            `own`: how many it holds.
    """

    head: Any
    tokens: Any
    queries: Any
    entry: Any
    owned: Any
    at: Any
    rank: Any
    own: Any


class QueryTile(NamedTuple):
    """A tile of queries, as a policy's functions take it.

    Attributes:
        row: int32 [1, BLOCK_W, 1], index of each query in the window.
        at: int32, the same shape, their positions, in a prefill their indices; -1 past the window.
        lse: float32 [GROUP_P, BLOCK_W, 1], log-sum-exp of their rows; 0 if no function needs it.
    """

    row: Any
    at: Any
    lse: Any


@triton.jit
def entries_of(
    entry, head, tokens, queries, positions, holds, ranks, STEPS: tl.constexpr
):  # fmt: skip
    """Describe the entries of a KV head that have the given indices."""
    rank, count = entry + 1, tokens
    if STEPS:
        owned = (entry >= 0) & (entry < tokens)
        if holds is not None:
            owned = tl.load(holds + head * tokens + entry, mask=owned, other=0) != 0
        position = tl.load(positions + entry, mask=owned, other=AFTER_ALL).to(tl.int32)
        if ranks is not None:
            rank = tl.load(ranks + head * tokens + entry, mask=owned, other=0)
            count = tl.load(ranks + head * tokens + tokens - 1)
    else:
        owned = entry < tokens
        position = entry
    return EntryTile(head, tokens, queries, entry, owned, position, rank, count)


@triton.jit
def of_head(entries, head):
    """The same entries, as those of another KV head."""
    return EntryTile(
        head, entries.tokens, entries.queries, entries.entry, entries.owned, entries.at,
        entries.rank, entries.own,
    )  # fmt: skip


@triton.jit
def places_of(block, tokens, STEPS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Indices of a block's entries.

    At decode steps blocks count from the newest entry, so that the padding in front of a list that
    is shorter than others changes none of its sums.
    """
    if STEPS:
        entry = tokens - (block + 1) * BLOCK_N + tl.arange(0, BLOCK_N)
    else:
        entry = block * BLOCK_N + tl.arange(0, BLOCK_N)
    return entry


@triton.jit
def vectors(
    x, rows, entries, STEPS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_P: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Load keys or values [BLOCK_N, HEAD_DIM_P] of some entries.

    Args:
        x: pointer; strides from row to row and from head to head; scales of heads, or None, which
            only `scaled` applies; stride from layer to layer and KV heads of a layer, both ignored
            at decode steps.
        rows: row of each entry: [n] for all heads, at decode steps [G, n]; None: its index.
    """
    data, to_row, to_head, _, to_layer, heads = x
    dim = tl.arange(0, HEAD_DIM_P)
    place = entries.entry.to(tl.int64)
    if rows is not None:
        if STEPS:
            rows += entries.head * entries.tokens
        place = tl.load(rows + entries.entry, mask=entries.owned, other=0).to(tl.int64)
    if STEPS:
        place = place * to_row + entries.head.to(tl.int64) * to_head
    else:
        layer = (entries.head // heads).to(tl.int64)
        place = place * to_row + layer * to_layer + (entries.head % heads).to(tl.int64) * to_head
    mask = entries.owned[:, None] & (dim < HEAD_DIM)[None, :]
    return _as(tl.load(data + place[:, None] + dim[None, :], mask=mask, other=0.0), DTYPE)


@triton.jit
def _as(tile, DTYPE: tl.constexpr):
    """Convert a tile to the type in which it is multiplied; 8-bit floats fit halves exactly."""
    if DTYPE == tl.float32:
        return widened(tile)
    else:
        return tile.to(DTYPE)


@triton.jit
def scaled(tile, x, head):
    """Multiply a product of keys or values `x` of a KV head by their scale, if they have one."""
    scale = x[3]
    if scale is None:
        return tile
    else:
        return tl.cast(tile, tl.float32) * tl.load(scale + head)


@triton.jit
def program_of(queries, kv, BLOCK_W: tl.constexpr):
    """A program's split of the keys, KV head and tile of queries, and the number of tiles.

    All are on the first axis of the grid: a long prompt has more tiles than other axes allow.
    """
    program, tiles = tl.program_id(0), tl.cdiv(queries, BLOCK_W)
    splits = tl.num_programs(0) // (kv * tiles)
    return program % splits, program // splits % kv, program // (splits * kv), tiles


@triton.jit
def lines_of(head, start, queries, GROUP: tl.constexpr, BLOCK_W: tl.constexpr, LINES: tl.constexpr):
    """Lines of a tile of queries: head and query of each, and which of the lines exist."""
    line = tl.arange(0, LINES)
    group, row = line // BLOCK_W, start + line % BLOCK_W
    return head * GROUP + group, row, (group < GROUP) & (row < queries)


@triton.jit
def queries_of(
    q, head, row, there, HEAD_DIM: tl.constexpr, HEAD_DIM_P: tl.constexpr, DTYPE: tl.constexpr
):
    """Load the queries [LINES, HEAD_DIM_P] of some lines.

    Args:
        q: pointer; strides from head to head and from query to query.
    """
    data, to_head, to_row = q
    dim = tl.arange(0, HEAD_DIM_P)
    place = head.to(tl.int64) * to_head + row.to(tl.int64) * to_row
    mask = there[:, None] & (dim < HEAD_DIM)[None, :]
    return _as(tl.load(data + place[:, None] + dim[None, :], mask=mask, other=0.0), DTYPE)


@triton.jit
def asked_at(
    row, there, head, tokens, queries, query_positions, heads_per_row, STEPS: tl.constexpr
):
    """Positions of queries, -1 where there is none; in a prefill the window ends the prompt.

    Args:
        query_positions: [G / heads_per_row, W], a row for `heads_per_row` consecutive KV heads.
    """
    if STEPS:
        head_positions = query_positions + (head // heads_per_row).to(tl.int64) * queries
        position = tl.load(head_positions + row, mask=there, other=-1).to(tl.int32)
    else:
        position = tl.where(there, tokens - queries + row, -1)
    return position


@triton.jit
def asked_of(
    start, head, tokens, queries, query_positions, heads_per_row, row_lse, STEPS: tl.constexpr,
    GROUP: tl.constexpr, GROUP_P: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Describe the tile of queries that begins at index `start` of the window."""
    row = start + tl.arange(0, BLOCK_W)[None, :, None]
    position = asked_at(
        row, row < queries, head, tokens, queries, query_positions, heads_per_row, STEPS
    )
    group = tl.arange(0, GROUP_P)[:, None, None]
    if row_lse is None:
        lse = tl.zeros([GROUP_P, BLOCK_W, 1], tl.float32)
    else:
        place = (head * GROUP + group) * queries + row
        lse = tl.load(row_lse + place, mask=(group < GROUP) & (row < queries), other=0.0)
    return QueryTile(row, position, lse)


@triton.jit
def logits_of(
    q_tile, k_tile, k, head, BY_TOKEN: tl.constexpr, SCALE: tl.constexpr, GROUP_P: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Logits [GROUP_P, BLOCK_W, BLOCK_N] of a tile of queries and a block of a head's keys `k`.

    Args:
        BY_TOKEN: the logits will be reduced over queries, token by token. Keys are then the rows of
            the product: a thread holds rows whole, and threads have little to exchange.
    """
    if BY_TOKEN:
        product = tl.trans(tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION))
    else:
        product = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
    scores = scaled(product * SCALE, k, head)
    return tl.reshape(scores, (GROUP_P, BLOCK_W, BLOCK_N))
