"""FlashInfer over private pages: plans, buffers and pages, with torch in place of its kernels."""

import sys
from dataclasses import replace

import flashinfer_stand_in as stand_in
import numpy as np
import pytest
import torch
from decode_cases import assert_exact
from flashinfer_stand_in import BatchDecodeWithPagedKVCacheWrapper as Wrapper
from flashinfer_stand_in import Tape
from kvpolicy.kernels.attention import (
    private_pages,
    private_pages_triton,
)
from kvpolicy.kernels.attention.decode_attention import lists_of
from kvpolicy.kernels.attention.private_attention_flashinfer import (
    PrivateAttention,
    reserved_bytes,
    schedule_bytes,
)
from kvpolicy.kernels.entries.requests import Requests
from kvpolicy.kernels.launch import occupancy
from test_decode_attention import DEVICE, MIXED, SHAPES, case

WORKSPACE = torch.zeros(64, dtype=torch.uint8, device=DEVICE)
IMPLEMENTATIONS = [private_pages.private_pages, private_pages_triton.private_pages]


@pytest.fixture(autouse=True)
def flashinfer(monkeypatch):
    for name, module in stand_in.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(Wrapper, "plans", [])


def counts_of(given, order=None):
    """Entries of each list of the batch, int64 [L, B, G], on the host."""
    rows = given.rows if order is None else given.rows[order]
    return given.tables.counts[rows].transpose(0, 1).long().cpu().numpy()


def reader(given, **options):
    heads, dtype = given.q.shape[1], given.q.dtype
    return PrivateAttention(given.storage, heads, dtype, WORKSPACE, tensor_cores=True, **options)


def tail(given, order):
    """Attention over tails in ordinary slots, and log-sum-exp as by SGLang's wrapper."""
    q, rows = given.q[order], given.rows[order]
    tables = replace(given.tables, counts=torch.zeros_like(given.tables.counts))
    requests = Requests(given.storage, tables, rows, given.lengths[order], given.req_to_token)
    indptr, entries, _ = lists_of(requests, given.layer)
    storage, parts = given.storage, []
    pool = storage.view(-1, storage.shape[4])
    values, kv_heads = pool[storage.shape[2] * storage.shape[3] :], storage.shape[3]
    by_list = q.view(-1, q.shape[1] // kv_heads, q.shape[2])
    for i, own in enumerate(by_list):
        at = entries[indptr[i] : indptr[i + 1]]
        of_list = (pool[at][:, None], values[at][:, None])
        parts.append(stand_in.attend(own[None], *of_list, q.shape[2] ** -0.5))
    out, lse = (torch.cat(each) for each in zip(*parts, strict=True))
    return out.view(q.shape), lse.view(q.shape[:2])


def read(attention, given, order, padding=0):
    """Attention of these requests, merged with their tails, without rows of padding."""
    q = torch.cat([given.q[order], given.q.new_ones(padding, *given.q.shape[1:])])
    out, lse = attention.attend(q, layer=given.layer, scale=q.shape[2] ** -0.5)
    rows = slice(len(order))
    return attention.merged((out[rows], lse[rows]), tail(given, order))


def plan(attention, given, order, captured=None):
    attention.plan(given.tables, given.rows[order], counts_of(given, order), captured=captured)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("requests", "heads", "kv_heads"), [(MIXED, 4, 2), *(shape[:3] for shape in SHAPES)]
)
def test_pages_hold_the_lists_of_the_reference(implementation, requests, heads, kv_heads):
    given = case(requests, heads=heads, kv_heads=kv_heads, size=16)
    counts = counts_of(given)
    pages = torch.from_numpy(-(-counts // kv_heads)).reshape(len(counts), -1)
    starts = torch.nn.functional.pad(pages.flatten().cumsum(0), (1, 0)).int()
    lists = pages.shape[1]
    of_layers = torch.stack([starts[i * lists : (i + 1) * lists + 1] for i in range(len(counts))])
    made = torch.full((int(starts[-1]) + 5,), -7, dtype=torch.int32, device=DEVICE)
    where = (given.storage, given.tables, given.rows, of_layers.to(DEVICE), made)
    implementation(*where, longest=int(pages.max()))
    assert made[int(starts[-1]) :].eq(-7).all()
    nothing = replace(given.tables, tail_start=given.tables.tail_start + 10**6)
    for layer in range(len(counts)):
        own = (given.rows, given.lengths)
        requests = Requests(given.storage, nothing, *own, given.req_to_token)
        indptr, entries, _ = lists_of(requests, layer)
        got = []
        for i, number in enumerate(counts[layer].flatten()):
            own = made[of_layers[layer, i] : of_layers[layer, i + 1]].long()
            every = own[:, None] * kv_heads + torch.arange(kv_heads, device=DEVICE)
            got.append(every.flatten()[:number])
        assert torch.equal(torch.cat(got), entries)
        assert indptr[-1] == len(entries)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_wrong_arguments_are_named(implementation):
    given = case([([3, 4], 1)], heads=4, kv_heads=2, size=16)
    made = torch.zeros(9, dtype=torch.int32, device=DEVICE)
    starts = torch.zeros(3, 3, dtype=torch.int32, device=DEVICE)
    good = [given.storage, given.tables, given.rows, starts, made]
    for at, wrong, sentence in (
        (0, given.storage[0], r"storage: expected \[L, 2, slots, G, D\]"),
        (2, given.rows[None], r"rows: expected \[B\]"),
        (3, starts.long(), r"starts: expected int32 \[3, 3 or more\], got torch.int64"),
        (3, starts[:, :2], r"starts: expected int32 \[3, 3 or more\]"),
        (3, starts[:, :, None].expand(3, 3, 2)[:, :, 0].T, "starts: expected rows without gaps"),
        (4, made.long(), r"made: expected torch.int32 \[9\]"),
    ):
        with pytest.raises(ValueError, match=sentence):
            implementation(*good[:at], wrong, *good[at + 1 :], longest=2)
    large = torch.empty(2, 2, 2**30 + 1, 2, 16, device="meta")
    with pytest.raises(ValueError, match=r"storage: expected at most 2\^31 pages"):
        implementation(large, *good[1:], longest=2)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(("requests", "heads", "kv_heads", "size", "dtype"), SHAPES)
def test_every_list_is_read(requests, heads, kv_heads, size, dtype, captured):
    """Empty and ragged ones, of one entry, next to NaN, by groups of 1 to 8 query heads."""
    given = case(requests, heads=heads, kv_heads=kv_heads, size=size, dtype=dtype)
    attention, order = reader(given), torch.arange(len(requests), device=DEVICE)
    if captured:
        attention.reserve(len(requests) + 3)
    plan(attention, given, order, captured=len(requests) + 2 if captured else None)
    assert_exact(read(attention, given, order, padding=2 if captured else 0), given)


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_eight_bits_and_their_scales(stored):
    given = case(MIXED, heads=4, kv_heads=2, dtype=torch.bfloat16, stored=stored)
    attention, order = reader(given), torch.arange(len(MIXED), device=DEVICE)
    plan(attention, given, order)
    out, lse = attention.attend(given.q, layer=given.layer, scale=0.25)
    scaled, same = attention.attend(given.q, layer=given.layer, scale=0.25, value_scale=2.0)
    assert torch.equal(scaled, out * 2)
    assert torch.equal(same, lse)
    empty = lse.isinf()
    assert bool(empty.any())
    assert not out[empty].any()


def test_a_captured_batch_is_read_anew_after_each_plan():
    """Requests come, leave, change places and get other lists; what was recorded reads them."""
    given = case([([9, 3], 4), None, ([1, 0], 2), ([40, 41], 1)], heads=4, kv_heads=2)
    attention, kv_heads = reader(given), 2
    attention.reserve(4)
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    nothing = np.zeros((3, 0, kv_heads), dtype=np.int64)
    attention.plan(given.tables, none, nothing, captured=4)
    q = torch.zeros(4, 4, 64, device=DEVICE)
    with Tape() as tape:
        out, lse = attention.attend(q, layer=given.layer, scale=64**-0.5)
    assert not out.any()
    assert lse.isneginf().all()
    for order in ([3], [0, 1, 2, 3], [2, 0], [1], [3, 2, 1, 0]):
        at = torch.tensor(order, device=DEVICE)
        plan(attention, given, at, captured=4)
        q.fill_(1.0)[: len(order)] = given.q[at]
        tape.replay()
        merged = attention.merged((out[: len(order)], lse[: len(order)]), tail(given, at))
        chosen = replace(given, q=given.q[at], lists=[given.lists[i] for i in order])
        assert_exact(merged, chosen)
        assert not out[len(order) :].any()
    assert out.isfinite().all()


def test_layers_of_equal_lengths_are_planned_once():
    """Where a graph reads: others get a copy, and pages of their own."""
    given = case([([9, 3], 4), ([1, 5], 2)], heads=4, kv_heads=2)
    alike = given.tables.counts[:, 1:2].expand(-1, 3, -1).contiguous()
    attention = reader(given)
    attention.reserve(2)
    rows, planned = given.rows, []
    for counts in (given.tables.counts, alike, given.tables.counts, alike):
        Wrapper.plans.clear()
        own = counts[rows].transpose(0, 1).long().cpu().numpy()
        attention.plan(given.tables, rows, own, captured=2)
        planned.append(len(Wrapper.plans))
        for layer in range(3):  # the stand-in fails where a schedule is not of its lengths
            attention.attend(given.q, layer=layer, scale=0.1)
    assert planned == [3, 1, 3, 1]
    Wrapper.plans.clear()
    attention.plan(given.tables, rows, own, captured=None)
    assert len(Wrapper.plans) == 3


def test_batches_of_several_sizes_share_buffers():
    given = case(MIXED, heads=4, kv_heads=2)
    attention = reader(given)
    attention.reserve(8)
    order = torch.arange(len(MIXED), device=DEVICE)
    for captured in (8, None, len(MIXED), 8):
        plan(attention, given, order, captured=captured)
        padding = 0 if captured is None else captured - len(MIXED)
        assert_exact(read(attention, given, order, padding), given)
    with pytest.raises(AssertionError, match="not planned"):
        attention._captured[len(MIXED)].layers[0].run(
            given.q.view(-1, 2, 64), attention._pages, return_lse=True
        )


def test_nothing_planned_is_said():
    given = case([([9, 3], 4)], heads=4, kv_heads=2)
    attention = reader(given)
    with pytest.raises(RuntimeError, match="FlashInfer has planned no batch"):
        attention.attend(given.q, layer=0, scale=0.1)
    with pytest.raises(ValueError, match=r"counts: \d+ pages are more than the pool has"):
        attention.plan(given.tables, given.rows, counts_of(given) + 10**6, captured=None)


def test_a_pool_that_it_cannot_count():
    storage = torch.empty(2, 2, 2**30, 2, 64, device="meta")
    with pytest.raises(ValueError, match=r"storage: FlashInfer counts fewer than 2\^32 entries"):
        PrivateAttention(storage, 2, torch.float16, WORKSPACE, tensor_cores=True)


def test_without_flashinfer(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ImportError, match="flashinfer-python is not installed"):
        reader(case([None], heads=4, kv_heads=2, size=16))


def _fa2_bytes(lists, group, processors):
    """Bytes that the planners of 0.7.2 write for a graph, from their sources, for both kernels."""
    tile = 16 if group <= 16 else 64
    tensor = max(2 * processors, -(-lists * group // tile) + lists - 1)
    parts = [4 * tensor] * 3 + [4 * (lists + 1)] * 2 + [4, 4, tensor]
    simple = max(32 * processors, lists)
    others = [4 * simple] * 2 + [4 * (simple + 1), 4, simple]
    return [sum(-(-part // 16) * 16 for part in each) for each in (parts, others)]


@pytest.mark.parametrize("lists", [1, 8, 1024, 32768])
@pytest.mark.parametrize("group", [1, 4, 8, 64])
def test_schedules_have_room(lists, group):
    for processors in (1, 132, 148):
        tensor, simple = _fa2_bytes(lists, group, processors)
        assert tensor <= schedule_bytes(lists, group, processors, tensor_cores=True)
        assert simple <= schedule_bytes(lists, group, processors, tensor_cores=False)


def test_what_is_reserved_is_room_for_what_is_allocated():
    given = case(MIXED, heads=4, kv_heads=2)
    layers, _, padded, kv_heads, _ = given.storage.shape
    processors = occupancy.processors(given.storage.device)
    schedules = {
        cores: schedule_bytes(16 * 2, 2, processors, tensor_cores=cores) for cores in (True, False)
    }
    for cores, schedule in schedules.items():
        attention = PrivateAttention(given.storage, 4, given.q.dtype, WORKSPACE, tensor_cores=cores)
        attention.reserve(16)
        held = (attention._listed, attention._lists, attention._schedules)
        expected = reserved_bytes(layers, padded, kv_heads, 2, 16, given.storage.device)
        # It is computed for whichever kernel's schedules are longer.
        spare = layers * (max(schedules.values()) - schedule)
        assert sum(each.nbytes for each in held) == expected - spare
