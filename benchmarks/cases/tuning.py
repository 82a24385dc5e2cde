"""Values of the knobs of kernel wrappers, beside the values that the wrappers choose themselves.

Not among the default topics: `--topics tuning` on a GPU shows which values are fastest there and,
with `--write`, puts them into the file of measured choices (tuned_file.py). Every variant is
checked against the reference before it is timed; if one is wrong the whole case fails.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from kvpolicy.dsl.execute.program import TorchProgram
from kvpolicy.kernels.attention import decode_attention_triton, paged_attention_triton
from kvpolicy.kernels.attention.paged_attention import PairReading
from kvpolicy.kernels.attention.paged_attention_tiles_triton import SplitTile
from kvpolicy.kernels.launch.tuned import plain
from kvpolicy.kernels.table_triton import TRITON
from triton.runtime.errors import OutOfResources

from cases.attention import PAGES, by_pages, checked, exact, ours
from cases.attention_pool import LAYERS, TAIL, Cache
from cases.case import Bench, Case, Checked, Planned, Tuning
from cases.scoring import OURS, Prompt, bound, observed, off, scores
from cases.tuning_moves import ALL, TOPIC, Knobs, named

# Tokens and requests of each decode case.
DECODE = ((65536, 16), (32768, 1), (8192, 64))
TOKENS = 32768
# Queries of a request in the case of paged attention.
QUERIES = 16


def _fitting(case: Case) -> Case:
    """The case without the variants that need more resources than a multiprocessor has."""
    fitting = {name: call for name, call in case.calls.items() if _fits(call)}
    left_out = [name for name in case.calls if name not in fitting]
    notes = [case.note] if case.note else []
    if left_out:
        notes.append(f"too large for a multiprocessor: {'; '.join(left_out)}")
    check = partial(case.check, fitting)
    return replace(case, calls=fitting, check=check, note="; ".join(notes))


def split_kv(
    call: Callable, largest: Callable, toy: bool
) -> tuple[dict[str, Callable], Knobs, str]:
    """Variants of an attention kernel in tiles and cuts of lists, their knobs, and a note.

    Args:
        largest: the call that needs the most of a multiprocessor among those that use the choice;
            a tile that does not fit it must not be chosen.
    """
    tiles = [(16, 4, 2)] if toy else list(product((32, 64, 128), (4, 8), (3, 5, 7)))
    cuts = [{}, *({"programs": n} for n in (2, 4)), *({"splits": n} for n in (4, 16))]
    made, given = {OURS: call}, {}
    fitting = [tile for tile in tiles if _fits(partial(largest, tile=SplitTile(*tile)))]
    for tile, how in product(fitting, cuts):
        chosen = dict(zip(("entries", "warps", "stages"), tile, strict=True)) | how
        name = named(chosen)
        made[name], given[name] = partial(call, tile=SplitTile(*tile), **how), chosen
    large = [str(tile) for tile in tiles if tile not in fitting]
    note = f"entries, warps, stages that do not always fit: {', '.join(large)}" if large else ""
    return made, given, note


def _fits(call: Callable) -> bool:
    try:
        call()
    except OutOfResources:
        return False
    return True


def _decode(bench: Bench, tokens: int, batch: int, toy: bool) -> Case:
    model = bench.model
    cache = Cache(model, tokens, batch, tokens // 8, whole=False)
    rows = cache.tables.counts.shape[0]
    paired = torch.zeros(rows, LAYERS, dtype=torch.int32, device=model.device)
    with_pairs = copy(cache)
    with_pairs.tables = replace(cache.tables, paired=paired)
    calls, knobs, note = split_kv(partial(ours, cache), partial(ours, with_pairs), toy)
    where = {
        "dtype": plain(model.dtype),
        "head_dim": model.shape.head_dim,
        "rows": decode_attention_triton.query_rows(model.shape.group),
        "lists": batch * model.shape.kv_heads,
    }
    return Case(
        TOPIC, "decode attention", tokens, batch, calls, partial(checked, cache),
        counted=cache.ragged_bytes, layers=LAYERS, note=note,
        tuning=Tuning("decode_attention", where, knobs),
    )  # fmt: skip


def reader_case(bench: Bench, tokens: int, batch: int, toy: bool) -> Case:
    """Decode attention by each reader, between two folds.

    Triton's reader uses the choices of the cases before. The note names a reader that is not
    installed or cannot read these heads.
    """
    model = bench.model
    cache = Cache(model, tokens, batch, tokens // 8, whole=False)
    calls, knobs, note = {OURS: partial(ours, cache)}, {}, ""
    try:
        call = by_pages(cache)
        call()
    except Exception as error:  # of another library; the report states it
        why = (str(error).splitlines() or [""])[0][:120]
        note = f"not here: flashinfer ({type(error).__name__}: {why})"
    else:
        calls[PAGES], knobs[PAGES] = call, {"reader": "flashinfer"}
    lists = batch * model.shape.kv_heads
    where = {
        "dtype": plain(model.dtype),
        "head_dim": model.shape.head_dim,
        "group": model.shape.group,
        "lists": lists,
        "entries": -(-int(cache.counts.sum()) // (lists * LAYERS)) + TAIL,
    }
    return Case(
        TOPIC, "decode attention, readers", tokens, batch, calls, partial(checked, cache),
        counted=cache.ragged_bytes, layers=LAYERS, note=note,
        tuning=Tuning("decode_reader", where, knobs),
    )  # fmt: skip


def _paged(bench: Bench, tokens: int, number: int, toy: bool) -> Case:
    """Attention of several new tokens over one request's lists."""
    model, shape = bench.model, bench.model.shape
    queries = 4 if toy else QUERIES
    q = model.random(1, queries, shape.heads, shape.head_dim, seed=1)
    pool = model.random(2 * tokens * shape.kv_heads, shape.head_dim, seed=2)
    lengths = torch.linspace(0.5, 1, shape.kv_heads, device=model.device).mul(tokens).long()
    indptr = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    indices = model.permutation(tokens * shape.kv_heads, seed=3)[: int(indptr[-1])]
    keys, values = pool.split(tokens * shape.kv_heads)
    scale = shape.head_dim**-0.5
    attend = paged_attention_triton.paged_attention
    call = partial(attend, q, keys, values, indptr, indices, scale=scale)
    ones = torch.ones_like(indices, dtype=torch.float32)
    pairs = partial(call, reading=PairReading(indices, ones, ones))
    calls, knobs, note = split_kv(call, pairs, toy)
    rows = paged_attention_triton.query_rows(queries * shape.group, model.dtype, shape.head_dim)
    where = {
        "dtype": plain(model.dtype),
        "head_dim": shape.head_dim,
        "rows": rows,
        "lists": shape.kv_heads * -(-queries * shape.group // rows),
    }

    def check(calls: dict[str, Callable]) -> str:
        held = Checked()
        for name, each in calls.items():
            out = each()
            for head, token in ((0, 0), (shape.kv_heads - 1, queries - 1)):
                own = indices[int(indptr[head]) : int(indptr[head + 1]) - (queries - 1 - token)]
                heads = slice(head * shape.group, (head + 1) * shape.group)
                wanted, bound = exact(q[0, token, heads], keys[own], values[own], scale)
                held.within(out[0, token, heads], wanted, bound, name)
        return f"{held} (float64, two lists of each)"

    return Case(
        TOPIC, f"attention of {queries} new tokens", tokens, 1, calls, check, note=note,
        tuning=Tuning("paged_attention", where, knobs),
    )  # fmt: skip


def _scoring(bench: Bench, tokens: int, window: int, toy: bool) -> Case:
    model = bench.model
    prompt = Prompt(model, tokens, window, 1)
    policy = bound(model, tokens, window, later=True, layers=1)

    def program(report: bool = False, **options) -> TorchProgram:
        def generated(name: str, source: str) -> Callable:
            return partial(TRITON["generated"](name, source), **options)

        table = {**TRITON, "generated": generated}
        return TorchProgram(policy, report=report, kernels=table)

    def check(calls: dict[str, Callable]) -> str:
        exact = observed(TorchProgram(policy, report=True), prompt, 1).finish()
        wanted, worst = scores(exact, 0), off(prompt, 0, torch.float32)
        held = Checked()
        for name in calls:
            finished = observed(program(report=True, **given[name]), prompt, 1).finish()
            held.within(scores(finished, 0), wanted, worst * wanted, name)
        return f"{held} (scores in float64)"

    blocks = (32,) if toy else (16, 32, 64, 128)
    given = {OURS: {}} | {f"{OURS}, block {block}": {"block": block} for block in blocks}
    calls = {
        name: partial(observed, program(**options), prompt, 1) for name, options in given.items()
    }
    counted = tokens * model.shape.kv_heads * model.entry_bytes
    return Case(TOPIC, "scoring of one layer", tokens, 1, calls, check, counted=counted)


def planned(kept: int, window: int, toy: bool) -> list[Planned]:
    """Each kernel at one size, decode attention at three."""
    tokens = 96 if toy else TOKENS
    made = []
    for size in ((96, 2),) if toy else DECODE:
        given = {"tokens": size[0], "batch": size[1], "toy": toy}
        name = "{} x {}".format(*size)
        made.append(_planned(f"decode attention {name}", partial(_decode, **given)))
        readers = _planned(f"readers {name}", partial(reader_case, **given))
        made.append(replace(readers, rank=2, as_chosen=True))
    made.append(_planned("scoring", partial(_scoring, tokens=tokens, window=window, toy=toy)))
    for build in (_paged, *ALL):
        given = partial(build, tokens=tokens, number=min(kept, tokens // 2), toy=toy)
        made.append(_planned(build.__name__.strip("_").replace("_", " "), given))
    return made


def _planned(label: str, build: Callable[[Bench], Case]) -> Planned:
    return Planned(f"tuning {label}", lambda bench: _fitting(build(bench)))
