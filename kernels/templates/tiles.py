"""Tiles of queries and of entries, as all frames load them.

In a prefill token t stands at place t and every KV head holds it. While decoding (`STEPS`) KV heads
may hold different entries: `holds` says which, and queries and entries are compared by their
positions.

Dimensions: G KV heads, H query heads, n tokens or entries of a layer, W queries of a window, D head
size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from kvpolicy.kernels.entries.rounding_triton import widened

AFTER_ALL = tl.constexpr(2**31 - 1)  # the position of what is not there: no query sees it


class Entries(NamedTuple):
    """A block of one KV head's entries, as a policy's functions are given it.

    Attributes:
        head: the KV head.
        tokens, queries: n and W.
        entry: int32 [BLOCK_N], which entries they are; `owned`: which of them the head holds.
        at: int32 [BLOCK_N], their positions, in a prefill their places.
        rank: int32 [BLOCK_N], places among the head's own entries, from 1 on; `own`: how many it
            holds.
    """

    head: Any
    tokens: Any
    queries: Any
    entry: Any
    owned: Any
    at: Any
    rank: Any
    own: Any


class Asked(NamedTuple):
    """A tile of queries, as a policy's functions are given it.

    Attributes:
        row: int32 [1, BLOCK_W, 1], the index of each in the window.
        at: int32, the same shape, their positions, in a prefill their places; -1 beyond the window.
        lse: float32 [GROUP_P, BLOCK_W, 1], log-sum-exp of their rows, 0 where no function needs it.
    """

    row: Any
    at: Any
    lse: Any


@triton.jit
def entries_of(
    entry, head, tokens, queries, positions, holds, ranks, STEPS: tl.constexpr
):  # fmt: skip
    """What is known of some entries of a KV head."""
    rank, own = entry + 1, tokens
    if STEPS:
        owned = (entry >= 0) & (entry < tokens)
        if holds is not None:
            owned = tl.load(holds + head * tokens + entry, mask=owned, other=0) != 0
        at = tl.load(positions + entry, mask=owned, other=AFTER_ALL).to(tl.int32)
        if ranks is not None:
            rank = tl.load(ranks + head * tokens + entry, mask=owned, other=0)
            own = tl.load(ranks + head * tokens + tokens - 1)
    else:
        owned = entry < tokens
        at = entry
    return Entries(head, tokens, queries, entry, owned, at, rank, own)


@triton.jit
def places_of(block, tokens, STEPS: tl.constexpr, BLOCK_N: tl.constexpr):
    """The entries of a block.

    At decode steps counted from the newest, so that what stands in front of a list, for the sake of
    longer ones, changes none of its sums.
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
    """Keys or values [BLOCK_N, HEAD_DIM_P] of some entries.

    Args:
        x: their pointer, the stride from row to row, and from head to head; the scales of heads,
            which `scaled` multiplies with; and the stride from layer to layer and the KV heads of
            each, which at decode steps mean nothing.
        rows: in which row each entry lies: [n] of all heads, at decode steps [G, n]; None: in its
            own.
    """
    data, to_row, to_head, _, to_layer, heads = x
    dim = tl.arange(0, HEAD_DIM_P)
    place = entries.entry.to(tl.int64)
    if rows is not None:
        if STEPS:
            rows += entries.head * entries.tokens
        place = tl.load(rows + entries.entry, mask=entries.owned, other=0).to(tl.int64)
    if STEPS:
        place = place * to_row + entries.head * to_head
    else:
        layer = (entries.head // heads).to(tl.int64)
        place = place * to_row + layer * to_layer + entries.head % heads * to_head
    there = entries.owned[:, None] & (dim < HEAD_DIM)[None, :]
    return _as(tl.load(data + place[:, None] + dim[None, :], mask=there, other=0.0), DTYPE)


@triton.jit
def _as(tile, DTYPE: tl.constexpr):
    """A tile in the type in which it is multiplied, exactly: one of 8 bits fits into halves."""
    if DTYPE == tl.float32:
        return widened(tile)
    else:
        return tile.to(DTYPE)


@triton.jit
def scaled(tile, x, head):
    """What is made of keys or values `x` of a KV head, through their scale if they have one."""
    scale = x[3]
    if scale is None:
        return tile
    else:
        return tl.cast(tile, tl.float32) * tl.load(scale + head)


@triton.jit
def program_of(queries, kv, BLOCK_W: tl.constexpr):
    """Which split of the keys, KV head and tile of queries a program has, and how many tiles.

    All lie along the first axis of the grid: a long prompt has more tiles than the others hold.
    """
    program, tiles = tl.program_id(0), tl.cdiv(queries, BLOCK_W)
    splits = tl.num_programs(0) // (kv * tiles)
    return program % splits, program // splits % kv, program // (splits * kv), tiles


@triton.jit
def lines_of(head, start, queries, GROUP: tl.constexpr, BLOCK_W: tl.constexpr, LINES: tl.constexpr):
    """Lines of a tile of queries: head and query of each, and which there are."""
    line = tl.arange(0, LINES)
    group, row = line // BLOCK_W, start + line % BLOCK_W
    return head * GROUP + group, row, (group < GROUP) & (row < queries)


@triton.jit
def queries_of(
    q, head, row, there, HEAD_DIM: tl.constexpr, HEAD_DIM_P: tl.constexpr, DTYPE: tl.constexpr
):
    """Queries [LINES, HEAD_DIM_P] of some lines.

    Args:
        q: their pointer, the stride from head to head, and from query to query.
    """
    data, to_head, to_row = q
    dim = tl.arange(0, HEAD_DIM_P)
    place = head.to(tl.int64) * to_head + row.to(tl.int64) * to_row
    mask = there[:, None] & (dim < HEAD_DIM)[None, :]
    return _as(tl.load(data + place[:, None] + dim[None, :], mask=mask, other=0.0), DTYPE)


@triton.jit
def asked_at(row, there, head, tokens, queries, query_positions, alike, STEPS: tl.constexpr):
    """Positions of queries, -1 where there is none; in a prefill the window ends the prompt.

    Args:
        query_positions: [*, W], of so many KV heads, `alike`, each.
    """
    if STEPS:
        own = query_positions + (head // alike).to(tl.int64) * queries
        at = tl.load(own + row, mask=there, other=-1).to(tl.int32)
    else:
        at = tl.where(there, tokens - queries + row, -1)
    return at


@triton.jit
def asked_of(
    start, head, tokens, queries, query_positions, alike, row_lse, STEPS: tl.constexpr,
    GROUP: tl.constexpr, GROUP_P: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """What is known of a tile of queries."""
    row = start + tl.arange(0, BLOCK_W)[None, :, None]
    at = asked_at(row, row < queries, head, tokens, queries, query_positions, alike, STEPS)
    group = tl.arange(0, GROUP_P)[:, None, None]
    if row_lse is None:
        lse = tl.zeros([GROUP_P, BLOCK_W, 1], tl.float32)
    else:
        place = (head * GROUP + group) * queries + row
        lse = tl.load(row_lse + place, mask=(group < GROUP) & (row < queries), other=0.0)
    return Asked(row, at, lse)


@triton.jit
def logits_of(
    q_tile, k_tile, k, head, BY_TOKEN: tl.constexpr, SCALE: tl.constexpr, GROUP_P: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Logits [GROUP_P, BLOCK_W, BLOCK_N] of a tile of queries and a block of a head's keys `k`.

    Args:
        BY_TOKEN: what is reduced of them is over queries, of one token after the other: keys are
            the rows of the product, which a thread has whole, and little is left to exchange.
    """
    if BY_TOKEN:
        product = tl.trans(tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION))
    else:
        product = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
    scores = scaled(product * SCALE, k, head)
    return tl.reshape(scores, (GROUP_P, BLOCK_W, BLOCK_N))
