"""Folds in place: the reference against moves one by one, Triton against both, bit by bit."""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from kvpolicy.kernels.entries import compact_in_place as reference
from kvpolicy.kernels.entries import place as place_reference
from kvpolicy.kernels.entries import place_triton
from kvpolicy.kernels.entries.compact_in_place_triton import compact_in_place as in_triton
from kvpolicy.kernels.entries.requests import Requests
from kvpolicy.kernels.entries.tables import Tables

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def bits(x):
    """The stored bits: NaN equals NaN, and -0 is not 0."""
    return x.view(WHOLE[x.element_size()])


def side_by_side(parts):
    """Bool [L * G, M] of the layers' [G, m], padded in front."""
    most = max(x.shape[1] for x in parts)
    return torch.cat([F.pad(x, (most - x.shape[1], 0)) for x in parts])


@dataclass
class Case:
    """One request in a pool of random bits, with NaN and infinity, all rows different.

    Attributes:
        there: bool [G, M] per layer, entries that heads hold; None for all.
        kept: bool [G, M] per layer.
    """

    storage: torch.Tensor
    tables: Tables
    row: int
    length: int
    req_to_token: torch.Tensor
    kept: list
    there: list | None
    proceed: bool = True

    @property
    def held(self):
        """`there` per layer, all True if it is None."""
        return [torch.ones_like(x) for x in self.kept] if self.there is None else self.there

    def run(self, compact_in_place, **options):
        """Pool and counts after a call; checks that tables and masks are unchanged."""
        before = [t.clone() for t in vars(self.tables).values()]
        tables = Tables(*(t.to(DEVICE) for t in vars(self.tables).values()))
        masks = [side_by_side(each).to(DEVICE) for each in (self.kept, self.held)]
        storage = self.storage.to(DEVICE, copy=True)
        own = (torch.tensor([x], device=DEVICE) for x in (self.row, self.length))
        counts = compact_in_place(
            Requests(storage, tables, *own, self.req_to_token.to(DEVICE)),
            *masks,
            torch.tensor([[self.proceed]], device=DEVICE),
            **options,
        )
        assert all(
            torch.equal(x.cpu(), y) for x, y in zip(vars(tables).values(), before, strict=True)
        )
        assert counts.dtype == torch.int32
        return storage.cpu(), counts[0].cpu()

    def entry(self, layer, head, place):
        """Where an entry of a private list lies: its layer's rows, slot and place."""
        layers, kv_heads = self.tables.counts.shape[1:]
        page = int(self.tables.first_page[self.row, layer, head]) + place // kv_heads
        slot = int(self.tables.slots[int(self.tables.slots_start[self.row]) + page // layers])
        return page % layers, slot, place % kv_heads

    def entries(self, layer, head):
        """Places of all entries of a list, tail included."""
        private = int(self.tables.counts[self.row, layer, head])
        tail = self.req_to_token[self.row, int(self.tables.tail_start[self.row]) : self.length]
        paged = [self.entry(layer, head, place) for place in range(private)]
        return paged + [(layer, slot, head) for slot in tail.tolist()]

    def one_by_one(self):
        """Pool and counts by definition."""
        storage, counts = self.storage.clone(), self.tables.counts[self.row].clone()
        if not self.proceed:
            return storage, counts
        for layer, kept in enumerate(self.kept):
            for head, own in enumerate(kept):
                listed = self.entries(layer, head)
                stays = own if self.there is None else own[self.there[layer][head]]
                assert len(stays) == len(listed)
                chosen = [at for at, stay in zip(listed, stays.tolist(), strict=True) if stay]
                counts[layer, head] = len(chosen)
                for place, (rows, slot, at) in enumerate(chosen):
                    to_rows, to_slot, to_at = self.entry(layer, head, place)
                    new = self.storage[rows, :, slot, at]
                    storage[to_rows, :, to_slot, to_at] = new
        return storage, counts


def case(
    private,
    tail,
    kept,
    *,
    size=8,
    dtype=F32,
    room=None,
    ragged=True,
    seed=0,
):
    """A random request.

    Args:
        private: [L][G] numbers of entries in private pages.
        tail: number of tokens since.
        kept: share of entries that stay, or (layer, head, entries) -> list of bool.
        room: [L][G] entries that pages have room for; default: the entries before or after.
        ragged: whether heads hold different positions; otherwise `there` is None.
    """
    generator = torch.Generator().manual_seed(seed + 7 * tail + size)
    private = torch.tensor(private)
    layers, kv_heads = private.shape
    lengths = private + tail
    choices = [
        [
            torch.tensor(kept(layer, g, int(n)), dtype=torch.bool)
            if callable(kept)
            else torch.rand(int(n), generator=generator) < kept
            for g, n in enumerate(row)
        ]
        for layer, row in enumerate(lengths)
    ]
    stay = torch.tensor([[int(c.sum()) for c in row] for row in choices])
    room = torch.maximum(private, stay) if room is None else torch.tensor(room)
    pages = (room + kv_heads - 1) // kv_heads
    # A page between two lists belongs to nobody.
    used = pages + torch.randint(2, pages.shape, generator=generator)
    first = 1 + (used.flatten().cumsum(0) - used.flatten()).view(used.shape)
    slots = -(-(1 + int(used.sum())) // layers)
    padded = slots + tail + 7
    order = torch.randperm(padded, generator=generator)
    count = layers * 2 * padded * kv_heads * size
    high = 1 << (8 * dtype.itemsize - 1)
    whole = torch.randint(-high, high, (count,), generator=generator).to(WHOLE[dtype.itemsize])
    storage = whole.view(dtype).view(layers, 2, padded, kv_heads, size)
    tables = Tables.empty(5, layers, kv_heads, slots + 6, "cpu")
    for tensor in vars(tables).values():
        tensor.fill_(3)  # what others hold
    start = 11 if int(private.sum()) else 0
    tables.counts[2], tables.first_page[2] = private, first
    tables.tail_start[2], tables.slots_start[2] = start, 4
    tables.slots[4 : 4 + slots] = order[:slots]
    req_to_token = torch.full((6, start + tail + 5), 1, dtype=torch.int32)
    req_to_token[2, start : start + tail] = order[slots : slots + tail].int()
    masks, held = [], []
    for row, chosen in zip(lengths, choices, strict=True):
        spare = 5 if ragged and int(row.max()) else 0
        width = int(row.max()) + spare
        there = torch.zeros(kv_heads, width, dtype=torch.bool)
        own = (
            torch.rand(kv_heads, width, generator=generator) < 0.5
        )  # what is not there may be kept
        for g, n in enumerate(row.tolist()):
            at = torch.randperm(width, generator=generator)[:n].sort().values
            there[g, at] = True
            own[g, at] = chosen[g]
        masks.append(own)
        held.append(there)
    given = held if ragged else None
    assert ragged or all(bool(t.all()) for t in held)
    return Case(storage, tables, 2, start + tail, req_to_token, masks, given)


def same(got, wanted):
    assert torch.equal(got[1], wanted[1])
    assert torch.equal(bits(got[0]), bits(wanted[0]))


def front(number):
    """For `kept`: the first `number` entries."""
    return lambda layer, head, n: [at < number for at in range(n)]


def without(*places):
    """For `kept`: all but some places."""
    return lambda layer, head, n: [at not in places for at in range(n)]


SMALL = {
    "usual": case([[9, 14], [3, 0], [20, 7]], 4, 0.6),
    "all heads the same": case([[9, 9], [4, 4]], 3, 0.7, ragged=False),
    "one head": case([[63]], 1, 0.9, ragged=False),
    "three heads": case([[5, 6, 7], [0, 1, 2]], 5, 0.5),
    "no tail": case([[9, 14], [3, 0]], 0, 0.5),
    "only a tail": case([[0, 0], [0, 0]], 9, 0.4, ragged=False),
    "nothing cached": case([[0, 0], [0, 0]], 0, 0.5),
    "everything dropped": case([[9, 14], [3, 0]], 4, 0.0),
    "nothing dropped": case([[9, 14], [3, 0]], 4, 1.0),
    "only the tail is dropped": case([[8, 8], [8, 8]], 4, front(8), ragged=False),
    "only the first is dropped": case([[8, 8], [8, 8]], 4, without(0), ragged=False),
    "the last private one is dropped": case([[8, 8], [8, 8]], 4, without(7), ragged=False),
    "the tail fills the last page": case([[7, 5]], 1, 1.0, room=[[8, 6]]),
    "the tail begins a page": case([[8, 6]], 1, 1.0, room=[[9, 7]]),
    "exactly the room": case([[16, 6]], 6, without(0, 3, 5, 9, 11, 1), room=[[16, 6]]),
}


@pytest.mark.parametrize("name", SMALL)
def test_reference_equals_moving_one_by_one(name):
    same(SMALL[name].run(reference.compact_in_place), SMALL[name].one_by_one())


def test_cases_move_something():
    """Most of the cases above change the pool, so that the tests can fail."""
    still = [
        name
        for name, each in SMALL.items()
        if torch.equal(bits(each.run(reference.compact_in_place)[0]), bits(each.storage))
    ]
    assert still == ["nothing cached", "everything dropped", "only the tail is dropped"]


@pytest.mark.slow
@pytest.mark.parametrize("tile", [4, None])
@pytest.mark.parametrize("name", SMALL)
def test_triton_equals_moving_one_by_one(name, tile):
    same(SMALL[name].run(in_triton, tile=tile), SMALL[name].one_by_one())


CASES = {
    # private entries [L][G], tail, share or choice, head size, dtype
    "D 64, fp32": ([[63, 0, 1], [64, 5, 130]], 4, 0.9, 64, F32),
    "D 64, fp16, 1000 entries": ([[1000, 63]], 16, 0.97, 64, F16),
    "D 80, bf16": ([[63, 1], [0, 17]], 16, 0.8, 80, BF16),
    "D 80, fp32, one head": ([[63], [40]], 1, without(0), 80, F32),
    "D 96, bf16, eight heads": ([[40, 0, 1, 63, 7, 8, 9, 16]], 3, 0.5, 96, BF16),
    "D 128, bf16, no tail": ([[63, 33], [0, 100]], 0, 0.9, 128, BF16),
    "D 128, fp16, only a tail": ([[0, 0], [0, 0]], 63, 0.3, 128, F16),
    "D 128, bf16, a prompt of 1000": ([[0, 0]], 1000, 0.05, 128, BF16),
    "D 128, bf16, one leaves of 1000": ([[1000, 1000]], 1, without(500), 128, BF16),
    "D 256, bf16": ([[30, 63]], 9, 0.6, 256, BF16),
    "D 256, fp32, everything leaves": ([[30, 63]], 9, 0.0, 256, F32),
    "D 128, fp8": ([[63, 33], [0, 100]], 9, 0.7, 128, E4M3),
    "D 7, fp8": ([[40, 0, 17]], 3, 0.6, 7, E5M2),
    "D 256, fp16, nothing leaves": ([[30, 63]], 9, 1.0, 256, F16),
}


@pytest.mark.slow
@pytest.mark.thorough(every=2)
@pytest.mark.parametrize("ragged", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_triton_equals_reference(name, ragged):
    private, tail, kept, size, dtype = CASES[name]
    if not ragged:
        private = [[row[0]] * len(row) for row in private]
    each = case(private, tail, kept, size=size, dtype=dtype, ragged=ragged)
    # Large tiles where lists are long: the interpreter is slow by the tile, not by the row.
    tile = 256 if max(map(max, private)) + tail > 200 else None
    same(each.run(in_triton, tile=tile), each.run(reference.compact_in_place))


def test_pieces_of_rows():
    """Rows cut into more pieces than their length is a multiple of, or not at all."""
    each = case([[20, 9], [0, 13]], 5, 0.7, size=80, dtype=F16)
    for piece in (32, 128, 512):
        same(each.run(in_triton, piece=piece, tile=32), each.one_by_one())


@pytest.mark.parametrize(("size", "dtype"), [(5, BF16), (6, F16), (3, F32)])
def test_rows_that_are_no_power_of_two(size, dtype):
    """They move in words of four bytes, or by element if their size is no multiple of four."""
    each = case([[20, 9], [0, 13]], 5, 0.7, size=size, dtype=dtype)
    same(each.run(in_triton), each.one_by_one())
    same(each.run(reference.compact_in_place), each.one_by_one())


@pytest.mark.parametrize("seed", range(8))
def test_any_lists(seed):
    """Random numbers of layers, heads and entries, any share of them kept, any tile."""
    generator = torch.Generator().manual_seed(seed)

    def random(least, end):
        return int(torch.randint(least, end, (), generator=generator))

    kv_heads = (1, 2, 3, 8)[random(0, 4)]
    private = [[random(0, 30) for _ in range(kv_heads)] for _ in range(random(1, 3))]
    each = case(private, random(0, 20), random(0, 11) / 10, size=random(1, 9), seed=seed)
    wanted = each.one_by_one()
    same(each.run(reference.compact_in_place), wanted)
    same(each.run(in_triton, tile=1 << random(3, 6)), wanted)


def in_one_pool(one, other):
    """Pool, tables and slots of two requests; `other` is in row 3."""
    before = one.storage.shape[2]
    storage = torch.cat([one.storage, other.storage], 2)
    tables = {name: each.clone() for name, each in vars(one.tables).items()}
    for name in ("counts", "first_page", "tail_start"):
        tables[name][3] = getattr(other.tables, name)[2]
    tables["slots"] = torch.cat([one.tables.slots, other.tables.slots + before])
    tables["slots_start"][3] = len(one.tables.slots) + other.tables.slots_start[2]
    width = max(one.length, other.length) + 3
    table = torch.ones(6, width, dtype=torch.int32)
    table[2, : one.length] = one.req_to_token[2, : one.length]
    table[3, : other.length] = other.req_to_token[2, : other.length] + before
    return storage, Tables(**tables), table


@pytest.mark.parametrize("proceed", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("compact_in_place", [reference.compact_in_place, in_triton])
def test_requests_move_as_each_alone(compact_in_place, proceed):
    """In one launch, in any order; requests that do not proceed stay unchanged."""
    one = case([[9, 14], [3, 0]], 4, 0.6)
    other = case([[0, 0], [0, 0]], 17, 0.4, seed=1)
    storage, tables, table = in_one_pool(one, other)
    pairs = list(zip((one, other), proceed, strict=True))
    wanted = [replace(each, proceed=own).one_by_one() for each, own in pairs]
    for order in ((0, 1), (1, 0)):
        each = [(one, other)[i] for i in order]
        masks = [
            side_by_side([own for x in each for own in getattr(x, name)]).to(DEVICE)
            for name in ("kept", "there")
        ]
        pool = storage.to(DEVICE, copy=True)
        counts = compact_in_place(
            Requests(
                pool,
                Tables(*(t.to(DEVICE) for t in vars(tables).values())),
                torch.tensor([(2, 3)[i] for i in order], device=DEVICE),
                torch.tensor([x.length for x in each], device=DEVICE),
                table.to(DEVICE),
            ),
            *masks,
            torch.tensor([[True, proceed[i], True] for i in order], device=DEVICE),
        ).cpu()
        before = one.storage.shape[2]
        for place, i in enumerate(order):
            part = pool.cpu()[:, :, :before] if i == 0 else pool.cpu()[:, :, before:]
            same((part.contiguous(), counts[place]), wanted[i])


@pytest.mark.parametrize("compact_in_place", [reference.compact_in_place, in_triton])
def test_nothing_is_written_where_it_does_not_proceed(compact_in_place):
    each = replace(SMALL["usual"], proceed=False)
    storage, counts = each.run(compact_in_place)
    assert torch.equal(bits(storage), bits(each.storage))
    assert torch.equal(counts, each.tables.counts[each.row])


@pytest.mark.parametrize("place", [place_reference.place, place_triton.place])
def test_rows_that_changed_go_to_the_same_pages(place):
    """Rows that a merge or rotation changes, written by `place`, lie as after moves."""
    each = SMALL["usual"]
    wanted, _ = each.one_by_one()
    storage = each.storage.to(DEVICE, copy=True)
    layers, _, padded, kv_heads, size = storage.shape
    start = int(each.tables.slots_start[each.row])
    slots = each.tables.slots[start : start + padded].long()
    pages = (slots[:, None] + torch.arange(layers) * 2 * padded).flatten()
    for layer, (kept, there) in enumerate(zip(each.kept, each.there, strict=True)):
        dense = torch.full((2, *kept.shape, size), float("nan"))
        for head in range(kv_heads):
            at = each.entries(layer, head)
            rows = [each.storage[rows, :, slot, place] for rows, slot, place in at]
            dense[:, head, there[head]] = torch.stack(rows, 1)
        arguments = [x.to(DEVICE) for x in (*dense, kept & there, pages)]
        first_page = each.tables.first_page[each.row, layer].to(DEVICE)
        place(
            storage.view(-1, size),
            *arguments,
            value_offset=padded * kv_heads,
            first_page=first_page,
        )
    assert torch.equal(bits(storage.cpu()), bits(wanted))


def test_too_much_for_its_pages():
    """If a list would reach into the next one, or into slots of others, nothing is written."""
    for layer, room in ((0, [[9, 14], [20, 20]]), (1, [[20, 20], [9, 14]])):
        each = case([[8, 14], [8, 14]], 5, 1.0, room=room)
        # No page between the lists.
        used = (torch.tensor(room) + 1) // 2
        first = (used.flatten().cumsum(0) - used.flatten()).view(2, 2).int()
        each.tables.first_page[2] = first
        before = each.storage.clone()
        message = rf"kept: expected at most 10 entries at layer {layer}, KV head 0, .* got 13"
        with pytest.raises(ValueError, match=message):
            each.run(reference.compact_in_place)
        assert torch.equal(bits(before), bits(each.storage))
    each = case([[4, 4]], 2, 1.0)
    each.tables = replace(each.tables, slots=each.tables.slots[:8])
    with pytest.raises(ValueError, match=r"kept: expected at most .* at layer 0, KV head 1"):
        each.run(reference.compact_in_place)


def test_lists_that_are_not_as_long_as_said():
    each = case([[4, 4], [4, 6]], 2, 1.0)
    each.there[1][0, int(each.there[1][0].nonzero()[0])] = False
    with pytest.raises(ValueError, match=r"holds: expected \[6, 8\] True .* layer 1, got \[5, 8\]"):
        each.run(reference.compact_in_place)


WRONG = {
    "storage": (torch.zeros(2, 1, 9, 2, 4), r"storage: expected contiguous \[L, 2, padded, G, D\]"),
    "rows": (torch.ones(1), r"rows: expected contiguous int64 \[1\], got torch.float32 \[1\]"),
    "lengths": (
        torch.ones(2).long(),
        r"lengths: expected contiguous int64 \[1\], got torch.int64 \[2\]",
    ),
    "req_to_token": (
        torch.zeros(4, 9),
        r"req_to_token: expected int32 .* got torch.float32 \[4, 9",
    ),
    "kept": (torch.ones(4, 3), r"kept: expected bool \[4, 3\], got torch.float32 \[4, 3\]"),
    "holds": (torch.ones(3, 4).bool(), r"holds: expected bool \[4, 3\], got torch.bool \[3, 4\]"),
    "proceed": (torch.tensor([True]), r"proceed: expected bool \[1, P\], got torch.bool \[1\]"),
    "tables": (
        Tables.empty(5, 2, 3, 9, "cpu"),
        r"tables.counts: expected \[5, 2, 2\], got \[5, 2, 3",
    ),
}


@pytest.mark.parametrize("compact_in_place", [reference.compact_in_place, in_triton])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(compact_in_place, name):
    value, message = WRONG[name]
    arguments = {
        "storage": torch.zeros(2, 2, 9, 2, 4),
        "tables": Tables.empty(5, 2, 2, 9, "cpu"),
        "rows": torch.tensor([1]),
        "lengths": torch.tensor([3]),
        "req_to_token": torch.zeros(4, 9, dtype=torch.int32),
        "kept": torch.ones(4, 3, dtype=torch.bool),
        "holds": torch.ones(4, 3, dtype=torch.bool),
        "proceed": torch.tensor([[True]]),
    } | {name: value}
    requests = Requests(*(arguments.pop(name) for name in Requests._fields))
    with pytest.raises(ValueError, match=message):
        compact_in_place(requests, **arguments)
