"""Compiles kernels of a policy and of attention before a request waits for them.

A dummy request goes the way of real ones: prompts of the sizes by which kernels are chosen, a copy
of nothing, folds. Nothing in the pool changes but its first slot, which belongs to no request.

Dimensions: L layers, H query heads, G KV heads, D head size.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from kvpolicy.dsl.execute.warm import fold, prefill, programs, prompts, prompts_of_generated
from kvpolicy.kernels.attention.paged_attention import UNPAIRED, PairReading
from kvpolicy.kernels.entries.requests import Requests
from kvpolicy.kernels.entries.tables import Tables
from kvpolicy.sglang_ext.forward import share
from kvpolicy.sglang_ext.forward.compress import copy_kept
from kvpolicy.sglang_ext.memory.private import Layout, Private

if TYPE_CHECKING:
    from kvpolicy.dsl.execute.prefill.finished import FinishedPrefill
    from kvpolicy.sglang_ext.forward.services import Services
    from kvpolicy.sglang_ext.request.request import Served

# Tokens that a resumed request computes at once: with few tokens programs hold fewer queries.
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 512, 4096)


def warm(services: Services, served: Served, queries: torch.dtype) -> None:
    """Compiles all that prefills, copies and folds of a policy launch, whatever the prompt.

    Args:
        queries: dtype of queries.
    """
    if not served.kernels.read_the_pool:
        return
    for finished in _prefills(services, served, queries, prompts(served.bound)):
        _copy_nothing(services, served, finished)
    if served.bound.folded.decode is not None:
        _fold_nothing(services, served)
    if served.bound.propagates:
        _take_nothing(services, served)


def warm_variant(services: Services, served: Served, queries: torch.dtype) -> None:
    """Compiles what differs from a warmed policy that has other parameters."""
    if served.kernels.read_the_pool:
        for _ in _prefills(services, served, queries, prompts_of_generated()):
            pass


def _prefills(
    services: Services, served: Served, queries: torch.dtype, lengths: Sequence[int]
) -> Iterator[FinishedPrefill]:
    """Finished prefills of prompts of some lengths; each then goes through folds.

    Triton's interpreter compiles nothing and is slow: the first length alone.
    """
    device = services.arena.storage.device
    like, _ = services.arena.of_all_layers(torch.empty(0, dtype=torch.int64, device=device))
    for program in programs(served.program):
        for tokens in lengths if device.type == "cuda" else lengths[:1]:
            finished = prefill(program, tokens, like, queries)
            yield finished
            fold(finished, like, queries)


def warm_attention(services: Services, heads: int, dtype: torch.dtype, requests: int) -> None:
    """Compiles the attention of decode steps and of resumed requests.

    Args:
        heads: H of this rank.
        dtype: of its queries.
        requests: number of requests that decode together at most.
    """
    from kvpolicy.kernels.attention.decode_attention_triton import decode_attention
    from kvpolicy.kernels.attention.paged_attention_triton import paged_attention
    from kvpolicy.kernels.attention.private_pages_triton import private_pages

    arena, tables = services.arena, services.tables.tables
    device, size = arena.storage.device, arena.storage.shape[4]
    slots = torch.zeros(1, 1, dtype=torch.int32, device=device)
    for number in _batches(requests):
        q = torch.zeros(number, heads, size, dtype=dtype, device=device)
        rows = torch.zeros(number, dtype=torch.int64, device=device)
        decode_requests = Requests(arena.storage, tables, rows, rows, slots)
        decode_attention(q, decode_requests, layer=0, scale=1.0)
    if services.pages_reader is not None:
        services.pages_reader.warm()
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    ones = torch.ones(1, device=device)
    empty = torch.zeros(arena.layers, arena.kv_heads + 1, dtype=torch.int32, device=device)
    private_pages(arena.storage, tables, zero, empty, empty.flatten(), longest=1)
    indptr = zero.expand(arena.kv_heads + 1).contiguous()
    lists = (arena.entries, arena.values, indptr, zero)
    readings = [UNPAIRED, PairReading(zero, ones, ones)] if tables.paired.numel() else [UNPAIRED]
    # With few KV heads lists are left whole only for more tokens than these.
    cuts = [*((tokens, None) for tokens in _TOKENS), (_TOKENS[-1], 1)]
    for (tokens, splits), reading in itertools.product(cuts, readings):
        q = torch.zeros(1, tokens, heads, size, dtype=dtype, device=device)
        paged_attention(q, *lists, scale=1.0, reading=reading, splits=splits)


def _batches(requests: int) -> list[int]:
    """Powers of two below `requests`, and it: their number decides how lists are cut."""
    return [*(2**n for n in range((requests - 1).bit_length())), requests]


def _copy_nothing(services: Services, served: Served, finished: FinishedPrefill) -> None:
    """Launches what follows a prompt, of which nothing is kept."""
    arena, device = services.arena, services.arena.storage.device
    slots = torch.zeros(finished.size, dtype=torch.int64, device=device)
    size = (arena.layers, arena.kv_heads)
    kept = torch.zeros((*size, finished.size), dtype=torch.bool, device=device)
    private = _empty(services, served)
    counts = torch.zeros((arena.model_layers, arena.kv_heads), dtype=torch.int64)
    copy_kept(services, served, private, slots, kept, counts, finished)
    for layer in served.upper_layers[:1]:
        k, v, holds = share.paired(arena, slots, layer, finished, finished.program.heads).dense
        arguments = (k, v, torch.zeros_like(holds), arena.pages(private.slots))
        served.kernels.place(arena.entries, *arguments, value_offset=arena.value_offset)
        served.kernels.compact_layers(
            arena.storage, slots, kept, private.slots, private.layout.first_page
        )


def _empty(services: Services, served: Served) -> Private:
    """A copy that holds nothing, in the first slot."""
    arena, device = services.arena, services.arena.storage.device
    size = (arena.layers, arena.kv_heads)
    private = Private(0, served.name, torch.zeros(1, dtype=torch.int32, device=device), 0)
    device_counts, first_page = torch.zeros((2, *size), dtype=torch.int32, device=device).unbind(0)
    counts = np.zeros(size, dtype=np.int64)
    lists = counts.tolist()
    private.layout = Layout(device_counts, first_page, lists, lists, counts, [0] * arena.layers)
    return private


def _fold_nothing(services: Services, served: Served) -> None:
    """Launches what writes a fold, of no entries."""
    arena, kernels, storage = services.arena, served.kernels, services.arena.storage
    layers, heads, device = arena.layers, arena.kv_heads, storage.device
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    slots = torch.zeros(1, 1, dtype=torch.int32, device=device)
    lists = torch.zeros(heads * layers, 1, dtype=torch.bool, device=device)
    tables = Tables.empty(1, layers, heads, 1, device)
    requests = Requests(storage, tables, zero, zero, slots)
    kernels.entry_ids(requests, lists)
    # `proceed` has L columns if the host does not wait for numbers, or else one.
    single = lists[:1]
    for proceed in (lists[:layers].reshape(1, layers), single):
        kernels.compact_in_place(requests, lists, lists, proceed)
        if served.bound.positions == "slots":
            services.rotary.turn(kernels.turn, requests, lists, lists, proceed)
    pool = [arena.entries[: len(arena.values)], arena.values]
    rows = kernels.take_rows(pool, zero, zero)
    kernels.put_rows(pool, zero, rows, zero)
    holds = lists[:heads]
    k, v = kernels.gather(
        arena.entries, arena.values, zero.expand(heads + 1).contiguous(), zero, holds
    )
    if served.bound.positions == "slots":
        k = services.rotary.move(k, torch.zeros_like(holds, dtype=torch.int64), kernels.rotate)
    first = torch.zeros(heads, dtype=torch.int32, device=device)
    arguments = (k, v, holds, zero)
    kernels.place(arena.entries, *arguments, value_offset=arena.value_offset, first_page=first)


def _take_nothing(services: Services, served: Served) -> None:
    """Launches what takes and puts rows of hidden states between layers."""
    arena, kernels, runner = services.arena, served.kernels, services.runner
    device = arena.storage.device
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    hidden = torch.zeros(1, runner.model_config.hidden_size, dtype=runner.dtype, device=device)
    kernels.take_rows([hidden, hidden, zero, zero, zero], zero)
    wide = [hidden.clone(), hidden.clone()]
    kernels.put_rows(wide, zero, kernels.take_rows([hidden, hidden], zero))
