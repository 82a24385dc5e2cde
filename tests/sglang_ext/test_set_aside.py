"""Slots of internal requests: at all times, others have as many as without them."""

import pytest
import torch
from fake_allocator import Allocator, no_cache
from hypothesis import given
from hypothesis import strategies as st
from kvpolicy.sglang_ext.memory.set_aside import SetAside


def none():
    """Number of slots of a request that has not been computed yet."""
    return 0


def aside_of(pages, page_size, slots):
    allocator = Allocator(pages, page_size)
    return allocator, SetAside(allocator, slots)


@pytest.mark.parametrize(("page", "total"), [(1, 10), (4, 8)])
def test_whole_pages_are_taken_at_the_start(page, total):
    allocator, aside = aside_of(32, page, 10)
    assert (aside.total, aside.lent, aside.slots.numel()) == (total, 0, total)
    assert allocator.available_size() == 32 * page - total


def test_what_is_lent_comes_back_when_the_request_has_ended():
    allocator, aside = aside_of(100, 1, 20)
    allocator.alloc(75)
    used = 0
    assert aside.lend("a", 12, lambda: used)
    assert (aside.lent, allocator.available_size()) == (13, 5 + 13)
    assert allocator.available_size() - aside.unused == 5
    taken, used = allocator.alloc(12), 12
    assert allocator.available_size() - aside.unused == 5
    aside.take_back(no_cache)  # it has not ended
    assert aside.lent == 13
    aside.ended("a")
    aside.ended("a")
    aside.ended("b")  # somebody else's request
    allocator.free(taken)
    assert allocator.available_size() - aside.unused == 5  # before they are taken back, too
    aside.take_back(no_cache)
    assert (aside.lent, aside.slots.numel(), allocator.available_size()) == (0, 20, 5)


def test_more_than_is_set_aside_needs_ample_free_slots():
    allocator, aside = aside_of(100, 1, 20)
    assert aside.lend("long", 60, none)  # 61: 20, and 41 of the 80 that are free
    assert (aside.lent, allocator.available_size()) == (20, 100)
    allocator.alloc(60)
    assert not aside.lend("another", 35, none)  # 30 would stay ample
    assert aside.lend("short", 25, none)
    assert aside.lent == 20


def test_somebody_has_taken_the_page_that_sglang_wants_more():
    allocator, aside = aside_of(8, 4, 8)
    others = allocator.alloc(24)
    assert aside.lend("a", 3, none)
    own, more = allocator.alloc(4), allocator.alloc(4)
    allocator.free(own)
    aside.ended("a")
    aside.take_back(no_cache)
    assert aside.lent == 8  # until there are as many
    aside.take_back(lambda slots: allocator.free(others[:slots]))
    assert (aside.lent, aside.slots.numel()) == (0, 8)
    assert not torch.isin(aside.slots, more).any()


def test_one_loan_at_a_time():
    """A request queued again, while its first loan cannot be taken back, gets no second one."""
    allocator, aside = aside_of(8, 4, 8)
    others = allocator.alloc(24)
    assert aside.lend("a", 3, none)
    more = allocator.alloc(4)
    aside.ended("a")
    aside.take_back(no_cache)
    assert aside.lent == 8
    assert not aside.lend("a", 3, none)
    assert aside.lent == 8
    allocator.free(more)
    aside.take_back(no_cache)
    assert aside.lend("a", 3, none)
    aside.ended("a")
    aside.take_back(no_cache)
    assert (aside.lent, aside.slots.numel(), len(others)) == (0, 8, 24)


def test_a_flush_gives_everything_anew():
    allocator, aside = aside_of(10, 1, 4)
    aside.lend("a", 2, none)
    allocator.__init__(10)
    aside.take()
    aside.ended("a")
    aside.take_back(no_cache)
    assert (aside.lent, aside.slots.numel(), allocator.available_size()) == (0, 4, 6)


@given(st.data(), st.sampled_from([1, 4]))
def test_nobody_has_fewer_slots_and_none_is_lost(data, page):
    allocator, aside = aside_of(40, page, 12 * page)
    others, running, used = [], {}, {}
    free = allocator.available_size()  # without internal requests
    for i in range(data.draw(st.integers(1, 12))):
        what = data.draw(st.sampled_from(["lend", "end", "other", "leaves"]))
        if what == "lend":
            tokens = data.draw(st.integers(1, 11 * page))
            if -(-tokens // page) * page + page <= aside.slots.numel():
                assert aside.lend(str(i), tokens, lambda rid=str(i): used.get(rid, 0))
                if data.draw(st.booleans()):
                    running[str(i)] = allocator.alloc(-(-tokens // page) * page)
                    used[str(i)] = tokens
                else:
                    running[str(i)] = allocator.alloc(0)  # its first chunk is not computed yet
        elif what == "end" and running:
            rid, slots = running.popitem()
            allocator.free(slots)
            aside.ended(rid)
            aside.take_back(no_cache)
        elif what == "other" and free >= page:
            others.append(allocator.alloc(page))
            free -= page
        elif what == "leaves" and others:
            allocator.free(others.pop())
            free += page
        assert allocator.available_size() >= free
        assert allocator.available_size() - aside.unused == free
        held = [*others, *running.values(), aside.slots, allocator.free_slots]
        assert torch.cat(held).sort().values.tolist() == list(range(page, 41 * page))
    for rid, slots in running.items():
        allocator.free(slots)
        aside.ended(rid)
    aside.take_back(no_cache)
    assert (aside.lent, allocator.available_size()) == (0, free)
