"""The stream on which the scheduler's state changes in the middle of a forward."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from fake_allocator import Allocator
from kvpolicy.sglang_ext.face.streams import Streams
from kvpolicy.sglang_ext.forward.services import Services
from kvpolicy.sglang_ext.memory.arena import create_arena
from kvpolicy.sglang_ext.memory.private import Private
from kvpolicy.sglang_ext.memory.store import Store
from kvpolicy.sglang_ext.request.request import RequestState


class Device:
    """Replaces `torch.cuda` and SGLang's scheduler: notes waits, and the stream of each call."""

    def __init__(self):
        self.log = []
        device = self

        class Stream:
            def __init__(self, name):
                self.name = name

            def wait_stream(self, other):
                device.log.append(f"{self.name} waits for {other.name}")

        self.schedule_stream, self.forward_stream = Stream("scheduler"), Stream("forward")
        self.current = self.forward_stream
        self.device_module = self

    def current_stream(self):
        return self.current

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def note(self, what):
        self.log.append(f"{what} on {self.current.name}")

    def taken(self):
        log, self.log = self.log, []
        return log


class Noting(Allocator):
    """An allocator that notes the stream on which it is used."""

    def __init__(self, device, pages):
        super().__init__(pages)
        self.device = device

    def alloc(self, need_size):
        self.device.note("alloc")
        return super().alloc(need_size)

    def free(self, free_index):
        self.device.note("free")
        super().free(free_index)


@pytest.fixture
def device():
    return Device()


@pytest.fixture
def store(device):
    streams = Streams()
    streams.bind(device)
    arena = create_arena(2, 65, 2, 4, torch.float32, "cpu")
    return Store(arena, Noting(device, 64), streams=streams)


def ordered(*operations):
    return [
        "scheduler waits for forward",
        *(f"{each} on scheduler" for each in operations),
        "forward waits for scheduler",
    ]


def test_slots_are_taken_and_given_back_on_the_schedulers_stream(device, store):
    def evict(slots):
        device.note("evict")

    private = store.allocate(1, "a", 3, 20, evict)
    assert device.taken() == ordered("evict", "alloc")
    assert store.grow(private, 9, evict)
    assert device.taken() == ordered("evict", "alloc")
    store.fill(private, torch.full((2, 2), 5))  # 3 pages each: 6 slots of 2 pages
    assert device.taken() == ordered("free")
    assert private.slots.numel() == 6
    store.fill(private, torch.full((2, 2), 5))
    assert device.taken() == []  # no slot changes hands
    store.release(private)
    assert device.taken() == ordered("free")
    assert device.current is device.forward_stream


def test_nothing_waits_where_the_forward_runs_on_the_schedulers_stream(device, store):
    device.current = device.schedule_stream
    store.release(store.allocate(1, "a", 3, 20, lambda slots: None))
    assert device.taken() == ["alloc on scheduler", "free on scheduler"]


def test_a_replaced_stream_is_followed(device, store):
    """SGLang may replace the scheduler's stream before its loop begins."""
    device.schedule_stream = type(device.schedule_stream)("second")
    store.allocate(1, "a", 3, 20, lambda slots: None)
    assert "alloc on second" in device.taken()


def test_what_a_request_gives_up_is_given_up_on_the_schedulers_stream(device):
    class Tree:
        page_size = 1
        req_to_token_pool = SimpleNamespace(req_to_token=torch.ones((3, 30), dtype=torch.int32))

        def free_kv_row(self, kv, ranges):
            device.note(f"free {ranges}")

        def unlock(self, lock):
            device.note("unlock")

    services = Services(())
    services.streams.bind(device)
    services.tree = Tree()
    kv = SimpleNamespace(cache_protected_len=7, req_pool_idx=1)
    request = SimpleNamespace(kv=kv, lock=object(), skip_radix_cache_insert=False)
    private = Private(1, "a", torch.arange(4), tail_start=20)
    state = RequestState(SimpleNamespace(), 20, slots=4, private=private)
    services.detach([(request, state)])
    assert device.taken() == ordered()  # a fold launched before it still reads the table of slots
    state.published = True
    services.detach([(request, state)])
    assert device.taken() == ordered("free [(7, 20)]", "unlock")
    assert Tree.req_to_token_pool.req_to_token[1].sum() == 10


@pytest.mark.parametrize("page_size", [1, 4])
def test_tails_of_many_requests_are_given_up_at_once(device, page_size):
    """Whole pages of each, except for a request whose prompt is not yet offered to the cache."""
    table = torch.arange(5 * 30, dtype=torch.int32).view(5, 30)
    before, freed = table.clone(), []

    def free_segment(slots, *, start_pos):
        device.note("free")
        freed.append((slots, start_pos))

    services = Services(())
    services.streams.bind(device)
    services.tree = SimpleNamespace(
        page_size=page_size, req_to_token_pool=SimpleNamespace(req_to_token=table),
        token_to_kv_pool_allocator=SimpleNamespace(free_segment=free_segment),
    )  # fmt: skip
    requests = []
    for row, (first, end) in enumerate([(8, 19), (4, 4), (0, 30), (12, 20)], 1):
        private = Private(row, "a", torch.arange(4), tail_start=end)
        state = RequestState(
            SimpleNamespace(), 20, 4, private=private, published=row != 3, detached=True
        )
        kv = SimpleNamespace(cache_protected_len=first, req_pool_idx=row)
        requests.append((SimpleNamespace(kv=kv), state))
    services.detach(requests)
    assert device.taken() == ordered("free")
    end = 19 // page_size * page_size
    ((slots, start),) = freed
    assert slots.tolist() == [*before[1, 8:end].tolist(), *before[4, 12:20].tolist()]
    assert start == 0
    assert [req.kv.cache_protected_len for req, _ in requests] == [end, 4, 0, 20]
    before[1, 8:end] = before[4, 12:20] = page_size - 1  # of the padding page
    assert torch.equal(table, before)
    assert services.has_room
    services.detach(requests)
    assert len(freed) == 1
