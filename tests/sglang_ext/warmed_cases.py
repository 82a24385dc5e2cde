"""Which kernels Triton looks for, when policies are warmed and when they serve; no GPU is needed.

Run by test_warmed.py in a process without Triton's interpreter; prints one JSON object: of each
policy how many kernels its warming asks for, and those that serving asks for besides.

Tensors have shapes and addresses but no data, so that prompts of 131,072 tokens cost nothing: what
the host reads of the device is a number that is made up. The work is the plugin's own, from what a
layer of a prefill shows to a policy to the folds; SGLang and its allocator are not there.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from kvpolicy.dsl.execute import warm as execute_warm
from kvpolicy.dsl.execute.decode.memory import Known
from kvpolicy.dsl.execute.layer.choice import Held
from kvpolicy.dsl.execute.prefill.run import KeysValues, Run
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.kernels.attention.decode_attention_triton import decode_attention
from kvpolicy.kernels.attention.paged_attention import PairReading
from kvpolicy.kernels.attention.paged_attention_triton import paged_attention
from kvpolicy.kernels.attention.private_pages_triton import private_pages
from kvpolicy.kernels.entries.requests import Requests
from kvpolicy.sglang_ext.forward import share
from kvpolicy.sglang_ext.forward.compress import copy_kept
from kvpolicy.sglang_ext.forward.group_fold import Group, Member
from kvpolicy.sglang_ext.forward.warm import warm, warm_attention
from kvpolicy.sglang_ext.request.request import RequestState, Served
from on_device import HIDDEN, KEPT, ROWS, STEPS, empty, made_up, names, served, services
from sm90 import asked

# From 1,000 to 131,072 tokens: odd ones, multiples of 16, powers of two, and their neighbours.
LENGTHS = (
    1000, 1024, 1041, 2000, 2048, 3333, 4096, 4097, 8000, 8192, 8209, 16384, 20001, 32768, 32784,
    65536, 100003, 131072,
)  # fmt: skip
FOLDED = (1041, 8192, 131072)  # lengths of prompts that also decode
SHAPE = ModelShape(4, 32, 8, 128)
CHUNK = 32768  # tokens of a prompt's chunk
TOGETHER = (1, 3)  # requests that fold together
RUNNING = 200  # most requests that decode at once
# (policy, step, prompt, whether entries leave) -> the next such step from `step` on.
_NEXT: dict[tuple[str, int, int, bool], int] = {}


def prefill(parts: SimpleNamespace, policy: Served, tokens: int) -> Run:
    """Scores a prompt's layers, in chunks if the policy accumulates over chunks."""
    run = policy.program.start(tokens)
    first = tokens // CHUNK * CHUNK if policy.program.accumulates else 0
    layer, there, slots = 0, None, empty(tokens, dtype=torch.int64)
    while layer < SHAPE.layers:
        number = tokens if there is None else len(there)
        own = slots if there is None else slots[there]
        # Rows of a forward with another request first, for all query heads of this rank's KV heads.
        heads = empty(3 + number, parts.arena.kv_heads * SHAPE.group, SHAPE.head_dim)[3:]
        if first and there is None and run.size == tokens:
            for end in range(CHUNK, first + 1, CHUNK):
                k, v = parts.arena.at_slots(layer, slots[:end])
                run.accumulate(layer, heads[end - CHUNK : end].transpose(0, 1), k, v)
            queries = heads[min(first, tokens - policy.single_queries(tokens)) :]
        else:
            queries = heads[number - min(run.queries, number) :]
        entries = partial(_entries, parts, policy, own)
        deeper = run.show(layer, queries.transpose(0, 1), entries, there)
        if deeper is not None:
            there = deeper if there is None else there[deeper]
            take_rows(parts, policy, number, len(deeper))
        layer += 1
        if run.restarted:
            run, layer = run.again(len(there)), 0
            tokens, slots, there = len(there), slots[-len(there) :], None
    return run


def _entries(
    parts: SimpleNamespace, policy: Served, slots: torch.Tensor, layers: range
) -> KeysValues:
    k, v = parts.arena.of_layers(layers, slots)
    return k, v if policy.bound.needs_values else None


def take_rows(parts: SimpleNamespace, policy: Served, number: int, chosen: int) -> None:
    """Takes and puts rows between two layers, of a request that is not the batch's first."""
    hidden = [empty(3 + number, HIDDEN)[3:] for _ in range(2)]
    narrow = [empty(3 + number, dtype=torch.int64)[3:] for _ in range(3)]
    policy.kernels.take_rows([*hidden, *narrow], empty(chosen, dtype=torch.int64))
    some = empty(2, 2, dtype=torch.int64).unbind(0)
    wide = [empty(number, HIDDEN) for _ in range(2)]
    policy.kernels.put_rows(wide, some[0], policy.kernels.take_rows(hidden, some[1]))


def compress(parts: SimpleNamespace, policy: Served, run: Run, row: int) -> RequestState:
    """Compresses after a prompt: a copy with KEPT entries per list, and the state for decode."""
    finished = run.finish(wait=False)
    kept = torch.stack(finished.kept)
    counts = torch.full((SHAPE.layers, SHAPE.kv_heads), KEPT)
    slots = empty(run.size, dtype=torch.int64)
    state = RequestState(policy, run.size, 0)
    state.folds = policy.bound.folded.decode is not None
    need = parts.store.slots_for(counts)
    state.private = parts.store.allocate(row, policy.name, need, run.size, parts.evict)
    parts.store.fill(state.private, counts)
    if policy.upper_layers:
        share.compress(parts, state, slots, finished)
        return state
    copy_kept(parts, policy, state.private, slots, kept, counts, finished)
    state.remember(finished, Known([Held(KEPT, False)] * SHAPE.layers, KEPT))
    return state


def fold(parts: SimpleNamespace, states: list[RequestState], wide: bool) -> None:
    """Takes requests of one prompt length through STEPS decode steps, and twice to a fold.

    Args:
        wide: whether lists outgrow their pages.
    """
    table = empty(ROWS, 200_000, dtype=torch.int32)
    for turn in range(1, 4):
        members = []
        for row, state in enumerate(states):
            end = state.prompt + turn * STEPS
            request = SimpleNamespace(rid="", kv=SimpleNamespace(req_pool_idx=row))
            members.append(Member(request, state, end, range(end - STEPS, end)))
            state.memory.generated = before(state, leaves=turn > 1)
            if wide:
                state.private.layout.room[:] = 0

        def queries(number: int = len(members)) -> torch.Tensor:
            heads = SHAPE.heads // parts.ranks.size
            return empty(number * SHAPE.layers * heads, STEPS, SHAPE.head_dim)

        written = Group(parts, table, members, queries).advance(leaves=turn > 1)
        if written is not None:
            written.finish()


def before(state: RequestState, *, leaves: bool) -> int:
    """Decode steps before the next STEPS at whose end entries leave, or do not."""
    first, bound = state.memory.generated + STEPS, state.served.bound
    asked_for = (state.served.name, first, state.memory.prompt, leaves)
    if asked_for not in _NEXT:
        every = range(first, first + 4096)
        steps = (s for s in every if bound.leaves_at(s, state.memory.prompt) == leaves)
        _NEXT[asked_for] = next(steps, first)
    return _NEXT[asked_for] - STEPS


def serve(parts: SimpleNamespace, policy: Served) -> None:
    """Serves prompts of all lengths, some of which decode, alone and together."""
    for tokens in LENGTHS:
        run = prefill(parts, policy, tokens)
        state = compress(parts, policy, run, 0)
        parts.store.clear()
        if state.decoding is None or tokens not in FOLDED:
            continue
        for number in TOGETHER:
            for wide in (False, True):
                made = [
                    compress(parts, policy, prefill(parts, policy, tokens), row)
                    for row in range(number)
                ]
                fold(parts, made, wide)
                parts.store.clear()


def missing(name: str, ranks: int) -> tuple[int, list[str]]:
    """Number of kernels that warming asks for, and those that only serving asks for, on a rank."""
    parts: list[Any] = []

    def begin() -> None:
        parts.append(services(SHAPE, ranks=ranks))
        parts.append(served(parts[0], SHAPE, name))
        warm(*parts, torch.bfloat16)

    with made_up(SHAPE):
        warmed = asked(begin, KEPT)
        used = asked(lambda: serve(*parts), KEPT)
    return len(warmed), sorted(f"{kernel} {key}" for kernel, key in used - warmed)


def attention(ranks: int, *, pairs: bool) -> tuple[int, list[str]]:
    """As `missing`, for attention of decode steps and resumed requests."""
    parts: list[Any] = []
    heads, size = SHAPE.heads // ranks, SHAPE.head_dim

    def begin() -> None:
        parts.append(services(SHAPE, pairs=pairs, ranks=ranks))
        warm_attention(parts[0], heads, torch.bfloat16, RUNNING)

    def serve() -> None:
        arena, table = parts[0].arena, empty(ROWS, 200_000, dtype=torch.int32)
        for number in range(1, RUNNING + 1):
            q = empty(2 + number, heads, size)[2:]
            rows, lengths = (empty(2 + number, dtype=torch.int64)[2:] for _ in range(2))
            where = Requests(arena.storage, parts[0].tables.tables, rows, lengths, table)
            decode_attention(q, where, layer=3, scale=0.1)
            lists = number * arena.kv_heads + 1
            starts = empty(arena.layers, 2, lists, dtype=torch.int32)[:, 0]
            pages = empty(100 * number, dtype=torch.int32)
            given = (arena.storage, parts[0].tables.tables, rows, starts, pages)
            private_pages(*given, longest=number)
        for tokens in (*range(1, 100), *LENGTHS[:12]):
            q = empty(1, tokens, heads, size)
            indptr = empty(parts[0].arena.kv_heads + 1, dtype=torch.int64)
            entries = empty(tokens, dtype=torch.int64)
            paged_attention(q, arena.entries, arena.values, indptr, entries, scale=0.1)
            if pairs:
                reading = PairReading(
                    entries, *(empty(tokens, dtype=torch.float32) for _ in range(2))
                )
                given = (arena.entries, arena.values, indptr, entries)
                paged_attention(q, *given, scale=0.1, reading=reading)

    warmed = asked(begin, KEPT)
    used = asked(serve, KEPT)
    return len(warmed), sorted(f"{kernel} {key}" for kernel, key in used - warmed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("policies", nargs="*", help="and `attention`; none: all")
    parser.add_argument("--longest", type=int, help="tokens of prompts that are warmed")
    parser.add_argument("--ranks", type=int, default=1, help="among which heads are divided")
    options = parser.parse_args()
    every = options.policies or ["attention", "attention of pairs", *names()]
    if options.longest:
        execute_warm._PROMPTS = [n for n in execute_warm._PROMPTS if n <= options.longest]
    found = {
        name: attention(options.ranks, pairs="pairs" in name)
        if "attention" in name
        else missing(name, options.ranks)
        for name in every
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
