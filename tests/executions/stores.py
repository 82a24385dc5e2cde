"""A store of one request's entries for `Memory`: keys and values of recorded tensors, laid out as
the memory says, poisoned where a KV head does not hold the entry.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from kvpolicy.dsl.bind import Bound
from kvpolicy.dsl.torch_apply import turned
from kvpolicy.dsl.torch_decode import Choice, Memory
from kvpolicy.dsl.torch_kernels import NONE, Entries, Kernels
from kvpolicy.dsl.torch_program import TorchProgram

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
        kernels: of its program.
        prompt: q [L, H, N, D], k and v [L, G, N, D].
        steps: as `Recorded`.
        poison: what rows hold that a KV head does not.
    """

    def __init__(
        self, bound: Bound, prompt, steps, poison: float = math.nan, kernels: Kernels = NONE
    ) -> None:
        q, k, v = (torch.tensor(x) for x in prompt)
        run = TorchProgram(bound, kernels=kernels).start(k.shape[2])
        for layer in range(len(k)):
            run.observe(layer, q[layer], k[layer], v[layer])
        kept = run.finish()
        self.rows: list[Rows] = []
        for layer, own in enumerate(kept):
            rows = run.merged(layer, k[layer], v[layer])
            some = own.any(0)
            self.rows.append(tuple(x[:, some].float() for x in rows))
        self.memory: Memory = run.memory()
        self.steps = Recorded(*(torch.tensor(x) for x in steps))
        self.done = 0
        self.first = k.shape[2]
        self.poison = poison
        self.reads = 0
        self.inv_freq = 100.0 ** (-np.arange(k.shape[-1] // 2) / 2)

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
        if choice.shift is not None:
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
