"""A store of one request's entries for `Memory`: keys and values of recorded tensors, laid out as
the memory says, poisoned where a KV head does not hold the entry.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.execute.apply import prefilled, turned
from kvpolicy.dsl.execute.decode import Choice, Memory
from kvpolicy.dsl.execute.kernels import Entries, Kernels
from kvpolicy.dsl.execute.program import TorchProgram
from kvpolicy.dsl.execute.requests import Staying, follow_together

Rows = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Recorded:
    """Tensors of decode steps: q [T, L, H, D], k and v [T, L, G, D]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def in_one_pool(rows: list[Rows], layer: int, there: torch.Tensor | None) -> tuple[Entries, ...]:
    """A layer's entries in a pool of all layers; what a KV head does not hold is any row of it."""
    heads, entries, size = rows[layer][0].shape
    first = 1 + sum(k.shape[0] * k.shape[1] for k, _ in rows[:layer])
    ids = torch.arange(first, first + heads * entries).view(heads, entries)
    if there is not None:
        ids = ids.masked_fill(~there, 0)
    nothing = torch.full((1, size), math.nan)
    return tuple(
        Entries(torch.cat([nothing, *(x[i].reshape(-1, size) for x in rows)]), ids) for i in (0, 1)
    )


class Store:
    """One request after its prefill, and the decode steps that follow.

    Args:
        bound: the policy.
        kernels: of its program; program: that, if it is shared.
        prompt: q [L, H, N, D], k and v [L, G, N, D].
        steps: as `Recorded`.
        poison: what rows hold that a KV head does not.

    Attributes:
        names: the recording's position for each of the memory's.
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
        for own, rows in zip(made.run.finish(), made.vectors, strict=True):
            some = own.any(0)
            self.rows.append(tuple(x[:, some].float() for x in rows))
        self.memory: Memory = Memory.after(made.run)
        self.steps = Recorded(*(torch.tensor(x) for x in steps))
        self.done = 0
        self.first = made.run.size
        self.names = made.chosen.tolist()
        self.names += range(prompt[1].shape[2], prompt[1].shape[2] + len(steps[0]))
        self.poison = poison
        self.reads = 0

    def append(self) -> None:
        """The next step's token, in every layer."""
        for layer, (k, v) in enumerate(self.rows):
            new = (self.steps.k[self.done, layer], self.steps.v[self.done, layer])
            pairs = zip((k, v), new, strict=True)
            self.rows[layer] = tuple(torch.cat([x, y[:, None]], 1) for x, y in pairs)
        self.done += 1

    def read(self, layer: int, there: torch.Tensor | None) -> Rows:
        """As `Memory.follow` asks."""
        self.reads += 1
        if there is None:
            return self.rows[layer]
        return tuple(x.masked_fill(~there[..., None], self.poison) for x in self.rows[layer])

    def leave(self, layer: int, choice: Choice | None) -> None:
        """What stays is stored."""
        if choice is None:
            return
        k, v = self.rows[layer]
        k = k if choice.k is None else choice.k.float()
        v = v if choice.v is None else choice.v.float()
        if choice.shift is not None and self.inv_freq is not None:
            k = turned(k, choice.shift, self.inv_freq).float()
        some = choice.kept.any(0)
        self.rows[layer] = (k[:, some], v[:, some])

    def step_by_step(self, number: int, *, leaves: bool = True) -> None:
        """So many steps, each by itself; entries may leave at the last."""
        memory = self.memory
        for later in reversed(range(number)):
            memory.step(self.first + self.done, leaves=leaves and not later)
            self.append()
            for layer in range(len(self.rows)):
                wants = memory.wants
                if wants == "nothing":
                    continue
                given = (None, None)
                if wants == "entries":
                    given = self.read(layer, memory.layout(layer).there)
                q = self.steps.q[self.done - 1, layer][:, None]
                self.leave(layer, memory.observe(layer, q, *given))

    def follow(self, number: int, *, leaves: bool = True) -> list[Choice]:
        """The same steps at once."""
        choices = self.begin(number, leaves=leaves)
        self.memory.land()
        if not self.memory.not_finite:
            for layer, choice in enumerate(choices):
                self.leave(layer, choice)
        return choices

    def begin(self, number: int, *, leaves: bool = True) -> list[Choice]:
        """The steps at once, without what comes of them."""
        first = self.done
        for _ in range(number):
            self.append()
        return self.memory.follow(
            [self.first + first + i for i in range(number)],
            lambda layer: self.steps.q[first : first + number, layer].transpose(0, 1),
            self.read,
            leaves=leaves,
        )

    def held(self) -> list[list[list[int]]]:
        """Per layer and KV head the recording's positions of its entries."""
        kept = []
        for layer, (k, _) in enumerate(self.rows):
            layout = self.memory.layout(layer)
            there = self._there(layer)
            names = torch.tensor(self.names)[layout.positions]
            kept.append([names[own].tolist() for own in there])
            assert there.shape == k.shape[:2]
        return kept

    def vectors(self) -> list[list[Rows]]:
        """Per layer and KV head the keys and values of its entries."""
        return [
            [(k[i, own], v[i, own]) for i, own in enumerate(self._there(layer))]
            for layer, (k, v) in enumerate(self.rows)
        ]

    def _there(self, layer: int) -> torch.Tensor:
        layout, k = self.memory.layout(layer), self.rows[layer][0]
        return torch.ones(k.shape[:2], dtype=torch.bool) if layout.there is None else layout.there


class Pool(Store):
    """All layers' entries lie in one pool, as a server has them."""

    def begin(self, number: int, *, leaves: bool = True) -> list[Choice]:
        """As of `Store`; the pool is filled when it is read first."""
        self.pool: dict[int, tuple[Entries, ...]] = {}
        return super().begin(number, leaves=leaves)

    def read(self, layer: int, there: torch.Tensor | None) -> tuple[Entries, ...]:
        """As of `Store`, as entries of the pool."""
        self.reads += 1
        pool = self.pool.setdefault(0, in_one_pool(self.rows, 0, None))
        own = in_one_pool(self.rows, layer, there)
        return tuple(Entries(x.pool, y.ids) for x, y in zip(pool, own, strict=True))


def together(stores: list[Pool], number: int, *, leaves: bool = True) -> None:
    """So many steps of several requests at once, all their entries in one pool."""
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
            for layer in range(len(each.rows)):
                number = len(each.rows) * i + layer
                held = there[number * heads : (number + 1) * heads]
                own = held[:, held.shape[1] - each.rows[layer][0].shape[1] :]
                found = in_one_pool(each.rows, layer, own)
                shifted = torch.where(own, found[0].ids + before, 0)
                ids.append(F.pad(shifted, (held.shape[1] - own.shape[1], 0)))
            for pool, x in zip(pools, found, strict=True):
                pool.append(x.pool)
            before += len(found[0].pool)
        return tuple(Entries(torch.cat(pool), torch.cat(ids)) for pool in pools)

    steps = [
        range(x.first + at, x.first + at + number) for x, at in zip(stores, first, strict=True)
    ]
    memories = [each.memory for each in stores]
    newest = torch.tensor([own[-1] for own in steps])
    staying = follow_together(memories, steps, newest, queries, read, leaves=leaves)
    if staying is None:
        return
    for i, each in enumerate(stores):
        choices = staying.choices(
            i, lambda layer, there, own=each: own.rows[layer],
            slots=each.memory.bound.positions == "slots",
        )  # fmt: skip
        each.memory.land()
        assert each.memory.not_finite != bool(staying.proceed[i].all()) or staying.repeats
        for layer, choice in enumerate(choices if not each.memory.not_finite else ()):
            each.leave(layer, choice)
    assert_merged_in_the_pool(staying, stores)


def assert_merged_in_the_pool(staying: Staying, stores: list[Pool]) -> None:
    """What is merged where it lies is what the stores were given; others' rows do not change."""
    entries = [] if staying.merges is None else staying.merges.entries
    before = [x.pool.clone() for x in entries]
    staying.merge(torch.tensor([[not each.memory.not_finite] for each in stores]))
    apply = [] if staying.merges is None else staying.merges.merging.merge.apply
    for name, x, wanted in zip(apply, entries, before, strict=True):
        which = ("key", "value").index(name)
        for i, each in enumerate(stores):
            for layer, rows in enumerate(each.rows):
                heads, first = staying.block.where(i, layer)
                kept, ids = staying.kept[heads, first:], x.ids[heads, first:]
                stays = kept[:, kept.any(0)]
                if not each.memory.not_finite:
                    wanted[ids[:, kept.any(0)][stays]] = rows[which][stays]
        torch.testing.assert_close(x.pool, wanted, rtol=0, atol=0, equal_nan=True)


def assert_alike(one: Store, other: Store) -> None:
    """Layouts, rows, states, queries."""
    a, b = one.memory, other.memory
    assert (a.generated, a.not_finite) == (b.generated, b.not_finite)
    for layer in range(len(one.rows)):
        x, y = a.layout(layer), b.layout(layer)
        assert x.positions.tolist() == y.positions.tolist(), layer
        assert (x.there is None) == (y.there is None)
        assert x.there is None or torch.equal(x.there, y.there), layer
        for k, m in zip(one.rows[layer], other.rows[layer], strict=True):
            held = torch.ones(k.shape[:2], dtype=torch.bool) if x.there is None else x.there
            torch.testing.assert_close(k[held], m[held], rtol=3e-7, atol=1e-7)
        own, also = a.layers[layer], b.layers[layer]
        assert own.states.keys() == also.states.keys()
        for before, after in ((own.states, also.states), (own.merge_states, also.merge_states)):
            assert before.keys() == after.keys()
            for name in before:
                assert before[name].axes == after[name].axes
                values = [torch.as_tensor(z[name].data).double() for z in (before, after)]
                if x.there is not None and {"kv", "token"} <= set(before[name].axes):
                    axes = before[name].axes
                    held = x.there[
                        tuple(slice(None) if i in ("kv", "token") else None for i in axes)
                    ]
                    values = [torch.where(held, z, 0.0) for z in values]
                torch.testing.assert_close(*values, rtol=1e-9, atol=1e-12)
        assert (own.queries is None) == (also.queries is None)
        if own.queries is not None:
            assert torch.equal(own.queries, also.queries)
            assert own.query_positions.tolist() == also.query_positions.tolist()
