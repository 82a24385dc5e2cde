"""Device tables follow the entries that requests hold, and agree with their entry lists."""

import random
from types import SimpleNamespace

import pytest
import torch
from fake_allocator import Allocator, no_cache
from kvpolicy.dsl.tools.launches import Observed
from kvpolicy.kernels.attention.decode_attention import decode_attention
from kvpolicy.kernels.attention.paged_attention import paged_attention
from kvpolicy.kernels.entries.requests import Requests
from kvpolicy.sglang_ext.memory.arena import create_arena
from kvpolicy.sglang_ext.memory.lists import Lists
from kvpolicy.sglang_ext.memory.paired_layers import PairedLayers
from kvpolicy.sglang_ext.memory.store import Store
from kvpolicy.sglang_ext.memory.tables import DeviceTables

LAYERS, HEADS, KV_HEADS, SIZE, SLOTS, ROWS, CONTEXT = 3, 4, 2, 8, 60, 6, 40


def make(page_size=1, pairs=False):
    padded = SLOTS + page_size
    arena = create_arena(LAYERS, padded, KV_HEADS, SIZE, torch.float32, "cpu")
    arena.storage.normal_(generator=torch.Generator().manual_seed(0))
    tables = DeviceTables(arena, ROWS, SLOTS, pairs=pairs)
    return Store(arena, Allocator(SLOTS // page_size, page_size), tables=tables), tables


def fill(store, row, counts, tail_start=10):
    private = store.allocate(row, "a", 0, tail_start, no_cache)
    assert store.grow(private, store.slots_for(counts), no_cache)
    store.fill(private, counts)
    return private


def counts_of(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 8, (LAYERS, KV_HEADS), generator=generator)


def same_attention(store, tables, held):
    """Checks attention over tables against attention over lists, for all rows and layers."""
    rows, lengths = list(held), [private.tail_start + 3 for private in held.values()]
    table = torch.arange(ROWS * CONTEXT, dtype=torch.int32).view(ROWS, CONTEXT) % SLOTS
    q = torch.randn(len(rows), HEADS, SIZE, generator=torch.Generator().manual_seed(1))
    lists = Lists(store.arena, list(held.values()), lengths, table, remember=True)
    own = (torch.tensor(rows), torch.tensor(lengths))
    requests = Requests(store.arena.storage, tables.tables, *own, table)
    for layer in range(LAYERS):
        found = decode_attention(q, requests, layer=layer, scale=0.3)
        indptr, indices, _ = lists.layer(layer)
        pool = (store.arena.entries, store.arena.values)
        wanted = paged_attention(q[:, None], *pool, indptr, indices, scale=0.3)[:, 0]
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.thorough(every=2)
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("seed", range(4))
def test_tables_follow_requests_that_come_fold_and_go(page_size, seed):
    store, tables = make(page_size)
    addresses = [t.data_ptr() for t in vars(tables.tables).values()]
    rnd, held, compacted = random.Random(seed), {}, 0
    for turn in range(150):
        row = rnd.randrange(1, ROWS)
        if row not in held:
            # The row may have been another request's since the tables were written.
            held[row] = fill(store, row, counts_of(turn), tail_start=rnd.randrange(20))
        elif rnd.random() < 0.5:
            store.free(row)
            del held[row]
        else:
            counts = counts_of(turn + 1000)
            if store.grow(held[row], store.slots_for(counts), no_cache):
                held[row].tail_start = rnd.randrange(30)
                store.fill(held[row], counts)
        if rnd.random() < 0.7:
            end = tables.end
            tables.write()
            compacted += tables.end < end
            store.check_integrity(store.allocator.free_slots)
            if held:
                same_attention(store, tables, held)
    assert compacted >= 1
    assert [t.data_ptr() for t in vars(tables.tables).values()] == addresses


def test_a_row_reads_as_plain_once_its_request_is_gone():
    store, tables = make()
    fill(store, 2, counts_of(0))
    tables.write()
    assert tables.tables.counts[2].any()
    assert tables.tables.tail_start[2] == 10
    store.free(2)
    assert tables.tables.counts[2].any()  # a forward that is going on may still read it
    tables.write()
    assert not tables.tables.counts.any()
    assert not tables.tables.tail_start.any()


def test_many_requests_are_written_in_as_many_operations_as_one():
    asked = []
    for rows in (range(1, 2), range(1, ROWS)):
        store, tables = make()
        for turn in range(2):
            for row in rows:
                if turn:
                    store.free(row)
                fill(store, row, torch.full((LAYERS, KV_HEADS), 1 + turn))
            with Observed() as observed:
                tables.write()
            asked.append(observed.device)
            store.check_integrity(store.allocator.free_slots)
    assert len({*asked}) == 1, asked
    assert asked[0] <= 17


def test_each_layout_has_a_number_of_its_own():
    store, tables = make()
    fill(store, 2, counts_of(0))
    assert tables.version(2) == 0  # nothing is written yet
    tables.write()
    fill(store, 1, counts_of(1))
    tables.write()
    seen = [tables.version(row) for row in (2, 1)]
    store.tail_moved(store.by_row[2])
    tables.write()
    assert [tables.version(row) for row in (2, 1)] == seen
    store.free(2)
    tables.write()
    assert tables.version(2) == 0
    fill(store, 2, counts_of(0))
    tables.write()
    assert len({0, *seen, tables.version(2)}) == 4
    store.clear()
    tables.write()
    assert [tables.version(row) for row in (2, 1)] == [0, 0]


def test_a_flush_forgets_every_row():
    store, tables = make()
    fill(store, 1, counts_of(1))
    tables.write()
    fill(store, 3, counts_of(2))
    store.clear()
    tables.write()
    assert not tables.tables.counts.any()
    assert not tables.tables.tail_start.any()


def test_which_layers_are_stored_in_pairs_is_written_and_forgotten():
    store, tables = make(pairs=True)
    private = fill(store, 1, counts_of(1))
    private.shared = PairedLayers.of([2], 10, store.arena)
    fill(store, 2, counts_of(2))
    tables.write()
    assert tables.tables.paired[:3].tolist() == [[0, 0, 0], [0, 1, 2], [0, 0, 0]]
    store.check_integrity(store.allocator.free_slots)
    tables.tables.paired[2, 0] = 1
    with pytest.raises(RuntimeError, match="row 2: the device tables are not what it holds"):
        store.check_integrity(store.allocator.free_slots)
    tables.tables.paired[2, 0] = 0
    # Another request in the same row.
    store.release(private)
    fill(store, 1, counts_of(3))
    tables.write()
    assert not tables.tables.paired.any()
    store.check_integrity(store.allocator.free_slots)


def test_integrity_finds_tables_that_lag_behind():
    store, tables = make()
    private = fill(store, 1, counts_of(1))
    store.check_integrity(store.allocator.free_slots)  # nothing written, nothing wrong
    tables.write()
    tables.tables.slots[int(tables.tables.slots_start[1])] += 1
    with pytest.raises(RuntimeError, match="row 1: the device tables are not what it holds"):
        store.check_integrity(store.allocator.free_slots)
    store.release(private)
    tables.write()
    tables.tables.tail_start[4] = 7
    with pytest.raises(RuntimeError, match="of a row that has none"):
        store.check_integrity(store.allocator.free_slots)


def test_all_slots_of_the_pool_fit_however_they_came():
    """Even if the whole pool is private, nothing is written outside the table."""
    store, tables = make()
    for turn in range(9):
        # 2 x 10 pages of 2 entries in every layer: 20 slots each, all of the pool's 60.
        privates = [fill(store, row, torch.full((LAYERS, KV_HEADS), 20)) for row in (1, 2, 3)]
        assert store.allocator.free_slots.numel() == 0
        tables.write()
        store.check_integrity(store.allocator.free_slots)
        for private in privates[turn % 3 :]:
            store.release(private)
        tables.write()
        for private in privates[: turn % 3]:
            store.release(private)
    assert tables.tables.bytes == 4 * (2 * ROWS * LAYERS * KV_HEADS + 2 * ROWS + 2 * SLOTS)


def test_tables_are_written_before_the_forward():
    from kvpolicy.sglang_ext.runtime import Runtime

    store, tables = make()
    runtime = Runtime(())
    services = runtime.services
    services.store, services.tables, services.arena = store, tables, store.arena
    fill(store, 1, counts_of(1))
    mode = SimpleNamespace(is_extend=lambda: False, is_decode=lambda: False)
    seen = []
    batch = SimpleNamespace(tree_cache=None, forward_mode=mode)
    runtime.forward(lambda: seen.append(int(tables.tables.tail_start[1])), batch)
    assert seen == [10]
