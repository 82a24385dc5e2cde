"""Compaction of all layers, the selection before it, folds, and rows that propagation moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from kvpolicy.kernels.entries import compact_in_place as in_place_reference
from kvpolicy.kernels.entries import compact_layers as reference
from kvpolicy.kernels.entries.compact_in_place_triton import compact_in_place
from kvpolicy.kernels.entries.compact_layers_triton import compact_layers
from kvpolicy.kernels.entries.gather_triton import gather
from kvpolicy.kernels.entries.place_triton import place
from kvpolicy.kernels.entries.requests import Requests
from kvpolicy.kernels.entries.rows_triton import put_rows, take_rows
from kvpolicy.kernels.entries.tables import Tables
from kvpolicy.kernels.scoring.select import ABSENT
from kvpolicy.kernels.scoring.select import top as torch_top
from kvpolicy.kernels.table_triton import TRITON

from cases.case import Bench, Case, Model, Planned, Target

OURS, TORCH = "ours", "torch, the reference"
# Entries kept per layer and KV head, and prompt tokens, of the target.
KEPT, NAMED = 2048, 32768
# Tokens since the last fold; as many entries of each list leave.
TAIL = 16


def some(model: Model, tokens: int, number: int) -> torch.Tensor:
    """bool [L, G, N] with `number` True per list, at random places."""
    shape = model.shape
    places = [
        torch.stack([model.permutation(tokens, seed=seed)[:number] for seed in seeds])
        for seeds in torch.arange(shape.layers * shape.kv_heads).view(shape.layers, -1).tolist()
    ]
    kept = torch.zeros(shape.layers, shape.kv_heads, tokens, dtype=torch.bool, device=model.device)
    return kept.scatter_(2, torch.stack(places), True)


def bits(x: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, so that equality covers every bit."""
    return x.view(torch.int16 if x.element_size() == 2 else torch.int32)


def prompt_of(model: Model, tokens: int, number: int) -> tuple[torch.Tensor, tuple]:
    """A pool with a prompt that keeps `number` entries per list.

    Returns:
        storage, and the other arguments of `compact_layers`.
    """
    shape, device = model.shape, model.device
    per_list = -(-number // shape.kv_heads)
    private = shape.kv_heads * per_list  # slots: L pages each, L * G lists of `per_list` pages
    padded = tokens + private + 1
    storage = model.random(shape.layers, 2, padded, shape.kv_heads, shape.head_dim, seed=1)
    order = 1 + model.permutation(padded - 1, seed=2)
    lists = torch.arange(shape.layers * shape.kv_heads, device=device)
    first = (lists * per_list).view(shape.layers, -1)
    inputs = (order[:tokens], some(model, tokens, number), order[tokens:], first)
    return storage, inputs


def _compaction(bench: Bench, tokens: int, number: int) -> Case:
    model, shape = bench.model, bench.model.shape
    storage, inputs = prompt_of(model, tokens, number)
    calls = {
        OURS: lambda: compact_layers(storage, *inputs),
        TORCH: lambda: reference.compact_layers(storage, *inputs),
    }

    def check() -> str:
        wanted = storage.clone()
        reference.compact_layers(wanted, *inputs)
        assert not torch.equal(bits(wanted), bits(storage)), "nothing was to be copied"
        calls[OURS]()
        assert torch.equal(bits(storage), bits(wanted)), OURS
        return "every bit of the pool as after the reference"

    # Each kept key and value is read once and written once.
    counted = shape.layers * shape.kv_heads * number * 4 * model.entry_bytes
    targets = ()
    if (tokens, number) == (NAMED, KEPT):
        what = f"compaction of {number} of {tokens} entries, all layers: read and written / copy"
        targets = (
            Target(what, 0.6, True, "%", lambda times: bench.share_of_copy(counted, times[OURS])),
        )
    return Case(
        "compaction", f"{number} per list, {shape.layers} layers", tokens, 1, calls, check,
        counted=counted, layers=shape.layers, prefill=True, targets=targets,
        waits=(TORCH,),
    )  # fmt: skip


@dataclass(frozen=True)
class Fold:
    """A request whose lists have grown by TAIL tokens and lose as many entries, at random.

    Attributes:
        storage: [L, 2, padded, G, D].
        tables, req_to_token, length: the request is row 1; row: that number, on the device.
        kept, there: bool [L, G, M]; heads hold different ones of the M positions.
        lists: int64 [L, G, n] key entries of the pool, tail included.
        pages: int64 [P], the request's private pages.
    """

    storage: torch.Tensor
    tables: Tables
    req_to_token: torch.Tensor
    length: int
    kept: torch.Tensor
    there: torch.Tensor
    lists: torch.Tensor
    pages: torch.Tensor
    row: torch.Tensor

    @classmethod
    def of(cls, model: Model, tokens: int, number: int) -> Fold:
        """A request with `number` of `tokens` entries per list in private pages."""
        shape, device = model.shape, model.device
        layers, kv_heads = shape.layers, shape.kv_heads
        per_list = -(-number // kv_heads)
        slots = kv_heads * per_list  # L pages each, L * G lists of `per_list` pages
        padded = slots + TAIL + 1
        storage = model.random(layers, 2, padded, kv_heads, shape.head_dim, seed=1)
        order = 1 + model.permutation(padded - 1, seed=2)
        tables = Tables.empty(2, layers, kv_heads, slots, device)
        first = per_list * torch.arange(layers * kv_heads, device=device).view(layers, kv_heads)
        tables.counts[1], tables.first_page[1], tables.tail_start[1] = number, first, tokens
        tables.slots.copy_(order[:slots])
        req_to_token = torch.zeros(2, tokens + TAIL, dtype=torch.int32, device=device)
        req_to_token[1, tokens:] = order[slots:]

        rows = 2 * padded * torch.arange(layers, device=device)
        pages = (order[:slots, None] + rows).flatten()
        place_ = torch.arange(number, device=device)
        private = pages[first[:, :, None] + place_ // kv_heads] * kv_heads + place_ % kv_heads
        heads = torch.arange(kv_heads, device=device)[:, None]
        tail = (rows[:, None, None] + order[slots:]) * kv_heads + heads
        lists = torch.cat([private, tail], 2)
        there = some(model, number + number // 4 + TAIL, number + TAIL)
        leaves = some(model, number + TAIL, TAIL)
        kept = there & ~leaves.gather(2, (there.cumsum(2) - 1).clamp(min=0))
        row = torch.ones(1, dtype=torch.int64, device=device)
        return cls(storage, tables, req_to_token, tokens + TAIL, kept, there, lists, pages, row)

    def compact_in_place(self, implementation: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Compacts in place, by one of the implementations."""
        length = self.row * self.length
        return implementation(
            Requests(self.storage, self.tables, self.row, length, self.req_to_token),
            self.kept.flatten(0, 1), self.there.flatten(0, 1), self.kept.new_ones(1, 1),
        )  # fmt: skip

    def through_copies(self) -> None:
        """Reads all layers into dense tensors, then writes them, a launch per layer for each."""
        entries, offset = self.entries, self.offset
        indptr = self.lists.shape[2] * torch.arange(self.lists.shape[1] + 1, device=entries.device)
        layers = list(zip(self.lists, self.there, strict=True))
        rows = [
            gather(entries, entries[offset:], indptr, x.flatten(), there) for x, there in layers
        ]
        for (k, v), kept, first in zip(rows, self.kept, self.tables.first_page[1], strict=True):
            place(entries, k, v, kept, self.pages, value_offset=offset, first_page=first)

    def moves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [m] each: key entries of the pool that move, and their targets."""
        stays = self.kept[self.there].view(self.lists.shape)
        target = self.lists[:, :, :-TAIL].flatten()
        source = self.lists[stays]
        return source[source != target], target[source != target]

    @property
    def entries(self) -> torch.Tensor:
        """The pool as entries, [E, D]."""
        return self.storage.view(-1, self.storage.shape[4])

    @property
    def offset(self) -> int:
        """Distance from a key entry to its value, in entries."""
        return self.storage.shape[2] * self.storage.shape[3]


def _fold(bench: Bench, tokens: int, number: int) -> Case:
    model, shape = bench.model, bench.model.shape
    fold = Fold.of(model, tokens, number)
    source, target = fold.moves()

    def by_index() -> None:
        for offset in (0, fold.offset):
            rows = fold.entries.index_select(0, source + offset)
            fold.entries.index_copy_(0, target + offset, rows)

    calls = {
        OURS: lambda: fold.compact_in_place(compact_in_place),
        "gather and place, layer by layer": fold.through_copies,
        "torch.index_select and index_copy, moves known": by_index,
        TORCH: lambda: fold.compact_in_place(in_place_reference.compact_in_place),
    }

    def check() -> str:
        before = fold.storage.clone()
        calls[TORCH]()
        wanted = fold.storage.clone()
        assert not torch.equal(bits(wanted), bits(before)), "nothing was to be moved"
        for name, call in calls.items():
            fold.storage.copy_(before)
            call()
            assert torch.equal(bits(fold.storage), bits(wanted)), name
        return "every bit of the pool as after the reference"

    # Each key and value that moves is read once and written once.
    return Case(
        "fold in place",
        f"{TAIL} of {number + TAIL} entries of each list leave, {shape.layers} layers",
        tokens, 1, calls, check, counted=len(source) * 4 * model.entry_bytes,
        layers=shape.layers, waits=(TORCH,),
        note="the others are given which entries are meant, ours finds them in the tables",
    )  # fmt: skip


def sort_keys(model: Model, tokens: int) -> torch.Tensor:
    """Sort keys of random scores, int32 [G, N]; a twentieth is absent."""
    generator = torch.Generator(model.device).manual_seed(5)
    size = (model.shape.kv_heads, tokens)
    scores = torch.rand(size, generator=generator, device=model.device)
    absent = torch.rand(size, generator=generator, device=model.device) < 0.05
    # Positive floats are ordered as their bits are.
    return scores.view(torch.int32).masked_fill(absent, ABSENT)


def _selection(bench: Bench, tokens: int, number: int, own: bool) -> Case:
    model, heads = bench.model, bench.model.shape.kv_heads
    keys = sort_keys(model, tokens)
    many: int | torch.Tensor = number
    if own:
        shares = torch.linspace(0.5, 1.5, heads, device=model.device)
        many = (number * shares).long().clamp(max=tokens)[:, None]
    calls = {
        OURS: lambda: TRITON["top"](keys, many),
        "torch, same sets": lambda: torch_top(keys, many),
        "torch.topk alone": lambda: torch.topk(keys, number, dim=-1, sorted=False),
        "torch.sort alone": lambda: torch.sort(keys, dim=-1, descending=True),
    }

    def check() -> str:
        # Few different keys: nearly every choice is among equals.
        for each in (keys, torch.where(keys == ABSENT, keys, keys % 7)):
            got = TRITON["top"](each, many)
            assert torch.equal(got, torch_top(each, many)), "another set is kept"
            assert torch.equal(got.sum(-1), torch.as_tensor(many, device=got.device).expand(
                heads, 1)[:, 0]), "not as many as asked for"  # fmt: skip
        return "same sets as torch, ties included"

    return Case(
        "selection",
        f"{number} of each of {heads} heads" + (", own numbers" if own else ""),
        tokens,
        1,
        calls,
        check,
        counted=heads * tokens * 5,
        prefill=True,
        note="" if not own else "torch.topk takes one number for all heads",
    )


def _rows(bench: Bench, tokens: int) -> Case:
    """Rows that propagation moves: hidden state, residual and position of a fifth of the tokens."""
    model, width = bench.model, bench.model.hidden
    tensors = [model.random(tokens, width, seed=seed) for seed in (1, 2)]
    tensors.append(torch.arange(tokens, device=model.device))
    rows = model.permutation(tokens, seed=3)[: tokens // 5].sort().values

    def both() -> None:
        put_rows(tensors, rows, take_rows(tensors, rows))

    def torch_both() -> None:
        for tensor in tensors:
            tensor.index_copy_(0, rows, tensor.index_select(0, rows))

    def check() -> str:
        taken = take_rows(tensors, rows)
        assert all(torch.equal(x, t[rows]) for x, t in zip(taken, tensors, strict=True)), "take"
        wanted = [tensor.clone() for tensor in tensors]
        for tensor, source in zip(wanted, taken, strict=True):
            tensor[rows] = -source
        mine = [tensor.clone() for tensor in tensors]
        put_rows(mine, rows, [-source for source in taken])
        assert all(torch.equal(x, y) for x, y in zip(mine, wanted, strict=True)), "put"
        return "rows taken and put as by indexing"

    # Taking and putting each read and write every row.
    counted = 4 * len(rows) * (2 * width * tensors[0].element_size() + 8)
    return Case(
        "propagation", f"{len(rows)} rows taken and put back", tokens, 1,
        {OURS: both, "torch, tensor by tensor": torch_both}, check, counted=counted,
    )  # fmt: skip


def planned(lengths: Sequence[int], kept: int) -> list[Planned]:
    """Cases of every length; `kept` entries per list, at most half, in compaction and selection."""
    made = []
    for tokens in lengths:
        number = min(kept, tokens // 2)

        def compaction(bench: Bench, tokens=tokens, number=number) -> Case:
            return _compaction(bench, tokens, number)

        made.append(Planned(f"compaction {tokens}", compaction, 0 if tokens == NAMED else 1))

        def fold(bench: Bench, tokens=tokens) -> Case:
            return _fold(bench, tokens, tokens // 8)

        made.append(Planned(f"fold in place {tokens}", fold))

        def rows(bench: Bench, tokens=tokens) -> Case:
            return _rows(bench, tokens)

        made.append(Planned(f"propagated rows {tokens}", rows))
        for own in (False, True):

            def selection(bench: Bench, tokens=tokens, number=number, own=own) -> Case:
                return _selection(bench, tokens, number, own)

            label = f"selection {tokens}" + (", own numbers" if own else "")
            made.append(Planned(label, selection))
    return made
