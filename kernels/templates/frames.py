"""Kernels that a policy's functions complete: values per token, per query, and of neighbours.

The functions are small `@triton.jit` functions that `dsl/codegen` writes. They get tiles, the
policy's `inputs` and `numbers` and, to store to, its `results`; `state` is a tuple that they carry
from tile to tile. Nothing of size [H, W, n] is written.

Dimensions: G KV heads, H query heads, n tokens or entries of a layer, W queries of a window.
"""

from __future__ import annotations

import triton.language as tl
from kvpolicy.kernels.launch.kernel import kernel
from kvpolicy.kernels.templates.tiles import (
    asked_of,
    entries_of,
    lines_of,
    logits_of,
    of_head,
    places_of,
    program_of,
    queries_of,
    scaled,
    vectors,
)


@kernel()
def columns(
    q, query_positions, heads_per_row, k, key_rows, v, value_rows, row_lse, positions, holds, ranks,
    flags, inputs, numbers, results, tokens, queries, blocks,
    START: tl.constexpr, TILE: tl.constexpr, STORE: tl.constexpr, ONE_TILE: tl.constexpr,
    SKIPS: tl.constexpr, IN_PARTS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    CHECK_LOGITS: tl.constexpr, CHECK_KEYS: tl.constexpr, CHECK_VALUES: tl.constexpr,
    STEPS: tl.constexpr, SCALE: tl.constexpr, GROUP: tl.constexpr, GROUP_P: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_P: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_N: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute values per token of one KV head, for some blocks of tokens.

    The grid has KV heads, blocks, and parts of a block's queries. Heads come first, so that the
    first blocks, which most queries see, begin first in all of them.

    Args:
        START: gives the state before the first tile of queries; TILE: the state after one tile
            more, None if no query is read; STORE: stores results from the state and from the
            block's keys and values.
        ONE_TILE: one tile holds the window, and START is not called.
        SKIPS: queries that do not see a token add nothing to it, so they are skipped.
        IN_PARTS: programs share a block's queries; each stores results of its part, as those of KV
            head part * G + head.
        KEYS, VALUES: whether they are given; Triton 3.6 cannot test a tuple for None.
        CHECK_LOGITS, CHECK_KEYS, CHECK_VALUES: whether to count those that are not finite in
            `flags`, int32 [parts * G, blocks].
    """
    head = tl.program_id(0)
    result_head = head
    if IN_PARTS:
        result_head += tl.program_id(2) * tl.num_programs(0)
    if TILE is not None and ONE_TILE:
        query_head, line_row, exists = lines_of(head, 0, queries, GROUP, BLOCK_W, GROUP_P * BLOCK_W)
        q_tile = queries_of(q, query_head, line_row, exists, HEAD_DIM, HEAD_DIM_P, DTYPE)
        asked = asked_of(
            0, head, tokens, queries, query_positions, heads_per_row, row_lse, STEPS, GROUP,
            GROUP_P, BLOCK_W,
        )  # fmt: skip
    begin = tl.program_id(1) * blocks
    end = tl.minimum(begin + blocks, tl.cdiv(tokens, BLOCK_N))
    for turn in range(begin, end):
        # Backwards: the pass before read the end last, and it may still be in the GPU's cache.
        block = begin + end - 1 - turn
        entry = places_of(block, tokens, STEPS, BLOCK_N)
        entries = entries_of(entry, head, tokens, queries, positions, holds, ranks, STEPS)
        nonfinite = 0
        k_tile = None
        if KEYS:
            k_tile = vectors(k, key_rows, entries, STEPS, HEAD_DIM, HEAD_DIM_P, DTYPE)
        state = ()
        if TILE is not None and ONE_TILE:
            logits = logits_of(
                q_tile, k_tile, k, head, True, SCALE, GROUP_P, BLOCK_W, BLOCK_N, PRECISION
            )
            seen = entries.at[None, None, :] <= asked.at
            state = TILE((), asked, logits, seen, entries, positions, inputs, numbers, BLOCK_N)
            if CHECK_LOGITS:
                nonfinite += tl.sum(tl.where(tl.abs(logits) < float("inf"), 0, 1))
        if TILE is not None and not ONE_TILE:
            state = START(BLOCK_N)
            first = 0
            if SKIPS:  # earlier queries do not see these tokens
                first = tl.maximum(block * BLOCK_N - (tokens - queries), 0) // BLOCK_W * BLOCK_W
            last = queries
            if IN_PARTS:
                share = tl.cdiv(tl.cdiv(queries - first, BLOCK_W), tl.num_programs(2)) * BLOCK_W
                first += tl.program_id(2) * share
                last = tl.minimum(first + share, queries)
            for start in range(first, last, BLOCK_W):
                query_head, row, exists = lines_of(
                    head, start, queries, GROUP, BLOCK_W, GROUP_P * BLOCK_W
                )
                q_part = queries_of(q, query_head, row, exists, HEAD_DIM, HEAD_DIM_P, DTYPE)
                asked_part = asked_of(
                    start, head, tokens, queries, query_positions, heads_per_row, row_lse, STEPS,
                    GROUP, GROUP_P, BLOCK_W,
                )  # fmt: skip
                logits = logits_of(
                    q_part, k_tile, k, head, True, SCALE, GROUP_P, BLOCK_W, BLOCK_N, PRECISION
                )
                seen = entries.at[None, None, :] <= asked_part.at
                state = TILE(
                    state, asked_part, logits, seen, entries, positions, inputs, numbers, BLOCK_N
                )
                if CHECK_LOGITS:
                    nonfinite += tl.sum(tl.where(tl.abs(logits) < float("inf"), 0, 1))
        v_tile = None
        if VALUES:
            v_tile = vectors(v, value_rows, entries, STEPS, HEAD_DIM, HEAD_DIM_P, DTYPE)
            v_tile = scaled(v_tile, v, head)
        if KEYS:
            k_tile = scaled(k_tile, k, head)
        result_entries = of_head(entries, result_head)
        STORE(state, k_tile, v_tile, result_entries, positions, inputs, numbers, results, BLOCK_N)
        if CHECK_KEYS:
            nonfinite += tl.sum(tl.where(tl.abs(tl.cast(k_tile, tl.float32)) < float("inf"), 0, 1))
        if CHECK_VALUES:
            nonfinite += tl.sum(tl.where(tl.abs(tl.cast(v_tile, tl.float32)) < float("inf"), 0, 1))
        if flags is not None:
            tl.store(flags + result_head * tl.cdiv(tokens, BLOCK_N) + block, nonfinite)


@kernel()
def rows(
    q, query_positions, heads_per_row, k, key_rows, row_lse, positions, holds, ranks, inputs,
    numbers, results, tokens, queries, blocks, kv,
    START: tl.constexpr, TILE: tl.constexpr, STORE: tl.constexpr, STEPS: tl.constexpr,
    SCALE: tl.constexpr, GROUP: tl.constexpr, GROUP_P: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEAD_DIM_P: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_N: tl.constexpr, DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute values per query of one KV head, over some blocks of tokens.

    Args:
        START: gives the state before the first block; TILE: the state after one block more; STORE:
            stores it, as one of the splits.
    """
    part, head, tile, _ = program_of(queries, kv, BLOCK_W)
    start = tile * BLOCK_W
    query_head, line_row, exists = lines_of(head, start, queries, GROUP, BLOCK_W, GROUP_P * BLOCK_W)
    q_tile = queries_of(q, query_head, line_row, exists, HEAD_DIM, HEAD_DIM_P, DTYPE)
    asked = asked_of(
        start, head, tokens, queries, query_positions, heads_per_row, row_lse, STEPS, GROUP,
        GROUP_P, BLOCK_W,
    )  # fmt: skip
    state = START(BLOCK_N)
    for block in range(part * blocks, tl.minimum((part + 1) * blocks, tl.cdiv(tokens, BLOCK_N))):
        entry = places_of(block, tokens, STEPS, BLOCK_N)
        entries = entries_of(entry, head, tokens, queries, positions, holds, ranks, STEPS)
        k_tile = vectors(k, key_rows, entries, STEPS, HEAD_DIM, HEAD_DIM_P, DTYPE)
        logits = logits_of(
            q_tile, k_tile, k, head, False, SCALE, GROUP_P, BLOCK_W, BLOCK_N, PRECISION
        )
        seen = entries.at[None, None, :] <= asked.at
        state = TILE(state, asked, logits, seen, entries, positions, inputs, numbers, BLOCK_N)
    STORE(state, asked.row, part * kv + head, queries, results, BLOCK_N)


@kernel()
def tail(
    positions, holds, ranks, order, inputs, numbers, results, tokens,
    STORE: tl.constexpr, STEPS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute values that need neighbouring tokens, of one KV head and one block of tokens.

    Args:
        STORE: reads results of the kernels before, and stores others.
    """
    head = tl.program_id(1)
    entry = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    entries = entries_of(entry, head, tokens, 0, positions, holds, ranks, STEPS)
    STORE(entries, positions, order, inputs, numbers, results, BLOCK_N)
