"""Folds of a request that is not there, so that their kernels are compiled before one waits.

Dimensions: L layers, H query heads, G KV heads, M cached positions of a layer, T steps, D head
size.
"""

from __future__ import annotations

import torch
from kvpolicy.dsl.execute.decode import Memory
from kvpolicy.dsl.execute.kernels import Entries, Slots
from kvpolicy.dsl.execute.program import TorchProgram
from kvpolicy.dsl.execute.requests import follow_together
from kvpolicy.dsl.execute.run import Run

_FOLDS = 2  # the second one begins from what the first left
_PROMPT = 16  # tokens
_LATEST = 1024  # decode step, up to which one is looked for at which entries may leave


def fold(program: TorchProgram, dtype: torch.dtype, device: torch.device) -> None:
    """Takes nobody's request through steps at which entries may leave; the results are lost.

    Args:
        dtype, device: of queries, keys and values.
    """
    if program.steps is not None:
        folding = _Folding(program, dtype, device)
        for _ in range(_FOLDS):
            folding.go()


class _Folding:
    """A request of zeros."""

    def __init__(self, program: TorchProgram, dtype: torch.dtype, device: torch.device) -> None:
        self.bound, self.device = program.bound, device
        self.steps, self.tokens = self.bound.fold_interval, _PROMPT
        shape = self.bound.shape
        self.zeros = torch.zeros(shape.heads, _PROMPT, shape.head_dim, dtype=dtype, device=device)
        memory = Memory.after(self._prefill(program))
        assert memory is not None
        self.memory = memory

    def _prefill(self, program: TorchProgram) -> Run:
        run, layer, there = program.start(_PROMPT), 0, torch.arange(_PROMPT, device=self.device)
        pool = self.zeros[: self.bound.shape.kv_heads].transpose(0, 1).contiguous()
        while layer < self.bound.shape.layers:
            tokens = None if len(there) == run.size else there
            keys = Slots(pool, there)
            deeper = run.observe(layer, self.zeros[:, : len(there)], keys, keys, tokens)
            there, layer = there if deeper is None else there[deeper], layer + 1
            if run.restarted:
                run, layer, there = run.again(len(there)), 0, torch.arange(len(there)).to(there)
        return run

    def go(self) -> None:
        """The next steps, as many as are followed at once; nothing if nothing may leave then."""
        memory, steps = self.memory, self.steps
        first = memory.generated + steps
        leaving = (g for g in range(first, _LATEST) if self.bound.leaves_at(g, memory.prompt))
        generated = next(leaving, None)
        if generated is None:
            return
        memory.generated = generated - steps
        positions = range(self.tokens, self.tokens + steps)
        self.tokens += steps
        if memory.together(steps, leaves=True) is None:
            for choice in memory.follow(positions, self._queries, self._read, leaves=True):
                _ = choice.k  # merged rows are made when they are asked for
            return
        newest = torch.tensor([self.tokens - 1], device=self.device)
        layers = self.bound.shape.layers
        follow_together(
            [memory], [positions], newest, lambda: self._queries(0).repeat(layers, 1, 1),
            lambda there: self._entries(there.shape), leaves=True,
        )  # fmt: skip

    def _queries(self, layer: int) -> torch.Tensor:
        """[H, T, D] zeros."""
        return self.zeros[:, :1].repeat(1, self.steps, 1)

    def _read(self, layer: int, there: torch.Tensor | None) -> tuple[Entries, Entries]:
        entries = len(self.memory.layers[layer].positions)
        return self._entries((self.bound.shape.kv_heads, entries))

    def _entries(self, lists: tuple[int, ...]) -> tuple[Entries, Entries]:
        """The same row of a pool, over and over: [lists, M] each."""
        ids = torch.zeros(lists, dtype=torch.int64, device=self.device)
        return Entries(self.zeros[0], ids), Entries(self.zeros[0], ids)
