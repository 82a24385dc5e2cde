"""The log-sum-exp of each query's row of logits: the first of two passes over the keys.

It is left out if attention has given the log-sum-exp.

Dimensions: G KV heads, H query heads, n tokens or entries of a layer, W queries of a window.
"""

from __future__ import annotations

import triton.language as tl
from kvpolicy.kernels.launch.kernel import kernel
from kvpolicy.kernels.templates.tiles import (
    asked_at,
    entries_of,
    lines_of,
    places_of,
    program_of,
    queries_of,
    scaled,
    vectors,
)


@kernel()
def row_partials(
    q, query_positions, heads_per_row, k, key_rows, positions, holds, partial, tokens, queries,
    blocks, kv,
    STEPS: tl.constexpr, SCALE: tl.constexpr, GROUP: tl.constexpr, GROUP_P: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_P: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_N: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the log-sum-exp of one KV head's rows over some blocks of keys."""
    part, head, tile, tiles = program_of(queries, kv, BLOCK_W)
    # Later queries see more keys: they begin first.
    start = (tiles - 1 - tile) * BLOCK_W
    query_head, row, exists = lines_of(head, start, queries, GROUP, BLOCK_W, GROUP_P * BLOCK_W)
    q_tile = queries_of(q, query_head, row, exists, HEAD_DIM, HEAD_DIM_P, DTYPE)
    position = asked_at(row, exists, head, tokens, queries, query_positions, heads_per_row, STEPS)
    top = tl.full([GROUP_P * BLOCK_W], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_P * BLOCK_W], tl.float32)
    seen_any = tl.zeros([GROUP_P * BLOCK_W], tl.int32)
    seen_tokens = tokens
    if not STEPS:  # no query of the tile sees keys after the last one
        seen_tokens = tl.minimum(tokens - queries + start + BLOCK_W, tokens)
    end = tl.minimum((part + 1) * blocks, tl.cdiv(seen_tokens, BLOCK_N))
    for block in range(part * blocks, end):
        entry = places_of(block, tokens, STEPS, BLOCK_N)
        entries = entries_of(entry, head, tokens, queries, positions, holds, None, STEPS)
        k_tile = vectors(k, key_rows, entries, STEPS, HEAD_DIM, HEAD_DIM_P, DTYPE)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * SCALE
        scores = scaled(scores, k, head)
        seen = entries.at[None, :] <= position[:, None]
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp(top - base) + tl.sum(tl.exp(scores - base[:, None]), 1)
        top = new_top
        if STEPS:
            seen_any = tl.maximum(seen_any, tl.max(seen.to(tl.int32), 1))
    is_empty = total == 0.0
    empty_lse = float("-inf")
    if STEPS:  # an older query may see nothing: all entries before it have left
        empty_lse = tl.where(seen_any > 0, float("nan"), float("-inf"))
    lse = tl.where(is_empty, empty_lse, top + tl.log(tl.where(is_empty, 1.0, total)))
    tl.store(partial + (part * kv * GROUP + query_head) * queries + row, lse, mask=exists)


@kernel()
def row_combine(partial, row_lse, rows, splits, SPLITS_P: tl.constexpr, BLOCK: tl.constexpr):
    """Combine the splits of each row, in order, into its log-sum-exp."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    part = tl.arange(0, SPLITS_P)[:, None]
    mask = (part < splits) & (row < rows)
    parts = tl.load(partial + part * rows + row, mask=mask, other=float("-inf"))
    top = tl.max(parts, 0, keep_dims=True)
    base = tl.where(top == float("-inf"), 0.0, top)
    lse = base + tl.log(tl.sum(tl.exp(parts - base), 0, keep_dims=True))
    tl.store(row_lse + row, lse, mask=row < rows)
