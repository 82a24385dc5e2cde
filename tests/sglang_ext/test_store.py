"""Private slots: pages, tables, accounting; and reading them back through entry lists."""

import math
from contextlib import contextmanager

import pytest
import torch
from fake_allocator import Allocator, no_cache
from host_waits import HostWaits
from hypothesis import given
from hypothesis import strategies as st
from kvpolicy.kernels.attention.paged_attention import UNPAIRED, paged_attention
from kvpolicy.kernels.entries.compact_layers import compact_layers
from kvpolicy.sglang_ext.memory import store as store_module
from kvpolicy.sglang_ext.memory.arena import create_arena
from kvpolicy.sglang_ext.memory.lists import Lists
from kvpolicy.sglang_ext.memory.store import Store


def make_store(layers=3, kv_heads=2, slots=64, page_size=1, size=4, **options):
    allocator = Allocator(slots // page_size, page_size)
    arena = create_arena(layers, slots + page_size, kv_heads, size, torch.float32, "cpu")
    return Store(arena, allocator, **options)


def test_entries_of_8_bits_stand_for_themselves_times_the_scale_of_their_layer():
    arena = create_arena(3, 5, 2, 4, torch.float8_e4m3fn, "cpu")
    scales = [(0.5, 2.0), (3.0, 1.0), (1.5, 0.25)]
    arena.set_scales(scales)
    numbers = torch.randint(-8, 9, arena.storage.shape).float()
    arena.storage.copy_(numbers)
    slots = torch.tensor([3, 1])
    read = torch.stack([torch.stack([x.dense for x in arena.at_slots(n, slots)]) for n in range(3)])
    wanted = (numbers[:, :, slots] * torch.tensor(scales)[:, :, None, None, None]).transpose(2, 3)
    assert torch.equal(read, wanted)
    # The lists of two requests, all layers: of any entries of the pool.
    ids = torch.randint(3 * 2 * 5 * 2 - arena.value_offset, (2 * 3 * 2, 7))
    flat = numbers.view(-1, 4)
    for x, which, offset in zip(arena.at_ids(ids), (0, 1), (0, arena.value_offset), strict=True):
        by = torch.tensor(scales)[:, which].repeat_interleave(2).repeat(2)
        assert torch.equal(x.dense, flat[ids + offset] * by[:, None, None])
    k, v = arena.unscaled(1, *read[1])
    assert torch.equal(torch.stack([k, v]), numbers[1][:, slots].transpose(1, 2))


def test_slots_are_returned_however_a_request_ends():
    changes = []
    store = make_store(changed=lambda *change: changes.append(change))
    first = store.allocate(1, "a", 5, 40, no_cache)
    store.allocate(2, "b", 7, 40, no_cache)
    assert store.held == 12
    assert store.allocator.free_slots.numel() == 52
    store.check_integrity(store.allocator.free_slots)
    store.free(2)
    store.free(2)  # a row without private slots
    store.release(first)
    assert store.held == 0
    assert store.allocator.free_slots.sort().values.tolist() == list(range(1, 65))
    assert changes == [("a", 5), ("b", 7), ("b", 0), ("a", 0)]


def test_too_few_slots_leave_everything_as_it_was():
    store = make_store(slots=8)
    asked = []
    assert store.allocate(1, "a", 9, 40, asked.append) is None
    assert asked == [9]
    assert store.held == 0
    assert store.allocator.free_slots.numel() == 8


def test_slots_are_free_again_if_the_device_has_no_memory_for_their_numbers(monkeypatch):
    store = make_store()
    held = store.allocate(1, "a", 5, 40, no_cache)
    before = held.slots.tolist()

    def fails(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(store_module, "_joined", fails)
    with pytest.raises(torch.OutOfMemoryError):
        store.allocate(2, "a", 7, 40, no_cache)
    with pytest.raises(torch.OutOfMemoryError):
        store.grow(held, 9, no_cache)
    assert (store.held, held.slots.tolist(), list(store.by_row)) == (5, before, [1])
    store.check_integrity(store.allocator.free_slots)
    assert store.allocator.free_slots.numel() == 59


def test_surplus_is_returned_in_whole_pages_of_the_allocator():
    store = make_store(layers=2, kv_heads=2, slots=64, page_size=8)
    private = store.allocate(1, "a", 30, 60, no_cache)
    assert private.slots.numel() == 32
    store.fill(private, torch.tensor([[9, 4], [1, 0]]))  # 5 + 2 + 1 pages: 4 slots
    assert private.slots.numel() == store.held == 8
    assert private.first_page.tolist() == [[0, 5], [7, 8]]
    store.check_integrity(store.allocator.free_slots)


def test_lists_lie_nowhere_before_they_are_laid_out():
    store = make_store(layers=2, kv_heads=2, slots=32)
    private = store.allocate(1, "a", 8, 60, no_cache)
    with pytest.raises(RuntimeError, match="row 1: nothing is laid out"):
        _ = private.layout
    store.fill(private, torch.tensor([[3, 2], [1, 4]]))  # 2 + 1 + 1 + 2 pages
    assert private.layout.counts.tolist() == [[3, 2], [1, 4]]
    assert private.layout.first_page.tolist() == [[0, 2], [3, 4]]
    assert private.layout.layer_starts == [0, 3]


def test_private_slots_grow_and_shrink_in_whole_pages():
    store = make_store(layers=2, kv_heads=2, slots=32, page_size=8)
    private = store.allocate(1, "a", 0, 60, no_cache)
    asked = []
    assert private.slots.numel() == store.held == 0
    assert store.grow(private, 16, asked.append)
    assert asked == [16]
    before = private.slots.tolist()
    assert store.grow(private, 8, asked.append)  # it has more
    assert not store.grow(private, 40, asked.append)
    assert asked == [16, 24]
    assert private.slots.tolist() == before
    counts = torch.tensor([[9, 4], [1, 0]])  # 5 + 2 + 1 pages: 4 slots
    assert store.slots_for(counts) == 8
    store.fill(private, counts)
    assert private.slots.tolist() == before[:8]
    assert store.grow(private, 32, asked.append)
    assert private.slots.tolist()[:8] == before[:8]
    assert store.held == 32
    store.check_integrity(store.allocator.free_slots)
    private.first_page[1, 0] = 6
    with pytest.raises(RuntimeError, match="row 1: two lists share a page"):
        store.check_integrity(store.allocator.free_slots)
    store.release(private)
    assert store.allocator.free_slots.numel() == 32


@pytest.mark.parametrize("ends", ["given up", "freed", "shrunk"])
def test_slots_borrowed_of_a_row_are_given_back_with_it(ends):
    """A fold may need more slots before the row is given up; only those are the store's."""
    changes = []
    store = make_store(changed=lambda *change: changes.append(change))
    row = store.allocator.alloc(20)
    private = store.borrow(1, "a", row[:6].to(torch.int32), 20)
    assert (store.held, private.borrowed) == (0, 6)
    assert store.grow(private, 9, no_cache)
    assert (store.held, private.borrowed, store.allocator.available_size()) == (3, 6, 64 - 23)
    store.check_integrity(store.allocator.free_slots)
    if ends == "given up":
        store.take_over(private)
        store.allocator.free(row[6:])
        store.check_integrity(store.allocator.free_slots)
        assert (store.held, private.borrowed) == (9, 0)
        store.release(private)
    else:
        if ends == "shrunk":
            store.fill(private, torch.ones((3, 2), dtype=torch.int64))
            assert (store.held, private.borrowed, private.slots.tolist()) == (
                0,
                2,
                row[:2].tolist(),
            )
        store.free(1)
        store.allocator.free(row)
    assert store.held == 0
    assert changes[-1] == ("a", 0)
    assert store.allocator.free_slots.sort().values.tolist() == list(range(1, 65))


def test_flush_drops_without_returning():
    store = make_store()
    store.allocate(1, "a", 5, 40, no_cache)
    store.clear()
    store.reset_allocator()
    assert store.held == 0
    assert store.allocator.free_slots.numel() == 59
    store.allocate(1, "a", 5, 40, no_cache)


def test_integrity_names_what_is_wrong():
    store = make_store()
    private = store.allocate(1, "a", 4, 40, no_cache)
    with pytest.raises(RuntimeError, match=f"both private and free: .{int(private.slots[0])}"):
        store.check_integrity(private.slots[:1].to(torch.int64))
    private.slots[1] = private.slots[0]
    with pytest.raises(RuntimeError, match="held twice"):
        store.check_integrity(store.allocator.free_slots)
    with pytest.raises(RuntimeError, match="row 1 already holds"):
        store.allocate(1, "a", 4, 40, no_cache)


@given(
    layers=st.integers(1, 5),
    kv_heads=st.sampled_from([1, 2, 4, 8]),
    counts=st.data(),
)
def test_most_slots_suffice(layers, kv_heads, counts):
    arena = create_arena(layers, 4, kv_heads, 1, torch.float32, "cpu")
    lists = [counts.draw(st.integers(0, 30)) for _ in range(layers * kv_heads)]
    pages = sum(math.ceil(n / kv_heads) for n in lists)
    most = arena.most_slots(sum(lists), layers)
    assert most >= -(-pages // arena.layers)
    assert most <= -(-pages // arena.layers) + kv_heads


def test_tables_take_less_than_one_percent():
    """Sizes of a model with 8 KV heads of 128 in bf16, and of the embedded one."""
    for layers, kv_heads, size, dtype in ((32, 8, 128, torch.bfloat16), (4, 2, 32, torch.float32)):
        arena = create_arena(layers, 80, kv_heads, size, dtype, "cpu")
        store = Store(arena, Allocator(79))
        private = store.allocate(1, "a", 64, 512, no_cache)
        store.fill(private, torch.full((layers, kv_heads), 64))
        assert private.slots.numel() == 64
        tables = (private.slots, private.counts, private.first_page)
        assert sum(each.nbytes for each in tables) < 0.01 * 64 * arena.slot_bytes


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("seed", range(4))
def test_compressed_requests_read_exactly_what_was_kept(heads, kv_heads, seed):
    """Random ragged choices, tails and requests; every free slot holds NaN."""
    generator = torch.Generator().manual_seed(seed)
    layers, size, rows, context = 3, 8, 400, 60
    arena = create_arena(layers, rows, kv_heads, size, torch.float32, "cpu")
    arena.storage.fill_(float("nan"))
    store = Store(arena, Allocator(rows - 1))
    table = torch.zeros((5, context), dtype=torch.int32)
    scale = size**-0.5
    privates, wanted, lengths = [], [], []
    q = torch.randn(3, layers, heads, size, generator=generator)
    for row, (prompt, tail) in enumerate(((40, 1), (7, 9), (30, 20)), start=1):
        length = prompt + tail
        slots = store.allocator.alloc(length)
        table[row, :length] = slots.to(torch.int32)
        kv = torch.randn(layers, 2, length, kv_heads, size, generator=generator)
        arena.storage[:, :, slots] = kv
        kept = torch.rand(layers, kv_heads, prompt, generator=generator) < 0.4
        kept[0, 0] = False  # a list may be empty
        private = store.allocate(
            row, "a", arena.most_slots(int(kept.sum()), layers), prompt, no_cache
        )
        store.fill(private, kept.sum(2))
        compact_layers(arena.storage, slots[:prompt], kept, private.slots, private.first_page)
        arena.storage[:, :, slots[:prompt]] = float("nan")  # freed
        table[row, :prompt] = 0
        privates.append(private)
        lengths.append(length)
        wanted.append(_dense(q[row - 1], kv, kept, prompt, scale))

    with HostWaits() as waits:
        lists = Lists(arena, privates, lengths, table)
        for layer in range(layers):
            lists.of(1, layer)
    assert waits.found == []
    for layer in range(layers):
        indptr, indices, reading = lists.layer(layer)
        assert reading == UNPAIRED
        for i in range(3):
            own, listed = lists.of(i, layer)
            start, end = indptr[i * kv_heads], indptr[(i + 1) * kv_heads]
            assert torch.equal(listed, indices[start:end])
            assert own.tolist()[0] == 0
            assert torch.equal(own.diff(), indptr.diff()[i * kv_heads : (i + 1) * kv_heads])
        got = paged_attention(
            q[:, layer, None], arena.entries, arena.values, indptr, indices, scale=scale
        )
        torch.testing.assert_close(got[:, 0], torch.stack(wanted)[:, layer], atol=1e-5, rtol=1e-5)


def _dense(q, kv, kept, prompt, scale):
    """Attention [L, H, D] over the kept entries and the tail, head by head."""
    layers, heads, _ = q.shape
    kv_heads = kv.shape[3]
    out = torch.zeros_like(q)
    for layer in range(layers):
        for head in range(heads):
            group = head // (heads // kv_heads)
            seen = torch.ones(kv.shape[2], dtype=torch.bool)
            seen[:prompt] = kept[layer, group]
            k, v = kv[layer, :, seen, group]
            out[layer, head] = (k @ q[layer, head] * scale).softmax(0) @ v
    return out


def test_whole_pages_are_given_back_without_waiting(monkeypatch):
    monkeypatch.delattr(torch, "unique")  # the host waits for how many there are
    paged = pytest.importorskip("sglang.srt.mem_cache.allocator.paged")
    given = {"dtype": torch.float32, "device": "cpu", "kvcache": None, "need_sort": False}
    allocator = paged.PagedTokenToKVPoolAllocator(4096, 16, **given)
    store = Store(create_arena(4, 4096 + 16, 8, 4, torch.float32, "cpu"), allocator)
    private = store.allocate(1, "a", 272, 1000, no_cache)
    store.fill(private, torch.full((4, 8), 256))
    assert allocator.available_size() == 4096 - 256
    store.release(private)
    assert allocator.available_size() == 4096


def test_scales_stay_where_sglang_gives_the_memory_of_entries_back(monkeypatch):
    """`--enable-memory-saver`: the weights' scales are written while the entries have none."""
    made = []
    for name in ("ones", "zeros"):
        make = getattr(torch, name)

        def within(*sizes, make=make, **options):
            made.append(inside)
            return make(*sizes, **options)

        monkeypatch.setattr(torch, name, within)
    inside = False

    @contextmanager
    def saved():
        nonlocal inside
        inside = True
        yield
        inside = False

    create_arena(1, 5, 2, 4, torch.float8_e4m3fn, "cpu", saved())
    assert made == [False, True]  # scales, entries


def test_what_the_weights_say_is_read_again_when_the_pool_is_emptied():
    """As after `/update_weights_from_disk` with a checkpoint that has other scales."""
    store = make_store()
    arena = create_arena(1, 5, 2, 4, torch.float8_e4m3fn, "cpu")
    of_weights = [[(0.5, 2.0)], [(3.0, 1.5)]]
    store.when_empty(lambda: arena.set_scales(of_weights.pop(0)))
    assert arena.scales[0].tolist() == [[0.5, 0.5], [2.0, 2.0]]
    store.clear()
    store.reset_allocator()
    assert arena.scales[0].tolist() == [[3.0, 3.0], [1.5, 1.5]]
