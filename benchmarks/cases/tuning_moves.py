"""Knobs of the kernels that choose and move entries, for `tuning`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import torch
from kvpolicy.kernels.entries import compact_in_place as in_place_reference
from kvpolicy.kernels.entries import compact_layers as reference_compaction
from kvpolicy.kernels.entries import gather as reference_gather
from kvpolicy.kernels.entries import place as reference_place
from kvpolicy.kernels.entries.compact_in_place_triton import compact_in_place
from kvpolicy.kernels.entries.compact_layers_triton import compact_layers
from kvpolicy.kernels.entries.gather_triton import gather
from kvpolicy.kernels.entries.place_triton import place
from kvpolicy.kernels.entries.rows_triton import put_rows, take_rows
from kvpolicy.kernels.launch.tuned import plain
from kvpolicy.kernels.merging import merge_rows as reference_rows
from kvpolicy.kernels.merging import nearest as reference_nearest
from kvpolicy.kernels.merging.merge_rows_triton import merge_rows
from kvpolicy.kernels.merging.nearest_triton import nearest
from kvpolicy.kernels.scoring.select import top as reference_top
from kvpolicy.kernels.scoring.select_triton import top

from cases.case import Bench, Case, Checked, Tuning
from cases.memory import TAIL, Fold, bits, prompt_of, sort_keys
from cases.merging import links_of, lists_of
from cases.scoring import OURS

TOPIC = "tuning"

Knobs = dict[str, dict[str, int]]


def variants(call: Callable, **knobs: Sequence) -> tuple[dict[str, Callable], Knobs]:
    """The call as it is, then with each combination of knob values; and the knobs of each name."""
    made, given = {OURS: call}, {}
    for values in product(*knobs.values()):
        chosen = dict(zip(knobs, values, strict=True))
        name = named(chosen)
        made[name], given[name] = partial(call, **chosen), chosen
    return made, given


def named(chosen: dict[str, int]) -> str:
    return f"{OURS}, " + ", ".join(f"{knob} {value}" for knob, value in chosen.items())


def compaction(bench: Bench, tokens: int, number: int, toy: bool) -> Case:
    model = bench.model
    storage, inputs = prompt_of(model, tokens, number)
    call = partial(compact_layers, storage, *inputs)
    parts, tiles = ((64,), (16,)) if toy else ((1024, 4096, 16384), (8, 16, 32, 64))
    calls, knobs = variants(call, part=parts, tile=tiles)

    def check(calls: dict[str, Callable]) -> str:
        storage[:, :, inputs[2]] = 0  # private slots, which `_fitting` has filled
        before = storage.clone()
        reference_compaction.compact_layers(storage, *inputs)
        wanted = storage.clone()
        assert not torch.equal(bits(wanted), bits(before)), "nothing was copied"
        for name, each in calls.items():
            storage.copy_(before)
            each()
            assert torch.equal(bits(storage), bits(wanted)), name
        return "every bit of the pool as after the reference"

    counted = model.shape.layers * model.shape.kv_heads * number * 4 * model.entry_bytes
    where = {"row_bytes": model.entry_bytes, "positions": tokens}
    return Case(
        TOPIC, "compaction, all layers", tokens, 1, calls, check,
        counted=counted, layers=model.shape.layers, tuning=Tuning("compact_layers", where, knobs),
    )  # fmt: skip


def gathered(bench: Bench, tokens: int, number: int, toy: bool) -> Case:
    model, heads = bench.model, bench.model.shape.kv_heads
    pool = model.random(2 * tokens * heads, model.shape.head_dim, seed=1)
    keys, values = pool.split(tokens * heads)
    indices = model.permutation(tokens * heads, seed=2)[: number * heads]
    there = torch.rand(heads, tokens, device=model.device).argsort(-1) < number
    indptr = torch.arange(heads + 1, device=model.device) * number
    call = partial(gather, keys, values, indptr, indices, there)
    calls, knobs = variants(call, tile=(16,) if toy else (8, 16, 32, 64))

    def check(calls: dict[str, Callable]) -> str:
        wanted = reference_gather.gather(keys, values, indptr, indices, there)
        assert bool(wanted[0].any()), "nothing was gathered"
        for name, each in calls.items():
            same = [torch.equal(x, y) for x, y in zip(each(), wanted, strict=True)]
            assert all(same), name
        return "as the reference"

    where = {"row_bytes": model.entry_bytes, "candidates": tokens}
    return Case(
        TOPIC, "gathered lists", tokens, 1, calls, check, tuning=Tuning("gather", where, knobs)
    )


def placed(bench: Bench, tokens: int, number: int, toy: bool) -> Case:
    model, heads = bench.model, bench.model.shape.kv_heads
    k, v = model.random(2, heads, tokens, model.shape.head_dim, seed=1)
    kept = torch.rand(heads, tokens, device=model.device).argsort(-1) < number
    pages = model.permutation(heads * -(-number // heads), seed=2)
    offset = len(pages) * heads
    pool = model.random(2 * offset, model.shape.head_dim, seed=3)
    call = partial(place, pool, k, v, kept, pages, value_offset=offset)
    calls, knobs = variants(call, tile=(16,) if toy else (8, 16, 32, 64))

    def check(calls: dict[str, Callable]) -> str:
        pool.zero_()  # `_fitting` has filled it
        before, wanted = pool.clone(), pool.clone()
        reference_place.place(wanted, k, v, kept, pages, value_offset=offset)
        assert not torch.equal(bits(wanted), bits(before)), "nothing was placed"
        for name, each in calls.items():
            pool.copy_(before)
            each()
            assert torch.equal(bits(pool), bits(wanted)), name
        return "every bit of the pool as after the reference"

    where = {"row_bytes": model.entry_bytes, "candidates": tokens}
    counted = heads * number * 4 * model.entry_bytes
    return Case(
        TOPIC, "placed rows", tokens, 1, calls, check, counted=counted,
        tuning=Tuning("place", where, knobs),
    )  # fmt: skip


def fold(bench: Bench, tokens: int, number: int, toy: bool) -> Case:
    model, shape = bench.model, bench.model.shape
    request = Fold.of(model, tokens, number)

    def call(**options: int) -> torch.Tensor:
        return request.compact_in_place(partial(compact_in_place, **options))

    pieces, tiles = ((64,), (16,)) if toy else ((64, 128, 256), (16, 32, 64, 128))
    calls, knobs = variants(call, piece=pieces, tile=tiles)

    def check(calls: dict[str, Callable]) -> str:
        before = request.storage.clone()
        request.compact_in_place(in_place_reference.compact_in_place)
        wanted = request.storage.clone()
        assert not torch.equal(bits(wanted), bits(before)), "nothing was moved"
        for name, each in calls.items():
            request.storage.copy_(before)
            each()
            assert torch.equal(bits(request.storage), bits(wanted)), name
        return "every bit of the pool as after the reference"

    where = {
        "row_bytes": model.entry_bytes,
        "lists": shape.layers * shape.kv_heads,
        "candidates": request.kept.shape[2],
    }
    return Case(
        TOPIC, f"fold of {TAIL} tokens in place, all layers", tokens, 1, calls, check,
        counted=4 * len(request.moves()[0]) * model.entry_bytes, layers=shape.layers,
        tuning=Tuning("compact_in_place", where, knobs),
    )  # fmt: skip


def selection(bench: Bench, tokens: int, number: int, toy: bool) -> Case:
    keys = sort_keys(bench.model, tokens)
    blocks, programs = ((64,), (4,)) if toy else ((1024, 2048, 4096), (132, 264, 528, 1056))
    calls, knobs = variants(partial(top, keys, number), block=blocks, programs=programs)

    def check(calls: dict[str, Callable]) -> str:
        wanted = reference_top(keys, number)
        for name, each in calls.items():
            assert torch.equal(each(), wanted), name
        return "same sets as torch"

    where = {"rows": keys.shape[0], "keys": tokens}
    return Case(
        TOPIC, "selection", tokens, 1, calls, check, counted=5 * keys.numel(),
        tuning=Tuning("top", where, knobs),
    )  # fmt: skip


def rows(bench: Bench, tokens: int, number: int, toy: bool) -> Case:
    model = bench.model
    tensors = [model.random(tokens, model.hidden, seed=seed) for seed in (1, 2)]
    moved = model.permutation(tokens, seed=3)[: tokens // 5].sort().values

    def both(**options) -> list[torch.Tensor]:
        taken = take_rows(tensors, moved, **options)
        put_rows(tensors, moved, taken, **options)
        return taken

    calls, knobs = variants(both, block=(128,) if toy else (512, 1024, 2048, 4096, 8192))

    def check(calls: dict[str, Callable]) -> str:
        whole = [tensor.clone() for tensor in tensors]
        for name in calls:
            options = knobs.get(name, {})
            taken = take_rows(tensors, moved, **options)
            same = [torch.equal(x, y[moved]) for x, y in zip(taken, whole, strict=True)]
            assert all(same), f"{name}: taken"
            put_rows(tensors, moved, [-x for x in taken], **options)
            for tensor, before in zip(tensors, whole, strict=True):
                wanted = before.clone()
                wanted[moved] = -before[moved]
                assert torch.equal(tensor, wanted), f"{name}: put"
                tensor.copy_(before)
        return "rows taken and put as by indexing"

    row_bytes = model.hidden * tensors[0].element_size()
    return Case(
        TOPIC, "rows", tokens, 1, calls, check, counted=8 * len(moved) * row_bytes,
        tuning=Tuning("rows", {"row_bytes": row_bytes}, knobs),
    )  # fmt: skip


def nearest_kept(bench: Bench, tokens: int, number: int, toy: bool) -> Case:
    model, shape = bench.model, bench.model.shape
    x = model.random(shape.kv_heads, tokens, shape.head_dim, seed=1)
    lists = lists_of(model, tokens, number)
    rows, columns = ((16,), (16,)) if toy else ((32, 64, 128), (32, 64, 128))
    calls, knobs = variants(partial(nearest, x, *lists), rows=rows, columns=columns)

    def check(calls: dict[str, Callable]) -> str:
        # The reference in float64, for some of the dropped entries of every head.
        part = slice(0, min(512, tokens - number))
        few = (lists[0][:, part], lists[1][:, part], lists[2])
        (wanted, _), (all_of_ours, _) = reference_nearest.nearest(x, *few), calls[OURS]()
        for name, each in calls.items():
            found, _ = each()
            assert torch.equal(found[:, part], wanted), name
            assert torch.equal(found, all_of_ours), name
        return "the receivers of the reference, of up to 512 dropped entries per head; all alike"

    where = {"dtype": plain(model.dtype), "head_dim": shape.head_dim, "dropped": tokens - number}
    return Case(TOPIC, "nearest", tokens, 1, calls, check, tuning=Tuning("nearest", where, knobs))


def merged(bench: Bench, tokens: int, number: int, toy: bool) -> Case:
    model, shape = bench.model, bench.model.shape
    x = model.random(shape.kv_heads, tokens, shape.head_dim, seed=1)
    sums = links_of(model, tokens, number)
    receivers, many = ((2,), (16,)) if toy else ((4, 8, 16), (16, 32, 64))
    calls, knobs = variants(partial(merge_rows, x, *sums), receivers=receivers, tile=many)

    def check(calls: dict[str, Callable]) -> str:
        # Sums of this many float64 terms, in another order.
        terms = int(sums[0][2].diff(dim=-1).max()) + 3
        wanted = reference_rows.merge_rows(x, *sums)
        size = reference_rows.merge_rows(x.double().abs(), *sums)
        bound = terms * torch.finfo(torch.float64).eps * size
        held = Checked()
        for name, each in calls.items():
            held.within(each(), wanted, bound, name)
        return str(held)

    where = {"dtype": plain(model.dtype), "head_dim": shape.head_dim, "tokens": tokens}
    return Case(
        TOPIC, "merged rows", tokens, 1, calls, check, tuning=Tuning("merge_rows", where, knobs)
    )


ALL = (compaction, gathered, placed, fold, selection, rows, nearest_kept, merged)
