"""Compiles for an H200 every kernel on the shapes of Llama-3.1-8B, as a server calls it.

Run by test_sm90.py in a process without Triton's interpreter; prints one JSON object.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict

import torch
from kvpolicy.dsl.bind.bind import bind
from kvpolicy.dsl.execute.program import TorchProgram
from kvpolicy.dsl.execute.tensors.kernels import Slots
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.kernels.attention.decode_attention_triton import decode_attention
from kvpolicy.kernels.attention.entry_ids_triton import entry_ids
from kvpolicy.kernels.attention.paged_attention import UNPAIRED, PairReading
from kvpolicy.kernels.attention.paged_attention_triton import paged_attention
from kvpolicy.kernels.attention.private_pages_triton import private_pages
from kvpolicy.kernels.entries.carry_triton import carry
from kvpolicy.kernels.entries.compact_in_place_triton import compact_in_place
from kvpolicy.kernels.entries.compact_layers_triton import compact_layers
from kvpolicy.kernels.entries.gather_triton import gather
from kvpolicy.kernels.entries.place_triton import place
from kvpolicy.kernels.entries.requests import Requests
from kvpolicy.kernels.entries.rotate_triton import rotate
from kvpolicy.kernels.entries.rounding import FLOAT8
from kvpolicy.kernels.entries.rows_triton import put_rows, take_rows
from kvpolicy.kernels.entries.tables import Tables
from kvpolicy.kernels.entries.tally_triton import tally
from kvpolicy.kernels.entries.turn_triton import turn
from kvpolicy.kernels.scoring.best_triton import best
from kvpolicy.kernels.scoring.select_triton import top
from kvpolicy.kernels.scoring.then_triton import then
from kvpolicy.kernels.scoring.whole_triton import whole
from kvpolicy.kernels.table_triton import TRITON
from shipped_policies import shipped_program
from sm90 import compiled

L, H, G, D = 32, 32, 8, 128
E4M3, E5M2 = FLOAT8
N, B, SLOTS = 32768, 16, 1 << 19


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def ids(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return empty(*shape, dtype=dtype)


def selection(rows: int, size: int) -> None:
    top(ids(rows, size, dtype=torch.int32), ids(rows, 1))


def reductions(*shape: int, over: tuple[int, ...]) -> None:
    x, there = empty(*shape, dtype=torch.float64), empty(shape[-1], dtype=torch.bool)
    for name in ("mean", "var", "entropy"):
        for mask in (None, there):
            TRITON[name](x, mask, over)


def ranks() -> None:
    scores = empty(1, N, dtype=torch.float64)
    for size in (N, 80 * G * 131072):  # one row, and all layers of a large model
        TRITON["rank"](ids(1, size, dtype=torch.int32))
    TRITON["keys"](scores, empty(1, N, dtype=torch.bool))
    TRITON["keys"](scores, None)
    for name, dtype in (("var_of_layers", torch.float64), ("any_of_layers", torch.bool)):
        values = [empty(N, dtype=dtype) for _ in range(16)]
        for there in (None, [empty(N, dtype=torch.bool) for _ in values]):
            TRITON[name](values, there, 2)


def compaction(stored: torch.dtype = torch.bfloat16) -> None:
    kept = empty(L, G, N, dtype=torch.bool)
    first = ids(L, G, dtype=torch.int32)
    compact_layers(
        empty(L, 2, SLOTS, G, D, dtype=stored), ids(N), kept, ids(2048, dtype=torch.int32), first
    )


def decode(
    dtype: torch.dtype = torch.bfloat16,
    size: int = D,
    group: int = 4,
    pairs: bool = False,
    stored: torch.dtype | None = None,
) -> None:
    tables = Tables.empty(4097, L, G, SLOTS, "cuda", pairs=pairs)
    rows, lengths = ids(B, dtype=torch.int32), ids(B, dtype=torch.int32)
    storage = empty(L, 2, SLOTS, G, size, dtype=stored or dtype)
    q = empty(B, G * group, size, dtype=dtype)
    table = ids(4097, 131076, dtype=torch.int32)
    requests = Requests(storage, tables, rows, lengths, table)
    decode_attention(q, requests, layer=3, scale=0.1)


def pages() -> None:
    tables, starts = Tables.empty(4097, L, G, SLOTS, "cuda"), ids(L, B * G + 1, dtype=torch.int32)
    storage, made = empty(L, 2, SLOTS, G, D), ids(9000, dtype=torch.int32)
    private_pages(storage, tables, ids(B), starts, made, longest=900)


def lists(
    stored: torch.dtype = torch.bfloat16, tokens: int = 7, kv_heads: int = G, pairs: bool = True
) -> None:
    indices = ids(kv_heads * N)
    pool = empty(SLOTS * kv_heads, D, dtype=stored)
    scales = (empty(kv_heads * N, dtype=torch.float32) for _ in range(2))
    given = (pool, pool, ids(kv_heads + 1), indices)
    reading = PairReading(indices, *scales) if pairs else UNPAIRED
    paged_attention(empty(1, tokens, H, D), *given, scale=0.1, reading=reading)


def folding(stored: torch.dtype = torch.bfloat16) -> None:
    pool, there = empty(SLOTS * G, D, dtype=stored), empty(G, 4096, dtype=torch.bool)
    k, v = gather(pool, pool, ids(G + 1), ids(G * 4096), there)
    k = rotate(k, ids(G, 4096), empty(D // 2, dtype=torch.float32))
    place(pool, k, v, there, ids(4096), value_offset=SLOTS)


def settling(
    dtype: torch.dtype = torch.bfloat16, size: int = D, layers: int = L, flags: int = 1
) -> None:
    tables = Tables.empty(4097, layers, G, SLOTS, "cuda")
    slots = ids(4097, 131076, dtype=torch.int32)
    kept, there = (empty(layers * G, 2064, dtype=torch.bool) for _ in range(2))
    storage = empty(layers, 2, SLOTS, G, size, dtype=dtype)
    requests = Requests(storage, tables, ids(1), ids(1), slots)
    compact_in_place(requests, kept, there, empty(1, flags, dtype=torch.bool))


def together(dtype: torch.dtype = torch.bfloat16, size: int = D) -> None:
    """Kernels of a fold of B requests, all layers."""
    tables, width, lists = Tables.empty(4097, L, G, SLOTS, "cuda"), 2064, B * L * G
    slots, storage = ids(4097, 131076, dtype=torch.int32), empty(L, 2, SLOTS, G, size, dtype=dtype)
    kept, there = (empty(lists, width, dtype=torch.bool) for _ in range(2))
    score, proceed = empty(lists, width, dtype=torch.float64), empty(B, L, dtype=torch.bool)
    where = Requests(storage, tables, ids(B), ids(B), slots)
    entry_ids(where, there)
    for present in (None, kept):
        best(score, present, there, ids(B, 3))
    best(None, None, there, ids(B, 3))
    for present, in_all in ((None, True), (kept, False)):
        then(kept, score, present, there, score[:, 0].contiguous(), in_all=in_all)
    whole(score[:, 0])
    tally(kept, there, empty(lists, dtype=torch.bool), ids(B * L, 3 + 2 * G), G)
    tally(kept, there, None, None, G)
    positions = ids(B * L, width)
    state = score[:, None]
    for states in ([], [state], [state, state], [state.expand(-1, 2, -1)]):
        fresh = [0.0] * len(states)
        carry(kept, None, positions, ids(B * L), ids(B), states, fresh, steps=16, width=width)
    for interleaved in (False, True):
        frequencies = empty(size // 2, dtype=torch.float64)
        turn(where, kept, there, proceed, frequencies, interleaved=interleaved)


def rows() -> None:
    whole = [empty(N, 4096), empty(N, 4096), ids(N)]
    put_rows(whole, ids(5000), take_rows(whole, ids(5000)))


def merging(stored: torch.dtype = torch.bfloat16) -> None:
    x, stays = empty(G, N, D, dtype=stored), empty(G, N, dtype=torch.bool)
    places, real, *_ = TRITON["following"](stays, stays, 30000, 0)
    receivers, found = TRITON["nearest"](x, places, real, stays)
    TRITON["inner_products"](x, places, real, receivers, found)
    numbers = [empty(G, size, dtype=torch.float64) for size in (30000, N, N)]
    offsets = ids(G, N + 1, dtype=torch.int32)
    links = (ids(G, 30000), numbers[0], offsets)
    for own, divide in (numbers[1:], (None, None)):
        TRITON["merge_rows"](x, links, own, divide)
        TRITON["merge_mass"](links, own)
    TRITON["members"](links)
    TRITON["links"](places, receivers[..., None], found[..., None], real, numbers[0], N)


def merging_together(dtype: torch.dtype = torch.bfloat16, size: int = D) -> None:
    """Kernels that merge in a fold of B requests: 16 entries per list, each into the next 16."""
    width, lists, number = 2064, B * L * G, 16
    pool, row_ids = empty(SLOTS * G, size, dtype=dtype), ids(lists, width)
    there = empty(lists, width, dtype=torch.bool)
    TRITON["finite"](pool, pool, row_ids, there)
    TRITON["draws"](0, ids(B * L, width), ids(B), G)
    places, real, *found = TRITON["following"](there, there, number, number)
    heat = empty(lists, width, dtype=torch.float64)
    TRITON["target"](heat, *found)
    weights = empty(1, dtype=torch.float64)[0].expand(lists, number)
    links = TRITON["links"](places, *found, real, weights, width)
    receivers, joins = TRITON["nearest"](pool, places, real, there, row_ids)
    compared = TRITON["inner_products"](pool, places, real, receivers, joins, row_ids)
    mean = TRITON["means"](compared[3], real, G)
    TRITON["means_of_columns"](compared[3], real, G)
    TRITON["updated_where_left"](mean, mean, real, G)
    one = empty(1, dtype=torch.float64)[0].expand(lists, width)
    TRITON["members"](links)
    for proceed in (empty(B, L, dtype=torch.bool), empty(B, 1, dtype=torch.bool)):
        for sums in ((one, heat), (None, None)):
            TRITON["merge_entries"](pool, row_ids, links, *sums, proceed)


def sharing(stored: torch.dtype = torch.bfloat16) -> None:
    below, own = empty(G, N, D, dtype=stored), empty(G, N, D, dtype=stored)
    TRITON["gram"](below, own)
    TRITON["blend"](below, own, *(empty(G, N, dtype=torch.float64) for _ in range(2)))


def decided(
    policy: str,
    tokens: int = N,
    stored: torch.dtype = torch.bfloat16,
    group: int = H // G,
    **settings: str,
) -> None:
    """A prefill of two layers up to the kept entries; nothing may wait for the device."""
    heads = G * group
    bound = bind(shipped_program(policy), ModelShape(2, heads, G, D), settings)
    run = TorchProgram(bound, kernels=TRITON).start(tokens)
    for layer in range(2):
        scale = empty(G, dtype=torch.float32) if stored in FLOAT8 else None
        pools = (empty(SLOTS, G, D, dtype=stored) for _ in range(2))
        k, v = (Slots(pool[None], ids(tokens), scale) for pool in pools)
        run.observe(layer, empty(heads, run.queries, D), k, v)
    run.finish(wait=False)


CASES: dict[str, Callable[[], object]] = {
    "selection per head": lambda: selection(G, N),
    "selection in a short row": lambda: selection(L * G, 4096),
    "reductions over tokens": lambda: reductions(G, N, over=(0, 1)),
    "reductions over heads": lambda: reductions(G, 4, N, over=(0, 1)),
    "reductions over strided tokens": lambda: reductions(N, 128, over=(0,)),
    "ranks and their variance over layers": ranks,
    "compaction": compaction,
    "decode attention": decode,
    "decode attention, fp16, D 64, no groups": lambda: decode(torch.float16, 64, 1),
    "decode attention, bf16, D 80, groups of 8": lambda: decode(size=80, group=8),
    "decode attention, fp32, D 80, groups of 8": lambda: decode(torch.float32, 80, 8),
    "decode attention, D 256": lambda: decode(size=256, group=2),
    "decode attention, layers in pairs": lambda: decode(pairs=True),
    "decode attention, layers in pairs, no groups": lambda: decode(group=1, pairs=True),
    "decode attention, layers in pairs, groups of 7": lambda: decode(group=7, pairs=True),
    "decode attention, layers in pairs, D 256": lambda: decode(size=256, group=2, pairs=True),
    "pages of lists": pages,
    "attention over lists with lengths": lists,
    "attention over lists, 32 query rows": lambda: lists(tokens=8, pairs=False),
    "attention over lists, one KV head": lambda: lists(tokens=1, kv_heads=1, pairs=False),
    "attention over lists with lengths, one KV head": lambda: lists(tokens=1, kv_heads=1),
    "gathering, rotation, placing": folding,
    "fold in place": settling,
    "fold in place, 16 layers": lambda: settling(layers=16, flags=16),
    "fold in place, fp32, D 80": lambda: settling(torch.float32, 80),
    "fold in place, fp16, D 256": lambda: settling(torch.float16, 256),
    "folds of requests together": together,
    "folds of requests together, fp32, D 256": lambda: together(torch.float32, 256),
    "merging in the pool": merging_together,
    "merging in the pool, fp32, D 80": lambda: merging_together(torch.float32, 80),
    "compaction, fp8": lambda: compaction(E4M3),
    "decode attention, e4m3": lambda: decode(stored=E4M3),
    "decode attention, e5m2, fp16, groups of 8": lambda: decode(
        torch.float16, group=8, stored=E5M2
    ),
    "decode attention, e4m3, D 256": lambda: decode(size=256, group=2, stored=E4M3),
    "decode attention, e4m3, layers in pairs": lambda: decode(pairs=True, stored=E4M3),
    "attention over lists with lengths, e4m3": lambda: lists(E4M3),
    "gathering, rotation, placing, e4m3": lambda: folding(E4M3),
    "gathering, rotation, placing, e5m2": lambda: folding(E5M2),
    "fold in place, fp8, D 80": lambda: settling(E4M3, 80),
    "folds of requests together, e4m3": lambda: together(E4M3),
    "merging in the pool, e4m3": lambda: merging_together(E4M3),
    "merging, e5m2": lambda: merging(E5M2),
    "sharing, e4m3": lambda: sharing(E4M3),
    "snapkv, e4m3": lambda: decided("snapkv", stored=E4M3),
    "lava, e5m2": lambda: decided("lava", stored=E5M2),
    "h2o, e4m3": lambda: decided("h2o", stored=E4M3),
    "rows of hidden states": rows,
    "merging": merging,
    "sharing": sharing,
    "snapkv": lambda: decided("snapkv"),
    "lava": lambda: decided("lava"),
    "cake": lambda: decided("cake"),
    "d2o-code": lambda: decided("d2o-code"),
    "simlayerkv-prefill": lambda: decided("simlayerkv-prefill"),
    "h2o": lambda: decided("h2o"),
    "h2o, a million tokens, groups of 8": lambda: decided("h2o", tokens=1 << 20, group=8),
    "d2o": lambda: decided("d2o"),
}


def main() -> None:
    json.dump(
        {name: [asdict(x) for x in compiled(call)] for name, call in CASES.items()}, sys.stdout
    )


if __name__ == "__main__":
    main()
