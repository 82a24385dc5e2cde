"""Decode attention straight from the device tables, against float64 over the logical lists."""

from dataclasses import replace

import pytest
import torch
from decode_cases import Case, assert_exact
from kvpolicy.dsl.tools.launches import Observed
from kvpolicy.kernels.attention import decode_attention_triton, paged_attention_tiles_triton
from kvpolicy.kernels.attention.decode_attention import decode_attention
from kvpolicy.kernels.attention.paged_attention_tiles_triton import (
    Cut,
    SplitTile,
    Workspace,
    cut,
    programs_at_once,
    tile_of,
)
from kvpolicy.kernels.entries.requests import Requests
from kvpolicy.kernels.entries.rounding import FLOAT8
from kvpolicy.kernels.entries.tables import Tables
from kvpolicy.kernels.launch import occupancy
from triton.runtime import interpreter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
decode_triton = decode_attention_triton.decode_attention
IMPLEMENTATIONS = [decode_attention, decode_triton]


def case(
    requests, *, heads, kv_heads, size=64, dtype=torch.float32, stored=None, layers=3, layer=1,
    seed=0,
):  # fmt: skip
    """A pool with these requests.

    Args:
        requests: per request None (the padding row, length 1) or (entries per KV head in private
            pages or None, tokens of the tail).
        dtype: dtype of queries.
        stored: dtype of keys and values, by default the same.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(n):
        return torch.randint(n, (), generator=generator).item()

    counts, tails = [], []
    for request in requests:
        private, tail = (None, 1) if request is None else request
        every = torch.randint(5, (layers, kv_heads), generator=generator)
        every[layer] = torch.tensor(private if private else [0] * kv_heads)
        counts.append(every if private else every * 0)
        tails.append(tail)
    pages = [(-(-c // kv_heads)) for c in counts]
    needed = [-(-int(p.sum()) // layers) for p in pages]
    padded = sum(needed) + sum(tails) + 3
    free = (torch.randperm(padded - 1, generator=generator) + 1).tolist()  # slot 0: nobody's

    total_rows = len(requests) + 3
    context = max(tails) + 40
    stored = stored or dtype
    storage = torch.full((layers, 2, padded, kv_heads, size), float("nan"), dtype=stored)
    tables = Tables.empty(total_rows, layers, kv_heads, sum(needed) + 2 * len(requests) + 2, "cpu")
    # What belongs to no request of the batch reads far too much of what nobody wrote.
    for tensor in (tables.counts, tables.first_page):
        tensor.fill_(7)
    table = torch.zeros(total_rows, context, dtype=torch.int32)
    free_rows = (torch.randperm(total_rows - 1, generator=generator) + 1).tolist()
    rows, lengths, lists, at = [], [], [], 1
    for request, count, page, slots, tail in zip(
        requests, counts, pages, needed, tails, strict=True
    ):
        row = 0 if request is None else free_rows.pop()
        own = [free.pop() for _ in range(slots)]
        start = 5 + random(30) if slots else 0
        tables.counts[row] = count
        first = (page.flatten().cumsum(0) - page.flatten()).view(page.shape)
        tables.first_page[row] = first
        tables.tail_start[row], tables.slots_start[row] = start, at
        tables.slots[at : at + slots] = torch.tensor(own, dtype=torch.int32)
        at += slots + 1
        ordinary = torch.tensor([free.pop() for _ in range(tail)], dtype=torch.int64)
        table[row, start : start + tail] = ordinary
        rows.append(row)
        lengths.append(start + tail)
        written = []
        for g in range(kv_heads):
            n = int(count[layer, g])
            kv = torch.randn(2, n + tail, size, generator=generator).to(stored)
            j = torch.arange(n)
            number = first[layer, g] + j // kv_heads
            slot = torch.tensor(own or [0])[number // layers]
            for which in range(2):
                storage[number % layers, which, slot, j % kv_heads] = kv[which, :n]
                storage[layer, which, ordinary, g] = kv[which, n:]
            written.append(kv.double())
        lists.append(written)
    q = torch.randn(len(requests), heads, size, generator=generator).to(dtype)
    on = {"device": DEVICE}
    return Case(
        q.to(**on),
        storage.to(**on),
        Tables(*(t.to(**on) for t in vars(tables).values())),
        torch.tensor(rows, **on),
        torch.tensor(lengths, **on),
        table.to(**on),
        layer,
        lists,
    )


SHAPES = [  # requests, heads, kv_heads, size, dtype
    ([([0, 1], 0), ([63, 64], 1), None, (None, 63)], 2, 2, 64, torch.float32),
    ([([1000, 3], 63), (None, 1)], 4, 2, 80, torch.float16),
    ([([4097], 1), ([1], 1000)], 4, 1, 128, torch.bfloat16),
    ([([1000], 40), (None, 4097)], 8, 1, 128, torch.float32),
    ([([16, 8, 9, 7, 0, 1, 63, 200], 5)], 64, 8, 128, torch.bfloat16),
    ([([1, 2, 3, 4], 1), (None, 2)], 16, 4, 96, torch.float16),
    ([([5, 70], 9), None], 8, 2, 256, torch.bfloat16),
    ([([130], 9)], 1, 1, 256, torch.float32),
    ([([9, 5, 1], 12), (None, 70)], 21, 3, 128, torch.float16),
]


@pytest.mark.slow
@pytest.mark.parametrize("attention", IMPLEMENTATIONS)
@pytest.mark.parametrize(("requests", "heads", "kv_heads", "size", "dtype"), SHAPES)
def test_equals_attention_in_float64(attention, requests, heads, kv_heads, size, dtype):
    given = case(requests, heads=heads, kv_heads=kv_heads, size=size, dtype=dtype)
    assert_exact(given.run(attention), given)


@pytest.mark.parametrize("attention", IMPLEMENTATIONS)
@pytest.mark.parametrize("stored", FLOAT8)
@pytest.mark.parametrize(
    ("heads", "size", "dtype"),
    [(4, 64, torch.float32), (6, 80, torch.bfloat16), (2, 7, torch.float16)],
)
def test_entries_of_8_bits(attention, stored, heads, size, dtype):
    options = {"heads": heads, "kv_heads": 2, "size": size, "dtype": dtype, "stored": stored}
    given = case([([63, 9], 3), None, (None, 30), ([0, 0], 0), ([1, 130], 0)], **options)
    assert_exact(given.run(attention), given)
    # Another order of the batch changes nothing.
    back = given.run(attention, order=[4, 3, 2, 1, 0])
    assert_exact(back.flip(0), given)


MIXED = [([40, 9], 3), None, (None, 30), ([0, 0], 0), ([1, 130], 0), (None, 1)]


@pytest.mark.parametrize("attention", IMPLEMENTATIONS)
def test_a_request_without_entries_gives_zeros(attention):
    given = case(MIXED, heads=4, kv_heads=2)
    out = given.run(attention)
    assert out[3].abs().max() == 0
    assert bool(out[[0, 1, 2, 4, 5]].abs().amin((1, 2)).gt(0).all())


@pytest.mark.parametrize("attention", IMPLEMENTATIONS)
@pytest.mark.parametrize("layer", [0, 2])
def test_other_layers(attention, layer):
    given = case(MIXED, heads=4, kv_heads=2, layer=layer, seed=layer)
    assert_exact(given.run(attention), given)


@pytest.mark.parametrize("attention", IMPLEMENTATIONS)
def test_tables_are_read_when_it_runs(attention):
    """The same tensors with a request that has left its private pages."""
    given = case(MIXED, heads=4, kv_heads=2)
    row = given.rows[0]
    given.tables.counts[row] = 0
    given.tables.tail_start[row] = given.lengths[0] - 2
    given.lists[0] = [kv[:, -2:] for kv in given.lists[0]]
    assert_exact(given.run(attention), given)


@pytest.mark.slow
@pytest.mark.parametrize("splits", [None, 1, 2, 7, 40])
def test_splits_agree(splits):
    requests = [([1200, 63], 3), None, (None, 129), ([0, 0], 0), ([1, 64], 70)]
    given = case(requests, heads=4, kv_heads=2, size=16)
    tile = SplitTile(entries=32, warps=4, stages=2)
    assert_exact(given.run(decode_triton, splits=splits, tile=tile), given)


@pytest.mark.parametrize("splits", [None, 3])
def test_rows_do_not_depend_on_their_order(splits):
    given = case(MIXED, heads=4, kv_heads=2)
    out = given.run(decode_triton, splits=splits)
    order = [4, 2, 0, 5, 3, 1]
    assert torch.equal(given.run(decode_triton, order, splits=splits), out[order])


def test_with_given_splits_a_request_depends_on_itself_alone():
    given = case(MIXED, heads=4, kv_heads=2)
    out = given.run(decode_triton, splits=3)
    for b in range(len(MIXED)):
        assert torch.equal(given.run(decode_triton, [b], splits=3)[0], out[b])


def test_int32_rows_and_lengths():
    given = case(MIXED, heads=4, kv_heads=2)
    out = given.run(decode_triton)
    given.rows, given.lengths = given.rows.int(), given.lengths.int()
    assert torch.equal(given.run(decode_triton), out)


def workspace_of(requests, *, heads=4, kv_heads=2, size=64, splits=None):
    """One in which everything that may be anything is NaN."""
    given = (requests, heads, kv_heads, size, torch.device(DEVICE), splits)
    workspace = Workspace.empty(decode_attention_triton.workspace_elements(*given), DEVICE)
    workspace.partial.fill_(float("nan"))
    return workspace


@pytest.mark.thorough(every=3)
@pytest.mark.parametrize("splits", [None, 5, 33])
def test_one_workspace_serves_every_smaller_batch(splits):
    """Again and again: calls find and leave its counts at zero."""
    given = case(MIXED, heads=4, kv_heads=2)
    workspace = workspace_of(len(MIXED), splits=splits)
    for order in ([0, 1, 2, 3, 4, 5], [3], [4, 0], [3, 1], [5, 4, 3, 2, 1, 0]):
        alone = given.run(decode_triton, order, splits=splits)
        for _ in range(2):
            got = given.run(decode_triton, order, splits=splits, workspace=workspace)
            assert torch.equal(got, alone)
            assert not workspace.arrived.any()
            workspace.partial.fill_(float("nan"))


def test_it_is_one_launch_and_nothing_else(monkeypatch):
    """In a captured graph, with its workspace: beside it there is but the result's memory."""
    given, workspace = case(MIXED, heads=4, kv_heads=2), workspace_of(len(MIXED), splits=33)
    grids = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *_, **__: grids.append(grid)

    monkeypatch.setattr(decode_attention_triton, "_decode", Kernel())
    tensors = (given.storage, given.tables, given.rows, given.lengths, given.req_to_token)
    with Observed() as seen:
        decode_triton(
            given.q, Requests(*tensors), layer=1, scale=0.1, splits=33, workspace=workspace
        )
    assert grids == [(2, len(MIXED), 33)]
    assert seen.device == 1


@pytest.mark.parametrize(("part", "dtype"), [("partial", "float32"), ("arrived", "int32")])
def test_a_workspace_too_small_is_named(part, dtype):
    given, workspace = case(MIXED, heads=4, kv_heads=2), workspace_of(len(MIXED), splits=5)
    small = replace(workspace, **{part: getattr(workspace, part)[:9]})
    with pytest.raises(ValueError, match=rf"workspace.{part}: expected torch.{dtype} \[>= "):
        given.run(decode_triton, splits=5, workspace=small)


def test_too_many_splits_are_refused():
    with pytest.raises(ValueError, match="splits: expected 1 to 256, got 257"):
        case(MIXED, heads=4, kv_heads=2).run(decode_triton, splits=257)


LONG = [([1200, 63], 3), None, ([530, 1], 300), ([0, 0], 0), ([1, 16], 0)]


@pytest.mark.thorough(besides=["17"])
@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU's programs end in an order of their own")
@pytest.mark.parametrize("splits", [3, 16, 17, 40])
def test_whichever_program_ends_last_merges(splits, monkeypatch):
    """Bit for bit the same, of up to 40 splits in three groups."""
    given = case(LONG, heads=6, kv_heads=2, size=16)
    options = {"splits": splits, "tile": SplitTile(entries=16, warps=4, stages=2)}
    in_order = given.run(decode_triton, **options)
    assert_exact(in_order, given)
    programs = interpreter.interpreter_builder
    launch = programs.set_grid_idx
    generator = torch.Generator().manual_seed(splits)
    for _ in range(3):
        order = torch.randperm(splits, generator=generator).tolist()
        monkeypatch.setattr(
            programs, "set_grid_idx", lambda x, y, z, order=order: launch(x, y, order[z])
        )
        workspace = workspace_of(len(LONG), heads=6, size=16, splits=splits)
        got = given.run(decode_triton, **options, workspace=workspace)
        assert torch.equal(got, in_order)
        assert not workspace.arrived.any()


def test_long_lists_get_more_shares(monkeypatch):
    """As many splits in all as were asked for, and one per list for rounding."""
    requests = [([1500, 100], 0), (None, 1), ([400, 0], 0)]
    given = case(requests, heads=2, kv_heads=2, size=16)
    found = Cut(splits=16, target_splits=12)
    monkeypatch.setattr(paged_attention_tiles_triton, "cut", lambda *_: found)
    workspace = workspace_of(3, heads=2, size=16)
    tile = SplitTile(entries=32, warps=4, stages=2)
    assert_exact(given.run(decode_triton, workspace=workspace, tile=tile), given)
    used = workspace.partial[6 * 16 * 16 :].view(6, 16).isfinite().sum(1).tolist()
    # 2,002 entries: splits of 167 at most, in whole tiles 192, 128 and so on.
    assert used == [8, 1, 1, 1, 3, 0]


def test_the_cut_of_an_h200_holds_its_shares_and_little_memory(monkeypatch):
    monkeypatch.setattr(paged_attention_tiles_triton, "processors", lambda device: 132)
    hopper = occupancy.Processor(1 << 16, 228 << 10, warps=64, programs=32)
    monkeypatch.setattr(occupancy, "processor", lambda device: hopper)
    device = torch.device("cuda")
    tile = tile_of(128, torch.bfloat16, 16)
    programs = programs_at_once("decode_attention", device, torch.bfloat16, 128, 16, tile)
    assert programs == 3
    for lists in range(1, 3000):
        found = cut(lists, device, programs)
        assert 1 <= found.splits <= 256
        # Lists of one length get what they are due.
        assert found.splits * lists >= min(found.target_splits, 256)
        if lists <= 198:
            assert found.target_splits + lists <= 3 * 132  # rounded up, they still run at once
    of_llama = decode_attention_triton.workspace_elements(256, 32, 8, 128, device)
    assert (
        Workspace.empty(of_llama, "meta").nbytes < 17 * 2**20
    )  # with entries of 8 bits, of which six programs may fit


@pytest.mark.parametrize("attention", IMPLEMENTATIONS)
def test_entries_beyond_int32(attention):
    """Head size 1: the keys of the last layer begin beyond entry 2^31.

    On a CPU only the written pages of this pool of 5 GB take memory.
    """
    layers, kv_heads, private, tail = 8, 8, 24, 16
    padded = 2**31 // (2 * (layers - 1) * kv_heads) + 64
    storage = torch.empty((layers, 2, padded, kv_heads, 1), dtype=torch.float16, device=DEVICE)
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(2, kv_heads, private + tail, 1, generator=generator).half()
    tables = Tables.empty(3, layers, kv_heads, 3, "cpu")
    tables.slots[:] = torch.arange(padded - 3, padded)  # 24 pages: 3 of each head
    tables.counts[2, -1], tables.tail_start[2] = private, 50
    tables.first_page[2, -1] = 3 * torch.arange(kv_heads)
    table = torch.zeros(3, 70, dtype=torch.int32)
    table[2, 50:66] = torch.arange(padded - 30, padded - 30 + tail)
    for g in range(kv_heads):
        for j in range(private):
            slot, layer = divmod(3 * g + j // kv_heads, layers)
            storage[layer, :, padded - 3 + slot, j % kv_heads] = kv[:, g, j].to(DEVICE)
        storage[-1, :, padded - 30 : padded - 30 + tail, g] = kv[:, g, private:].to(DEVICE)
    given = Case(
        torch.randn(1, kv_heads, 1, generator=generator).half().to(DEVICE),
        storage,
        Tables(*(t.to(DEVICE) for t in vars(tables).values())),
        torch.tensor([2], device=DEVICE),
        torch.tensor([66], device=DEVICE),
        table.to(DEVICE),
        layers - 1,
        [[kv[:, g].double() for g in range(kv_heads)]],
    )
    assert_exact(given.run(attention), given)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs an NVIDIA GPU")
def test_a_captured_graph_reads_the_tables_of_the_day():
    given = case(MIXED, heads=4, kv_heads=2, size=128, dtype=torch.bfloat16)
    workspace = workspace_of(len(MIXED), size=128)
    given.run(decode_triton, workspace=workspace)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_triton(
            given.q,
            given.storage,
            given.tables,
            given.rows,
            given.lengths,
            given.req_to_token,
            layer=given.layer,
            scale=128**-0.5,
            workspace=workspace,
        )
    for _ in range(100):
        graph.replay()
        assert torch.equal(out, given.run(decode_triton))
        assert not workspace.arrived.any()
    row = given.rows[0].item()
    given.tables.counts[row] = 0
    given.tables.tail_start[row] = given.lengths[0] - 2
    given.lists[0] = [kv[:, -2:] for kv in given.lists[0]]
    graph.replay()
    assert_exact(out, given)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("splits", [16, 17, 256])
def test_programs_that_end_at_once_are_all_merged(splits):
    """Again and again, of many lists: whoever ends last sees what all others have left."""
    given = case([([30000, 5000], 40)] * 8, heads=8, kv_heads=2, size=128, dtype=torch.bfloat16)
    workspace = workspace_of(8, heads=8, size=128, splits=splits)
    first = given.run(decode_triton, splits=splits, workspace=workspace)
    assert_exact(first, given)
    for _ in range(300):
        again = given.run(decode_triton, splits=splits, workspace=workspace)
        assert torch.equal(again, first)
    assert not workspace.arrived.any()


@pytest.mark.parametrize("attention", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 8)}, r"q: expected \[B, H, D\], got \[2, 8\]"),
        ({"q": torch.zeros(2, 3, 8)}, r"storage: expected .* with G dividing 3"),
        (
            {"q": torch.zeros(2, 4, 8).half()},
            "storage: expected torch.float16 or 8-bit floats, got torch.float32",
        ),
        (
            {"storage": torch.zeros(3, 2, 5, 8, 2).mT},
            r"storage: expected contiguous \[L, 2, padded, G, D\]",
        ),
        ({"layer": 3}, "layer: expected 0 to 2, got 3"),
        ({"rows": torch.zeros(3).int()}, r"rows: expected \[2\], got \[3\]"),
        (
            {"lengths": torch.zeros(1).int()},
            r"lengths: expected contiguous int32 or int64 \[2\], got torch.int32 \[1\]",
        ),
        ({"req_to_token": torch.zeros(5, 9)}, "req_to_token: expected int32"),
        (
            {"tables": replace(Tables.empty(5, 3, 2, 4, "cpu"), counts=torch.zeros(5, 2, 3))},
            r"tables.counts: expected \[5, 3, 2\], got \[5, 2, 3\]",
        ),
    ],
)
def test_wrong_arguments_are_named(attention, change, message):
    arguments = {
        "q": torch.zeros(2, 4, 8),
        "storage": torch.zeros(3, 2, 5, 2, 8),
        "tables": Tables.empty(5, 3, 2, 4, "cpu"),
        "rows": torch.zeros(2, dtype=torch.int64),
        "lengths": torch.ones(2, dtype=torch.int64),
        "req_to_token": torch.zeros(5, 9, dtype=torch.int32),
        "layer": 0,
    } | change
    q, layer = arguments.pop("q"), arguments.pop("layer")
    with pytest.raises(ValueError, match=message):
        attention(q, Requests(**arguments), layer=layer, scale=1.0)


@pytest.mark.parametrize("attention", IMPLEMENTATIONS)
def test_no_requests(attention):
    given = case([None], heads=4, kv_heads=2)
    assert given.run(attention, order=[]).shape == (0, 4, 64)


def test_empty_tables_say_that_nothing_is_compressed():
    tables = Tables.empty(5, 3, 2, 0, "cpu")
    assert [list(t.shape) for t in vars(tables).values()] == [
        [5, 3, 2], [5, 3, 2], [5], [5], [0], [0, 3],
    ]  # fmt: skip
    assert all(t.dtype == torch.int32 and not t.any() for t in vars(tables).values())
    given = case([(None, 30)], heads=4, kv_heads=2)
    given.tables = Tables.empty(4, 3, 2, 0, DEVICE)
    assert_exact(given.run(decode_attention), given)
