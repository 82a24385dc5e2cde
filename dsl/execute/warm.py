"""Prefills and folds of zeros, so that kernels are compiled before a request waits for them.

Dimensions: L layers, H query heads, G KV heads, M cached positions of a layer, T steps, D head
size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.bind.bounds import max_entries
from kvpolicy.dsl.execute.decode.lists import RequestBlock
from kvpolicy.dsl.execute.decode.memory import Memory
from kvpolicy.dsl.execute.decode.requests import follow_together
from kvpolicy.dsl.execute.drive import drive
from kvpolicy.dsl.execute.prefill.finished import FinishedPrefill
from kvpolicy.dsl.execute.program import TorchProgram
from kvpolicy.dsl.execute.tensors.kernels import Entries, Slots

# Lengths of prompts in tokens. Between two of them kernels begin to take other tiles or cut lists;
# those that are generated for a policy need the first and the last.
_PROMPTS = (16, 100, 1000, 8000, 8200)
_LONGEST = 2**20  # tokens
_FOLDS = 2  # the second one begins from what the first left
_ROWS = 16  # of a pool
_LATEST = 1024  # decode steps that are searched for those at which entries may leave


def prompts(bound: Bound) -> list[int]:
    """Lengths of prompts that need every kernel; entries of the last one leave, if any ever do."""
    lists = bound.shape.layers * bound.shape.kv_heads
    lengths = (2**n + 8 for n in range(4, _LONGEST.bit_length()))
    leaving_length = next((n for n in lengths if max_entries(bound, n) < lists * n), 0)
    return [*_PROMPTS, *([leaving_length] if leaving_length > _PROMPTS[-1] else [])]


def prompts_of_generated() -> list[int]:
    """Lengths of prompts that need every kernel generated for a policy."""
    return [_PROMPTS[0], _PROMPTS[-1]]


def programs(program: TorchProgram) -> Iterator[TorchProgram]:
    """A policy's program, and the same for prompts too long to defer work past the last layer."""
    yield program
    if not program.bound.propagates:
        yield TorchProgram(
            program.bound,
            kernels=program.kernels,
            heads=program.heads,
            layers=program.layers,
            keys_stay=program.keys_stay,
            deferred_bytes=0,
        )


def prefill(
    program: TorchProgram, tokens: int, like: Slots, queries: torch.dtype
) -> FinishedPrefill:
    """A finished prefill of zeros.

    Args:
        like: rows of a pool, of all layers, as a server passes keys and values; their content does
            not matter.
        queries: dtype of the queries.
    """
    zeros = _ZeroPrompt(program, like, queries)
    if program.accumulates:
        _accumulate(program, tokens, zeros)
    return drive(program, tokens, zeros, like.device).run.finish(wait=False)


def _accumulate(program: TorchProgram, tokens: int, zeros: _ZeroPrompt) -> None:
    """Shows a layer a chunk of a longer prompt, and a next one of few queries and many keys."""
    layer, run = program.layers[0], program.start(2 * tokens)
    for queries, end in ((tokens, tokens), (1, tokens + 1)):
        places = torch.arange(end, device=zeros.like.device)
        k, v = zeros.entries(range(layer, layer + 1), places)
        values = v if program.bound.needs_values else None
        run.accumulate(layer, zeros.queries(layer, places, queries), k, values)


@dataclass(frozen=True)
class _ZeroPrompt:
    """A prompt of zeros; the attributes are as in `prefill`, `dtype` that of queries."""

    program: TorchProgram
    like: Slots
    dtype: torch.dtype

    @property
    def _kv(self) -> int:
        return self.program.heads.number(self.program.bound.shape.kv_heads)

    def queries(self, layer: int, tokens: torch.Tensor, number: int) -> torch.Tensor:
        """See `PromptTensors`; token by token in memory, as a server has them."""
        shape = self.program.bound.shape
        size = (number, self._kv * shape.group, shape.head_dim)
        return torch.zeros(size, dtype=self.dtype, device=tokens.device).transpose(0, 1)

    def entries(self, layers: range, tokens: torch.Tensor) -> tuple[Slots, Slots]:
        """See `PromptTensors`."""
        pool, scale = self.like.pool[: len(layers)], self.like.scale
        keys = Slots(
            pool, tokens % pool.shape[1], None if scale is None else scale[: len(layers) * self._kv]
        )
        return keys, keys


def fold(finished: FinishedPrefill, like: Slots, queries: torch.dtype) -> None:
    """Takes a finished prefill through decode steps, first without, then with leaving entries.

    Args:
        like, queries: as in `prefill`.
    """
    memory = Memory.after(finished)
    if memory is not None:
        folding, bound = _Folding(finished, like, queries), finished.program.bound
        steps, prompt = range(bound.fold_interval, _LATEST), memory.prompt
        staying_step = next((n for n in steps if not bound.leaves_at(n, prompt)), None)
        if staying_step is not None:
            folding.go(memory, staying_step, leaves=False)
        leaving_step = bound.next_leaving(1, prompt, _LATEST)
        for _ in range(_FOLDS):
            if leaving_step is not None:
                folding.go(memory, leaving_step, leaves=True)
                leaving_step = bound.next_leaving(leaving_step + 1, prompt, _LATEST)


class _Folding:
    """A request of zeros that decodes."""

    def __init__(self, finished: FinishedPrefill, like: Slots, queries: torch.dtype) -> None:
        self.bound, self.device, self.scale = finished.program.bound, like.device, like.scale
        self.steps, self.tokens = self.bound.fold_interval, finished.prompt
        self.kv = finished.program.heads.number(self.bound.shape.kv_heads)
        self.layers = len(finished.program.layers)
        size = (_ROWS, self.bound.shape.head_dim)
        self.pool = torch.zeros(size, dtype=like.dtype, device=like.device)
        self.query_rows = torch.zeros(size, dtype=queries, device=like.device)

    def go(self, memory: Memory, generated: int, *, leaves: bool) -> None:
        """Takes as many steps as a fold does.

        Args:
            generated: the last of these decode steps, from 1.
            leaves: whether entries may leave at it.
        """
        steps = min(self.steps, generated)
        memory.generated = generated - steps
        positions = range(self.tokens, self.tokens + steps)
        self.tokens += steps
        newest = torch.tensor([self.tokens - 1], device=self.device)
        staying = follow_together(
            [memory], [positions], newest, partial(self._queries, steps), self._entries,
            leaves=leaves,
        )  # fmt: skip
        if staying is None:
            return
        # In the pool, with a value per layer or per request; then for lists that are written anew.
        for proceed in (staying.proceed, staying.proceed[:, :1]):
            staying.merge(proceed)
        read = partial(self._read, staying.block)
        for choice in staying.choices(0, read, slots=False):
            _ = choice.rows  # merged rows are made at the first access

    def _queries(self, steps: int) -> torch.Tensor:
        """[L * H, T, D] zeros."""
        shape = self.bound.shape
        lists = self.layers * self.kv * shape.group
        return self.query_rows.new_zeros(lists, steps, shape.head_dim)

    def _read(
        self, block: RequestBlock, layer: int, held: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        size = (self.kv, block.lengths[layer], self.bound.shape.head_dim)
        return self.pool.new_zeros(size), self.pool.new_zeros(size)

    def _entries(self, held: torch.Tensor) -> tuple[Entries, Entries]:
        """Keys and values of [lists, M] entries, all the same row of a pool."""
        ids = torch.zeros(held.shape, dtype=torch.int64, device=self.device)
        scale = None
        if self.scale is not None:
            scale = self.scale.repeat(len(ids) // len(self.scale))
        return Entries(self.pool, ids, scale), Entries(self.pool, ids, scale)
