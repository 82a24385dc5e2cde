"""A store of one request's entries for `Memory`: keys and values of recorded tensors, laid out as
the memory has them, with poison where a KV head does not hold the entry.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch
from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.execute.apply import prefilled, turned
from kvpolicy.dsl.execute.decode.lists import Folded
from kvpolicy.dsl.execute.decode.memory import Memory
from kvpolicy.dsl.execute.decode.requests import Staying, follow_together
from kvpolicy.dsl.execute.layer.choice import Choice
from kvpolicy.dsl.execute.program import TorchProgram
from kvpolicy.dsl.execute.tensors.kernels import Entries, Kernels
from kvpolicy.dsl.execute.tensors.values import aligned, sent
from kvpolicy.kernels.table import REFERENCE
from kvpolicy.kernels.table_triton import TRITON
from remembered import remembered

# Device kernels for steps of several requests together.
TOGETHER = (
    "generated", "best", "carry", "tally", "draws", "finite", "following", "merge_entries",
    "merge_rows", "merge_mass", "links", "target", "nearest", "inner_products", "means",
    "means_of_columns", "updated_where_left", "members", "then", "whole",
)  # fmt: skip
TABLE = {**REFERENCE, **{name: TRITON[name] for name in TOGETHER}}

Rows = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Recorded:
    """Tensors of decode steps: q [T, L, H, D], k and v [T, L, G, D]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def in_one_pool(
    rows: list[Rows], layer: int, there: torch.Tensor, poison: float
) -> tuple[Entries, ...]:
    """Keys and values of a layer in a pool of all layers; entries not held read `poison`."""
    heads, entries, size = rows[layer][0].shape
    first = 1 + sum(k.shape[0] * k.shape[1] for k, _ in rows[:layer])
    ids = torch.arange(first, first + heads * entries).view(heads, entries)
    ids = ids.masked_fill(~there, 0)
    nothing = torch.full((1, size), poison)
    return tuple(
        Entries(torch.cat([nothing, *(x[i].reshape(-1, size) for x in rows)]), ids) for i in (0, 1)
    )


def in_columns(rows: Rows, there: torch.Tensor | None, poison: float) -> Rows:
    """Rows [G, m, D] in the columns in which some KV head holds an entry; `poison` in others.

    Args:
        there: bool [G, M]; None: all are held.
    """
    if there is None:
        return rows
    some = there.any(0)
    made = tuple(x.new_full((len(x), len(some), x.shape[2]), poison) for x in rows)
    for new, x in zip(made, rows, strict=True):
        new[:, some] = x
    return made


class Store:
    """One request after its prefill, and the decode steps that follow.

    Args:
        bound: the policy.
        kernels: kernel table of its program.
        program: the program, if several stores share it.
        prompt: q [L, H, N, D], k and v [L, G, N, D].
        steps: q, k, v as in `Recorded`.
        poison: content of rows that a KV head does not hold.

    Attributes:
        names: the recording's position for each position of the memory.
    """

    def __init__(
        self, bound: Bound, prompt, steps, poison: float = math.nan, kernels: Kernels | None = None,
        program: TorchProgram | None = None,
    ) -> None:  # fmt: skip
        size = prompt[1].shape[-1]
        self.inv_freq = None if size % 2 else 100.0 ** (-np.arange(size // 2) / 2)
        self.program = program or TorchProgram(bound, kernels=kernels)
        made = prefilled(self.program, *prompt, self.inv_freq)
        self.rows: list[Rows] = []
        for own, rows in zip(made.finished.kept, made.vectors, strict=True):
            some = own.any(0)
            self.rows.append(tuple(x[:, some].float() for x in rows))
        self.memory: Memory = Memory.after(made.finished)
        self.steps = Recorded(*(torch.tensor(x) for x in steps))
        self.done = 0
        self.first = made.finished.size
        self.names = made.chosen.tolist()
        self.names += range(prompt[1].shape[2], prompt[1].shape[2] + len(steps[0]))
        self.poison = poison
        self.reads = 0

    def append(self) -> None:
        """Appends the next step's token in every layer."""
        for layer, (k, v) in enumerate(self.rows):
            new = (self.steps.k[self.done, layer], self.steps.v[self.done, layer])
            pairs = zip((k, v), new, strict=True)
            self.rows[layer] = tuple(torch.cat([x, y[:, None]], 1) for x, y in pairs)
        self.done += 1

    def leave(self, layer: int, choice: Choice | None) -> None:
        """Stores the entries of a layer that stay; all of them if `choice` is None."""
        if choice is None:
            return
        k, v = in_columns(self.rows[layer], choice.held_mask, self.poison)
        k, v = (
            x if merged is None else merged.float()
            for x, merged in zip((k, v), choice.rows, strict=True)
        )
        if choice.shift is not None and self.inv_freq is not None:
            k = turned(k, choice.shift, self.inv_freq).float()
        some = choice.kept.any(0)
        self.rows[layer] = (k[:, some], v[:, some])

    def step_by_step(self, number: int, *, leaves: bool = True) -> None:
        """Takes `number` steps one at a time; entries may leave at the last."""
        for later in reversed(range(number)):
            self.follow(1, leaves=leaves and not later)

    def follow(self, number: int, *, leaves: bool = True) -> list[Choice]:
        """Takes `number` steps at once; entries may leave at the last."""
        return together([self], number, leaves=leaves)[0]

    def held(self) -> list[list[list[int]]]:
        """Positions in the recording of the entries of each layer and KV head."""
        kept = []
        for layer, (k, _) in enumerate(self.rows):
            positions, there = remembered(self.memory, layer)
            names = torch.tensor(self.names)[positions]
            kept.append([names[own].tolist() for own in there])
            assert there.shape == k.shape[:2]
        return kept

    def vectors(self) -> list[list[Rows]]:
        """Keys and values of the entries of each layer and KV head."""
        return [
            [(k[i, own], v[i, own]) for i, own in enumerate(remembered(self.memory, layer)[1])]
            for layer, (k, v) in enumerate(self.rows)
        ]


def begun(stores: list[Store], number: int, *, leaves: bool = True) -> Staying | None:
    """Takes `number` steps of several requests, in one pool, without storing what stays."""
    first = [each.done for each in stores]
    for each in stores:
        for _ in range(number):
            each.append()

    def queries() -> torch.Tensor:
        own = [
            each.steps.q[at : at + number].permute(1, 2, 0, 3)
            for each, at in zip(stores, first, strict=True)
        ]
        return torch.cat([x.flatten(0, 1) for x in own])

    def read(there: torch.Tensor) -> tuple[Entries, Entries]:
        heads = stores[0].rows[0][0].shape[0]
        pools: list[list[torch.Tensor]] = [[], []]
        ids, before = [], 0
        for i, each in enumerate(stores):
            each.reads += 1
            for layer in range(len(each.rows)):
                number = len(each.rows) * i + layer
                held = there[number * heads : (number + 1) * heads]
                some = held.any(0)
                own = held[:, some]
                found = in_one_pool(each.rows, layer, own, each.poison)
                ids.append(torch.zeros_like(held, dtype=torch.int64))
                ids[-1][:, some] = torch.where(own, found[0].ids + before, 0)
            for pool, x in zip(pools, found, strict=True):
                pool.append(x.pool)
            before += len(found[0].pool)
        return tuple(Entries(torch.cat(pool), torch.cat(ids)) for pool in pools)

    steps = [
        range(x.first + at, x.first + at + number) for x, at in zip(stores, first, strict=True)
    ]
    memories = [each.memory for each in stores]
    newest = sent(torch.tensor([own[-1] for own in steps]), torch.device("cpu"))
    return follow_together(memories, steps, newest, queries, read, leaves=leaves)


def together(stores: list[Store], number: int, *, leaves: bool = True) -> list[list[Choice]]:
    """Takes `number` steps of several requests at once and stores what stays of each."""
    staying = begun(stores, number, leaves=leaves)
    return [[] for _ in stores] if staying is None else finished(staying, stores)


def groups(stores: list[Store], number: int, *, leaves: bool = True) -> list[list[Store]]:
    """Stores that can be taken together through `number` steps; their widths may differ."""
    found: dict[tuple, list[Store]] = {}
    for each in stores:
        found.setdefault(each.memory.joint_key(number, leaves=leaves), []).append(each)
    return list(found.values())


def finished(staying: Staying, stores: list[Store]) -> list[list[Choice]]:
    """Stores the entries of each request that stay; returns its choices by layer."""
    made = []
    for i, each in enumerate(stores):
        choices = staying.choices(
            i, lambda layer, there, own=each: in_columns(own.rows[layer], there, own.poison),
            slots=each.memory.bound.positions == "slots",
        )  # fmt: skip
        each.memory.read_numbers()
        assert each.memory.not_finite != bool(staying.proceed[i].all()) or staying.checks_counts
        for layer, choice in enumerate(choices if not each.memory.not_finite else ()):
            each.leave(layer, choice)
        made.append(choices)
    if staying.in_place:
        assert_merged_in_the_pool(staying, stores)
    return made


def assert_merged_in_the_pool(staying: Staying, stores: list[Store]) -> None:
    """Checks that merging in the pool gives the stored rows and changes no others."""
    found = {}
    for merges in staying.merges:
        pairs = zip(merges.merging.merge.apply, merges.entries, strict=True)
        for name, x in pairs:
            of_name = found.setdefault(name, (x.pool, x.pool.clone(), []))
            of_name[2].append((merges.lists, x.ids))
    staying.merge(torch.tensor([[not each.memory.not_finite] for each in stores]))
    for name, (pool, wanted, parts) in found.items():
        which = ("key", "value").index(name)
        for lists, ids in parts:
            layers = range(len(stores[0].rows)) if lists.layer is None else [lists.layer]
            requests = range(len(stores)) if lists.layer is None else [lists.request]
            for i, layer in itertools.product(requests, layers):
                heads, first = staying.block.rows_of(i, layer)
                own = ids[heads, first:] if lists.layer is None else ids
                kept, rows = staying.kept[heads, first:], stores[i].rows[layer]
                stays = kept[:, kept.any(0)]
                if not stores[i].memory.not_finite:
                    wanted[own[:, kept.any(0)][stays]] = rows[which][stays]
        torch.testing.assert_close(pool, wanted, rtol=0, atol=0, equal_nan=True)


def states_of(memory: Memory, layer: int) -> dict[str, torch.Tensor]:
    """States of the entries that a layer holds, per KV head and along other axes, by name."""
    remembered, place = memory.block
    folded = isinstance(remembered, Folded)
    block = remembered.block if folded else remembered
    heads, first = block.rows_of(place, layer)
    stays = (remembered.staying if folded else block.held_mask)[heads, first:]
    made = {}
    for name, x in block.states.items():
        data = x.tensor[heads]
        if "token" in x.axes:
            at = x.axes.index("token")
            data = data.narrow(at, first, data.shape[at] - first)
            held = aligned(stays, ("kv", "token"), x.axes)
            data = torch.where(held, data, 0.0).index_select(at, stays.any(0).nonzero()[:, 0])
        made[name] = data
    return made


def assert_alike(one: Store, other: Store) -> None:
    """Checks that layouts, rows, states and queries of two stores are equal."""
    a, b = one.memory, other.memory
    assert (a.generated, a.not_finite) == (b.generated, b.not_finite)
    for layer in range(len(one.rows)):
        (positions, held), (others, there) = remembered(a, layer), remembered(b, layer)
        assert positions.tolist() == others.tolist(), layer
        assert torch.equal(held, there), layer
        for k, m in zip(one.rows[layer], other.rows[layer], strict=True):
            torch.testing.assert_close(k[held], m[held], rtol=3e-7, atol=1e-7)
        own, also = states_of(a, layer), states_of(b, layer)
        assert own.keys() == also.keys()
        for name in own:
            torch.testing.assert_close(own[name], also[name], rtol=1e-9, atol=1e-12)
    assert_same_thresholds(a.thresholds(), b.thresholds())
    assert_same_last_queries(a, b)


def assert_same_thresholds(one, other) -> None:
    """Checks that states of merges are equal; None before the first merge."""
    assert one.keys() == other.keys()
    for name, values in one.items():
        for x, y in zip(values, other[name], strict=True):
            assert (x is None) == (y is None)
            if x is not None:
                torch.testing.assert_close(x.data, y.data, rtol=1e-9, atol=1e-12)


def assert_same_last_queries(one: Memory, other: Memory) -> None:
    """Checks that the last queries, as many as a step reads, are equal."""
    window = one.bound.step_queries(one.prompt)
    if window <= 1:
        return
    x, y = (
        own.block[0].after_leaving().select([own.block[1]]).last_queries for own in (one, other)
    )
    for layer in range(one.bound.shape.layers):
        number, heads = min(x.lengths[layer], window), one.bound.shape.heads
        assert number == min(y.lengths[layer], window)
        own = slice(layer * heads, layer * heads + heads)
        columns = [slice(z.queries.shape[1] - number, None) for z in (x, y)]
        assert torch.equal(x.queries[own, columns[0]], y.queries[own, columns[1]])
        assert torch.equal(x.positions[layer, columns[0]], y.positions[layer, columns[1]])
