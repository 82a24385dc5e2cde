"""A fold of one request: written in place, to other pages, by layer or anew."""

import itertools
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from fake_allocator import Allocator, no_cache
from kvpolicy.dsl.execute.layer.choice import Choice
from kvpolicy.sglang_ext.face.kernels_in_use import in_use
from kvpolicy.sglang_ext.face.ranks import Ranks
from kvpolicy.sglang_ext.forward.fold import Fold, Left
from kvpolicy.sglang_ext.forward.group_fold import GroupFold, Member, portions_of
from kvpolicy.sglang_ext.memory.arena import create_arena
from kvpolicy.sglang_ext.memory.lists import Lists
from kvpolicy.sglang_ext.memory.store import Store
from kvpolicy.sglang_ext.memory.tables import DeviceTables
from kvpolicy.sglang_ext.request.pending_steps import PendingSteps
from kvpolicy.sglang_ext.request.request import Decoding, RequestState

LAYERS, KV_HEADS, SIZE, SLOTS, ROW, CONTEXT = 3, 2, 8, 120, 2, 60
WAYS = {"write_in_place": (GroupFold, "_launch"), "move": (GroupFold, "_move")} | {
    way: (Fold, way) for way in ("write_by_layer", "write_anew")
}


class World:
    """One request with private pages, whose tail grows and whose entries leave."""

    def __init__(self, monkeypatch, seed, page_size=1, spans=(range(LAYERS),), stage=0):
        self.random = torch.Generator().manual_seed(seed)
        layers = len(spans[stage])
        arena = create_arena(layers, SLOTS + page_size, KV_HEADS, SIZE, torch.float32, "cpu")
        self.arena = arena = replace(arena, spans=spans, stage=stage)
        arena.storage.fill_(float("nan"))  # slots that nobody has written
        self.tables = DeviceTables(arena, ROW + 1, SLOTS)
        allocator = Allocator(SLOTS // page_size, page_size)
        self.store = Store(arena, allocator, tables=self.tables)
        self.table = torch.zeros(ROW + 1, CONTEXT, dtype=torch.int32)
        self.length = self.freed = 0
        self.ways, self.reported, self.waits = [], [], []
        served = SimpleNamespace(name="p", kernels=in_use(torch.device("cpu")))
        self.state = RequestState(served, prompt=0, slots=0)
        self.request = SimpleNamespace(rid="r", kv=SimpleNamespace(req_pool_idx=ROW))
        self.runtime = SimpleNamespace(
            arena=arena, store=self.store, tables=self.tables, ranks=Ranks(), evict=no_cache,
            detach=self.detach, reports=SimpleNamespace(finished_fold=self.report),
            failures=SimpleNamespace(
                contained=lambda request, stage, **_: nullcontext(),
                contained_together=lambda requests, stage: nullcontext(),
                agree=lambda requests: None,
            ),
            tree=SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=self.table)),
        )  # fmt: skip
        for way, (owner, name) in WAYS.items():
            monkeypatch.setattr(owner, name, self.noting(way, getattr(owner, name)))

    def noting(self, way, original):
        def run(fold, *given):
            self.ways.append(way)
            return original(fold, *given)

        return run

    def report(self, request, state, dropped, seconds):
        reported = state.reported
        reported.folded, reported.dropped = reported.folded + 1, reported.dropped + dropped
        self.reported.append((reported.folded, reported.dropped))

    def detach(self, requests):
        """Frees copied slots and fills them with NaN, so that a read would show."""
        if not requests:
            return
        ((_, state),) = requests
        end = state.private.tail_start // self.store.allocator.page_size
        end *= self.store.allocator.page_size
        slots = self.table[ROW, self.freed : end].long()
        self.store.allocator.free(slots)
        self.arena.storage[:, :, slots] = float("nan")
        self.table[ROW, self.freed : end] = 0
        self.freed = end

    def grow(self, tokens):
        """Caches `tokens` tokens in ordinary slots."""
        page = self.store.allocator.page_size
        for position in range(self.length, self.length + tokens):
            if position % page == 0:
                slots = self.store.allocator.alloc(page)
                self.table[ROW, position : position + page] = slots
        slots = self.table[ROW, self.length : self.length + tokens].long()
        rows = (self.arena.layers, 2, tokens, KV_HEADS, SIZE)
        self.arena.storage[:, :, slots] = torch.randn(rows, generator=self.random)
        self.length += tokens
        self.tables.write()

    def entries(self):
        """Keys and values [2, n, D] per layer and KV head."""
        private = self.state.private
        if private is None:
            slots = self.table[ROW, : self.length].long()
            rows = self.arena.storage[:, :, slots]
            layers = range(self.arena.layers)
            return [[rows[i, :, :, g] for g in range(KV_HEADS)] for i in layers]
        lists = Lists(self.arena, [private], [self.length], self.table)
        found = []
        for layer in range(self.arena.layers):
            indptr, indices = lists.of(0, layer)
            pools = (self.arena.entries, self.arena.values)
            parts = [indices[start:end] for start, end in itertools.pairwise(indptr.tolist())]
            found.append([torch.stack([pool[ids] for pool in pools]) for ids in parts])
        return found

    def choose(self, counts, changed=False):
        """Choices that keep `counts` random entries of each list, and the kept entries in order."""
        before = self.entries()
        choices, wanted = [], []
        for layer, heads in enumerate(before):
            lengths = [entries.shape[1] for entries in heads]
            most = max(lengths)
            there = torch.zeros(KV_HEADS, most, dtype=torch.bool)
            kept = torch.zeros_like(there)
            k, v = torch.full((2, KV_HEADS, most, SIZE), float("nan"))
            own = []
            for g, entries in enumerate(heads):
                places = torch.randperm(most, generator=self.random)[: lengths[g]].sort().values
                number = min(int(counts[layer][g]), lengths[g])
                stay = torch.randperm(lengths[g], generator=self.random)[:number].sort().values
                there[g, places] = True
                kept[g, places[stay]] = True
                k[g, places], v[g, places] = entries + 1 if changed else entries
                own.append(entries[:, stay] + 1 if changed else entries[:, stay])
            everywhere = bool(there.all())
            rows = (k, v) if changed else (None, None)
            there = None if everywhere else there
            choices.append(Choice(kept, held_mask=there, merged=partial(tuple, rows)))
            wanted.append(own)
        return choices, wanted

    def fold(self, choices, finite=True, arrived=True, fixed=True, whole_model=None):
        """The fold of these choices, as `follow_together` and `Memory.numbers` would give them.

        Args:
            finite: whether the tensors were finite.
            arrived: whether the numbers are on the host; if not, reading them is an error.
            fixed: whether the numbers do not depend on data.
            whole_model: numbers of all layers, if some are in other stages.
        """
        there = torch.tensor([[entries.shape[1] for entries in heads] for heads in self.entries()])
        kept = torch.stack([choice.kept.sum(1) for choice in choices])
        left = there - kept if finite else there - there
        of_fold = SimpleNamespace(
            counts_before=there, counts_after=there - left, finite=finite, left=int(left.sum()),
            fewest=int(left.min()),
        )  # fmt: skip
        waits = []

        def numbers():
            waits[:] = [arrived]  # once they are on the host nobody waits
            return of_fold

        memory = SimpleNamespace(
            numbers=numbers,
            numbers_arrived=lambda: arrived,
            keeps_size=lambda counts: fixed,
        )
        self.state.decoding = Decoding(memory, PendingSteps(1))
        private, whole = self.state.private, [torch.ones_like(each.kept) for each in choices]
        same = kept if private is None else private.counts
        held = [
            all_held if each.held_mask is None else each.held_mask
            for each, all_held in zip(choices, whole, strict=True)
        ]
        staying = SimpleNamespace(
            kept=side_by_side([each.kept for each in choices]), held_mask=side_by_side(held),
            proceed=(kept == same).all(1)[None] & finite, checks_counts=True,
            in_place=all(each.rows[0] is None for each in choices),
            merge=lambda proceed: None, choices=lambda place, read, slots: choices,
        )  # fmt: skip
        together = SimpleNamespace(
            _services=self.runtime, _kernels=self.state.served.kernels, _table=self.table,
            _members=[Member(self.request, self.state, self.length, [])],
            _bound=SimpleNamespace(positions="original"), _rows=torch.tensor([ROW]),
            _lengths=torch.tensor([self.length]), _places=torch.tensor([0]),
        )  # fmt: skip
        fold = GroupFold(together, staying)
        if whole_model is None:
            fold.finish()
        else:
            fold.carry_out({id(self.request): whole_model})
        self.waits += waits
        self.store.check_integrity(self.store.allocator.free_slots)
        self.grow(1)

    def check(self, wanted):
        """Checks the entries before the token that came after a fold."""
        for heads, others in zip(self.entries(), wanted, strict=True):
            for own, other in zip(heads, others, strict=True):
                assert torch.equal(own[:, :-1], other)


def side_by_side(parts):
    """Bool [L * G, M] of the layers' [G, m], padded in front."""
    most = max(x.shape[1] for x in parts)
    return torch.cat([F.pad(x, (most - x.shape[1], 0)) for x in parts])


def test_a_first_fold_copies_what_stays_and_leaves_the_rest(monkeypatch):
    world = World(monkeypatch, 0)
    world.grow(21)
    choices, wanted = world.choose([[7, 7], [3, 21], [0, 1]])
    world.fold(choices)
    world.check(wanted)
    assert world.ways == ["write_anew"]
    assert world.state.private.laid_out == [[7, 7], [3, 21], [0, 1]]
    assert world.reported == [(1, 6 * 21 - 39)]
    assert world.freed == 21


def test_lists_that_stay_as_long_are_compacted_in_place(monkeypatch):
    world = World(monkeypatch, 1)
    world.grow(30)
    counts = [[7, 8], [3, 12], [1, 5]]
    world.fold(world.choose(counts)[0])
    layout = world.state.private.first_page.clone()
    free = world.store.allocator.free_slots.numel()
    for tokens in (1, 5, 4):
        world.grow(tokens)
        choices, wanted = world.choose(counts)
        world.fold(choices)
        world.check(wanted)
        assert torch.equal(world.state.private.first_page, layout)
        assert world.store.allocator.free_slots.numel() == free
    assert world.ways == ["write_anew", "write_in_place", "write_in_place", "write_in_place"]


def test_lists_that_were_full_are_compacted_before_the_numbers_have_arrived(monkeypatch):
    world = World(monkeypatch, 6)
    world.grow(30)
    counts = [[7, 8], [3, 12], [1, 5]]
    world.fold(world.choose(counts)[0], arrived=False)
    assert len(world.waits) == 1  # a first fold's numbers are nobody's knowledge
    for tokens in (1, 5, 4):
        world.grow(tokens)
        choices, wanted = world.choose(counts)
        world.fold(choices, arrived=False)
        world.check(wanted)
        assert world.state.private.laid_out == counts
        assert world.state.private.counts.tolist() == counts
    assert len(world.waits) == 1
    assert world.ways == ["write_anew", "write_in_place", "write_in_place", "write_in_place"]
    # Every list loses what came, one token after each fold included.
    assert [dropped for _, dropped in world.reported] == [144, 156, 192, 222]


@pytest.mark.parametrize(
    ("first", "options"),
    [
        ([[7, 8], [3, 30], [1, 5]], {}),  # a list that lost nothing
        ([[7, 8], [3, 12], [1, 5]], {"fixed": False}),
        ([[7, 8], [3, 12], [1, 5]], {"arrived": True}),
    ],
)
def test_other_folds_wait_for_their_numbers(monkeypatch, first, options):
    world = World(monkeypatch, 7)
    world.grow(30)
    world.fold(world.choose(first)[0])
    choices, wanted = world.choose([[7, 8], [3, 12], [1, 5]])
    world.fold(choices, **{"arrived": False, **options})
    world.check(wanted)
    assert len(world.waits) == 2


@pytest.mark.parametrize("page_size", [1, 4])
def test_lists_that_outgrow_their_pages_are_moved_to_other_ones(monkeypatch, page_size):
    world = World(monkeypatch, 10, page_size)
    world.grow(20)
    world.fold(world.choose([[7, 8], [3, 20], [1, 5]])[0])
    for more in (3, 6, 9):
        world.grow(2)
        counts = [[7, 8], [3, 20 + more], [1 + more, 5]]
        choices, wanted = world.choose(counts)
        world.fold(choices)
        world.check(wanted)
        private = world.state.private
        assert private.laid_out == counts
        assert private.slots.numel() == world.store.slots_for(torch.tensor(counts))
    assert world.ways == ["write_anew", "move", "move", "move"]
    assert world.freed == (20 + 9) // page_size * page_size


def test_changed_rows_wait_for_their_numbers(monkeypatch):
    world = World(monkeypatch, 8)
    world.grow(30)
    world.fold(world.choose([[7, 8]] * LAYERS)[0])
    choices, wanted = world.choose([[7, 8]] * LAYERS, changed=True)
    world.fold(choices, arrived=False)
    world.check(wanted)
    assert len(world.waits) == 2


def test_what_is_not_finite_is_not_moved_before_the_numbers_have_arrived(monkeypatch):
    world = World(monkeypatch, 9)
    world.grow(30)
    world.fold(world.choose([[7, 8]] * LAYERS)[0])
    private = world.state.private
    pages = world.arena.storage[:, :, private.slots.long()].clone()
    world.fold(world.choose([[7, 8]] * LAYERS)[0], finite=False, arrived=False)
    held = world.arena.storage[:, :, private.slots.long()]
    assert torch.equal(held.nan_to_num(7.0), pages.nan_to_num(7.0))
    assert private.counts.tolist() == [[7, 8]] * LAYERS
    assert len(world.waits) == 1


def test_changed_rows_are_written_layer_by_layer_where_there_is_room(monkeypatch):
    world = World(monkeypatch, 2)
    world.grow(30)
    counts = [[7, 8], [3, 12], [4, 5]]
    world.fold(world.choose(counts)[0])
    for less in (0, 1, 2):
        world.grow(3)
        shorter = [[each - less for each in own] for own in counts]
        choices, wanted = world.choose(shorter, changed=True)
        world.fold(choices)
        world.check(wanted)
    assert world.ways == ["write_anew"] + ["write_by_layer"] * 3
    slots = world.store.slots_for(torch.tensor(world.state.private.laid_out))
    assert world.state.private.slots.numel() == slots


def test_lists_that_became_much_shorter_give_their_slots_back(monkeypatch):
    world = World(monkeypatch, 3)
    world.grow(40)
    world.fold(world.choose([[30, 30]] * LAYERS)[0])
    choices, wanted = world.choose([[6, 6]] * LAYERS)
    world.fold(choices)
    world.check(wanted)
    assert world.ways == ["write_anew", "write_by_layer"]
    assert world.state.private.slots.numel() == 6


@pytest.mark.parametrize("page_size", [1, 4])
def test_random_folds_keep_what_they_should(monkeypatch, page_size):
    for seed in range(12):
        world = World(monkeypatch, seed, page_size)
        world.grow(20)
        for _ in range(6):
            more = int(torch.randint(0, 6, (), generator=world.random))
            world.grow(more)
            counts = torch.randint(0, 12, (LAYERS, KV_HEADS), generator=world.random).tolist()
            changed = bool(torch.randint(0, 2, (), generator=world.random))
            choices, wanted = world.choose(counts, changed)
            if sum(map(sum, counts)) == 0:
                continue
            before = world.entries()
            leaves = any(
                own.shape[1] < entries.shape[1]
                for heads, owns in zip(before, wanted, strict=True)
                for entries, own in zip(heads, owns, strict=True)
            )
            world.fold(choices)
            world.check(wanted if leaves else before)


def test_nothing_is_touched_where_numbers_are_not_finite(monkeypatch):
    world = World(monkeypatch, 4)
    world.grow(20)
    world.fold(world.choose([[5, 5]] * LAYERS)[0])
    world.grow(4)
    before, slots = world.entries(), world.state.private.slots
    world.fold(world.choose([[5, 5]] * LAYERS)[0], finite=False)
    world.check(before)
    assert world.state.private.slots is slots
    assert world.reported == [(1, 6 * 15)]


STAGES = (range(3), range(3, 5))
FIRST = torch.tensor([[7, 8], [3, 12], [1, 5], [20, 20], [9, 2]])
# By way of the last fold what the folds keep; only lists of the second stage outgrow their pages.
FOLDS = {
    "write_anew": [FIRST],
    "write_in_place": [FIRST, FIRST],
    "move": [FIRST, FIRST + torch.tensor([0, 0, 0, 3, 0])[:, None]],
    "write_by_layer": [FIRST, torch.full((5, 2), 2)],
}
# Rows that change, for which the pages of the second stage are too few and those of the first not.
CHANGED = [FIRST, torch.tensor([[2, 2], [2, 2], [2, 2], [23, 23], [9, 2]])]


@contextmanager
def noted(state):
    """A block that notes a failure for the other stages."""
    try:
        yield
    except RuntimeError:
        state.failure_code = 1


def raising(*given):
    raise RuntimeError("on purpose")


def folded(world, counts, monkeypatch, fails=None, *, changed=False):
    """Folds of a stage, the last of which may fail; the entries that stay."""
    state = world.state
    world.runtime.failures = SimpleNamespace(
        contained=lambda request, stage, **_: noted(state), agree=lambda requests: None,
        contained_together=lambda requests, stage: noted(state),
        note=lambda request, stage, error: setattr(state, "failure_code", 1),
    )  # fmt: skip
    world.grow(30)
    own, wanted = world.arena.span, None
    for number, kept in enumerate(counts, 1):
        last = number == len(counts)
        rows = kept[own.start : own.stop].tolist()
        choices, wanted = world.choose(rows, changed=changed and last)
        before = state.private
        there = torch.full_like(kept, world.length)
        if before is not None:
            there = torch.tensor(before.laid_out) + world.length - before.tail_start
        with monkeypatch.context() as patches:
            if fails and last:
                patches.setattr(*WAYS[fails], raising)
            world.fold(choices, whole_model=Left.between(there, kept))
        world.grow(4)
    return wanted


@pytest.mark.parametrize(
    ("way", "counts", "changed"),
    [*((way, counts, False) for way, counts in FOLDS.items()), ("write_anew", CHANGED, True)],
)
def test_stages_hold_as_many_slots_also_where_a_fold_fails_on_one(
    monkeypatch, way, counts, changed
):
    held = {}
    for stage in range(2):
        for fails in (None, way):
            world = World(monkeypatch, stage, spans=STAGES, stage=stage)
            wanted = folded(world, counts, monkeypatch, fails, changed=changed)
            private = world.state.private
            free = world.store.allocator.free_slots.numel()
            held[stage, fails] = private.slots.numel(), private.tail_start, world.freed, free
            assert bool(world.state.failure_code) == bool(fails)
            if fails:
                assert int(private.counts.sum()) == 0  # nobody reads what is half written
                continue
            assert world.ways[-1] == way
            for heads, others in zip(world.entries(), wanted, strict=True):
                for own, other in zip(heads, others, strict=True):
                    assert torch.equal(own[:, :-5], other)
    assert len({*held.values()}) == 1, held


def test_a_group_has_no_more_lists_than_a_grid_has_programs():
    """CUDA starts at most 65,535 programs along the second axis of a grid."""
    arena = SimpleNamespace(layers=32, kv_heads=8)
    narrow = SimpleNamespace(width=22)
    sizes = [len(portion) for portion in portions_of([narrow] * 600, arena)]
    assert sizes == [255, 255, 90]
    wide = SimpleNamespace(width=2**20)
    assert [len(portion) for portion in portions_of([wide, narrow], arena)] == [1, 1]


@pytest.mark.parametrize(
    ("widths", "portions"),
    [
        ([260, 250, 257, 255], [[260, 250, 257, 255]]),  # on both sides of a power of two
        ([100, 51, 199, 101], [[100, 199, 101], [51]]),
        ([100, 51, 200], [[200], [100, 51]]),
        ([7, 1, 2, 1, 3], [[7], [2, 3], [1, 1]]),
    ],
)
def test_no_request_folds_in_a_block_twice_as_wide_as_it_needs(widths, portions):
    arena = SimpleNamespace(layers=2, kv_heads=2)
    members = [SimpleNamespace(width=width) for width in widths]
    found = portions_of(members, arena)
    assert [[member.width for member in portion] for portion in found] == portions
