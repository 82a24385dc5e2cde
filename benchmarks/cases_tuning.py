"""The knobs that the kernels' wrappers take, beside their defaults, which were not measured.

Not among the default topics: `--topics tuning` on a GPU says which defaults to change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from attention_pool import LAYERS, Cache
from cases import Bench, Case, Planned, within
from cases_attention import checked, ours
from cases_memory import bits, prompt_of, sort_keys
from cases_merging import links_of, lists_of
from cases_scoring import OURS, Prompt, bound, observed, off, scores
from kvpolicy.dsl.torch_program import TorchProgram
from kvpolicy.kernels.compact_layers_triton import compact_layers
from kvpolicy.kernels.merge_rows_triton import merge_rows
from kvpolicy.kernels.nearest_triton import nearest
from kvpolicy.kernels.paged_attention_tiles_triton import Tile
from kvpolicy.kernels.rows_triton import put_rows, take_rows
from kvpolicy.kernels.select_triton import top
from kvpolicy.kernels.table import TRITON
from triton.runtime.errors import OutOfResources

# Tokens and requests of each decode case.
DECODE = ((65536, 16), (32768, 1), (8192, 64))
TOKENS = 32768
TOPIC = "tuning"


def _variants(call: Callable, **knobs: Sequence) -> dict[str, Callable]:
    """The call with its defaults, then with every combination of the knobs' values."""
    made = {OURS: call}
    for values in product(*knobs.values()):
        given = dict(zip(knobs, values, strict=True))
        name = ", ".join(f"{knob} {value}" for knob, value in given.items())
        made[f"{OURS}, {name}"] = partial(call, **given)
    return made


def _fitting(case: Case) -> Case:
    """The case without the variants that need more of a multiprocessor than it has."""
    fitting, left_out = {}, []
    for name, call in case.calls.items():
        try:
            call()
        except OutOfResources:
            left_out.append(name)
        else:
            fitting[name] = call
    note = f"too large for a multiprocessor: {'; '.join(left_out)}" if left_out else ""
    return replace(case, calls=fitting, check=partial(case.check, fitting), note=note)


def _equal(calls: dict[str, Callable]) -> str:
    """That every variant gives what the default gives."""
    wanted = calls[OURS]()
    for name, call in calls.items():
        found = call()
        pairs = zip(found, wanted, strict=True) if isinstance(found, list) else [(found, wanted)]
        assert all(torch.equal(x, y) for x, y in pairs), name
    return "all alike"


def _decode(bench: Bench, tokens: int, batch: int, toy: bool) -> Case:
    cache = Cache(bench.model, tokens, batch, tokens // 8, whole=False)
    calls = {OURS: partial(ours, cache)}
    for splits in (2,) if toy else (1, 2, 4, 8, 16, 32, 64):
        calls[f"{OURS}, splits {splits}"] = partial(ours, cache, splits=splits)
    for tile in [(16, 4, 2)] if toy else product((32, 64, 128), (4, 8), (3, 5, 7)):
        name = "{}, tile of {}, warps {}, stages {}".format(OURS, *tile)
        calls[name] = partial(ours, cache, tile=Tile(*tile))
    return Case(
        TOPIC, "decode attention", tokens, batch, calls, partial(checked, cache),
        counted=cache.ragged_bytes, layers=LAYERS,
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
        exact = observed(TorchProgram(policy, report=True), prompt, 1)
        exact.finish()
        wanted, worst = scores(exact, 0), off(prompt, 0, torch.float32)
        for name in calls:
            run = observed(program(report=True, **given[name]), prompt, 1)
            run.finish()
            within(scores(run, 0), wanted, worst * wanted, name)
        return f"scores within {worst:.1e} of float64"

    blocks = (32,) if toy else (16, 32, 64, 128)
    given = {OURS: {}} | {f"{OURS}, block {block}": {"block": block} for block in blocks}
    calls = {
        name: partial(observed, program(**options), prompt, 1) for name, options in given.items()
    }
    counted = tokens * model.shape.kv_heads * model.entry_bytes
    return Case(TOPIC, "scoring of one layer", tokens, 1, calls, check, counted=counted)


def _compaction(bench: Bench, tokens: int, number: int, toy: bool) -> Case:
    model = bench.model
    storage, inputs = prompt_of(model, tokens, number)
    call = partial(compact_layers, storage, *inputs)
    parts, tiles = ((64,), (16,)) if toy else ((1024, 4096, 16384), (8, 16, 32, 64))
    calls = _variants(call, part=parts, tile=tiles)

    def check(calls: dict[str, Callable]) -> str:
        storage[:, :, inputs[2]] = 0  # the private slots, filled when it was seen whether all fit
        before = storage.clone()
        call()
        wanted = storage.clone()
        assert not torch.equal(bits(wanted), bits(before)), "nothing was copied"
        for name, each in calls.items():
            storage.copy_(before)
            each()
            assert torch.equal(bits(storage), bits(wanted)), name
        return "all alike"

    counted = model.shape.layers * model.shape.kv_heads * number * 4 * model.entry_bytes
    return Case(
        TOPIC, "compaction, all layers", tokens, 1, calls, check,
        counted=counted, layers=model.shape.layers,
    )  # fmt: skip


def _selection(bench: Bench, tokens: int, number: int, toy: bool) -> Case:
    keys = sort_keys(bench.model, tokens)
    blocks, programs = ((64,), (4,)) if toy else ((1024, 2048, 4096), (132, 264, 528, 1056))
    calls = _variants(partial(top, keys, number), block=blocks, programs=programs)
    return Case(TOPIC, "selection", tokens, 1, calls, _equal, counted=5 * keys.numel())


def _rows(bench: Bench, tokens: int, number: int, toy: bool) -> Case:
    model = bench.model
    tensors = [model.random(tokens, model.hidden, seed=seed) for seed in (1, 2)]
    rows = model.permutation(tokens, seed=3)[: tokens // 5].sort().values

    def both(**options) -> list[torch.Tensor]:
        taken = take_rows(tensors, rows, **options)
        put_rows(tensors, rows, taken, **options)
        return taken

    calls = _variants(both, block=(128,) if toy else (512, 1024, 2048, 4096, 8192))
    counted = 4 * len(rows) * 2 * model.hidden * tensors[0].element_size()
    return Case(TOPIC, "rows", tokens, 1, calls, _equal, counted=counted)


def _nearest(bench: Bench, tokens: int, number: int, toy: bool) -> Case:
    model = bench.model
    x = model.random(model.shape.kv_heads, tokens, model.shape.head_dim, seed=1)
    call = partial(nearest, x, *lists_of(model, tokens, number))
    rows, columns = ((16,), (16,)) if toy else ((32, 64, 128), (32, 64, 128))
    calls = _variants(call, rows=rows, columns=columns)
    return Case(TOPIC, "nearest", tokens, 1, calls, _equal)


def _merged(bench: Bench, tokens: int, number: int, toy: bool) -> Case:
    model = bench.model
    x = model.random(model.shape.kv_heads, tokens, model.shape.head_dim, seed=1)
    links = links_of(model, tokens, number)
    call = partial(merge_rows, x, *links)
    receivers, many = ((2,), (16,)) if toy else ((4, 8, 16), (16, 32, 64))
    calls = _variants(call, receivers=receivers, links=many)

    def check(calls: dict[str, Callable]) -> str:
        # The order of sums may differ.
        wanted, size = call(), merge_rows(x.double().abs(), *links)
        bound = (tokens + 3) * torch.finfo(torch.float64).eps * size
        for name, each in calls.items():
            within(each(), wanted, bound, name)
        return "all alike but for the order of sums"

    return Case(TOPIC, "merged rows", tokens, 1, calls, check)


def planned(kept: int, window: int, toy: bool) -> list[Planned]:
    """Each kernel at one size, decode attention at three."""
    tokens = 96 if toy else TOKENS
    made = []
    for size in ((96, 2),) if toy else DECODE:
        given = partial(_decode, tokens=size[0], batch=size[1], toy=toy)
        made.append(_planned("decode attention {} x {}".format(*size), given))
    made.append(_planned("scoring", partial(_scoring, tokens=tokens, window=window, toy=toy)))
    for build in (_compaction, _selection, _rows, _nearest, _merged):
        given = partial(build, tokens=tokens, number=min(kept, tokens // 2), toy=toy)
        made.append(_planned(build.__name__.strip("_"), given))
    return made


def _planned(label: str, build: Callable[[Bench], Case]) -> Planned:
    return Planned(f"tuning {label}", lambda bench: _fitting(build(bench)))
