"""Folds of a request that is not there, so that their kernels are compiled before one waits.

Dimensions: L layers, H query heads, G KV heads, M cached positions of a layer, T steps, D head
size.
"""

from __future__ import annotations

from functools import partial

import torch
from kvpolicy.dsl.execute.block import Block
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
    folding = _Folding(program, dtype, device)
    memory = Memory.after(folding.prefill())
    if memory is not None:
        for _ in range(_FOLDS):
            folding.go(memory)


class _Folding:
    """A request of zeros."""

    def __init__(self, program: TorchProgram, dtype: torch.dtype, device: torch.device) -> None:
        self.program, self.bound, self.device = program, program.bound, device
        self.steps, self.tokens = self.bound.fold_interval, _PROMPT
        shape = self.bound.shape
        self.zeros = torch.zeros(shape.heads, _PROMPT, shape.head_dim, dtype=dtype, device=device)

    def prefill(self) -> Run:
        """Its finished prefill."""
        run, layer, there = (
            self.program.start(_PROMPT),
            0,
            torch.arange(_PROMPT, device=self.device),
        )
        pool = self.zeros[: self.bound.shape.kv_heads].transpose(0, 1).contiguous()
        while layer < self.bound.shape.layers:
            tokens = None if len(there) == run.size else there
            keys = Slots(pool, there)
            deeper = run.observe(layer, self.zeros[:, : len(there)], keys, keys, tokens)
            there, layer = there if deeper is None else there[deeper], layer + 1
            if run.restarted:
                run, layer, there = run.again(len(there)), 0, torch.arange(len(there)).to(there)
        return run

    def go(self, memory: Memory) -> None:
        """The next steps, as many as are followed at once; nothing if nothing may leave then."""
        steps = self.steps
        first = memory.generated + steps
        leaving = (g for g in range(first, _LATEST) if self.bound.leaves_at(g, memory.prompt))
        generated = next(leaving, None)
        if generated is None:
            return
        memory.generated = generated - steps
        positions = range(self.tokens, self.tokens + steps)
        self.tokens += steps
        newest = torch.tensor([self.tokens - 1], device=self.device)
        staying = follow_together(
            [memory], [positions], newest, self._queries, self._entries, leaves=True
        )
        if staying is None:
            return
        # In the pool, as for requests together and for some of them, and where lists get others.
        for proceed in (staying.proceed, staying.proceed[:, :1]):
            staying.merge(proceed)
        read = partial(self._read, staying.block)
        for choice in staying.choices(0, read, slots=False):
            _ = choice.k  # merged rows are made when they are asked for

    def _queries(self) -> torch.Tensor:
        """[L * H, T, D] zeros."""
        return self.zeros[:, :1].repeat(self.bound.shape.layers, self.steps, 1)

    def _read(
        self, block: Block, layer: int, there: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        size = (self.bound.shape.kv_heads, block.lengths[layer], self.bound.shape.head_dim)
        return self.zeros.new_zeros(size), self.zeros.new_zeros(size)

    def _entries(self, there: torch.Tensor) -> tuple[Entries, Entries]:
        """The same row of a pool, over and over: [lists, M] each."""
        ids = torch.zeros(there.shape, dtype=torch.int64, device=self.device)
        return Entries(self.zeros[0], ids), Entries(self.zeros[0], ids)
