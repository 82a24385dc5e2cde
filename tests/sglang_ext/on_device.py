"""The parts of a server on a GPU that policies use, over tensors without data; see sm90.py.

SGLang and its allocator are replaced, and numbers that the host reads of the device are made up.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from kvpolicy.dsl.execute.decode import lists as block
from kvpolicy.dsl.execute.prefill.run import Run
from kvpolicy.dsl.execute.program import TorchProgram
from kvpolicy.dsl.execute.tensors.heads import Divided, Heads
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.sglang_ext.face.kernels_in_use import chosen_for
from kvpolicy.sglang_ext.face.policy_files import Policy
from kvpolicy.sglang_ext.face.ranks import Ranks
from kvpolicy.sglang_ext.forward import share
from kvpolicy.sglang_ext.forward.rotary import Rotary
from kvpolicy.sglang_ext.memory.arena import create_arena
from kvpolicy.sglang_ext.memory.store import Store
from kvpolicy.sglang_ext.memory.tables import DeviceTables
from kvpolicy.sglang_ext.request import request as request_module
from kvpolicy.sglang_ext.request.request import Served
from shipped_policies import shipped_program

POLICIES = Path(__file__).parents[2] / "policies"
# Enough slots that offsets between layers exceed 32 bits.
SLOTS, ROWS, HIDDEN = 1 << 21, 64, 4096
DEFERRED = 256 << 17  # bytes for 4 layers, as 256 MiB for 32
KEPT, STEPS = 96, 16  # made-up entries kept per list, and decode steps


class Allocator:
    """Replaces SGLang's allocator; never runs out of slots."""

    page_size, size = 1, SLOTS

    def alloc(self, need: int) -> torch.Tensor:
        """Some slots."""
        return torch.empty(need, dtype=torch.int64, device="cuda")

    def free_segment(self, slots: torch.Tensor, *, start_pos: int) -> None:
        """Does nothing."""

    def available_size(self) -> int:
        """The number of all slots."""
        return SLOTS


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor of the device."""
    return torch.empty(shape, dtype=dtype, device="cuda")


class OneOf(Ranks):
    """The first of several ranks, all of which send the same."""

    def __init__(self, size: int, kv_heads: int) -> None:
        self.size = size
        if size > 1:
            self.heads = Divided(0, size, kv_heads, self._exchange, self.meet)

    def _exchange(self, x: torch.Tensor) -> torch.Tensor:
        # A copy, as tensors from other ranks are.
        return x.expand(self.size, -1).clone()


def services(shape: ModelShape, *, pairs: bool = False, ranks: int = 1) -> SimpleNamespace:
    """`Services` of a forward over a pool without data.

    Args:
        pairs: whether layers may be stored in pairs.
        ranks: number of ranks that divide the model's heads.
    """
    one = OneOf(ranks, shape.kv_heads)
    sizes = (shape.layers, SLOTS, one.heads.number(shape.kv_heads), shape.head_dim)
    arena = create_arena(*sizes, torch.bfloat16, "cuda")
    tables = DeviceTables(arena, ROWS, SLOTS, pairs=pairs)

    @contextmanager
    def contained(requests: Any, stage: str, **_: Any) -> Iterator[None]:
        yield

    def failed(request: Any, stage: str, error: Exception) -> None:
        raise error

    half = shape.head_dim // 2
    return SimpleNamespace(
        arena=arena,
        tables=tables,
        pages_reader=None,
        store=Store(arena, Allocator(), tables=tables, heads=one.heads),
        rotary=Rotary(torch.ones(half, dtype=torch.float64), interleaved=False),
        runner=SimpleNamespace(
            model_config=SimpleNamespace(hidden_size=HIDDEN), dtype=torch.bfloat16
        ),
        failures=SimpleNamespace(
            contained=contained,
            contained_together=contained,
            note=failed,
            agree=lambda requests: None,
        ),
        reports=SimpleNamespace(finished_fold=lambda *_: None),
        ranks=one,
        evict=lambda slots: None,
        detach=lambda requests: None,
    )


def served(parts: SimpleNamespace, shape: ModelShape, name: str) -> Served:
    """A shipped policy, bound to a model of `shape`."""
    policy = Policy(name, shipped_program(name), str(POLICIES / f"{name}.yaml"), {})
    return Served(policy, policy.bind(shape), parts.arena, 1, parts.ranks.heads)


def paired(
    arena: Any, slots: torch.Tensor, layer: int, run: Run, heads: Heads, original=share.paired
) -> Any:
    """`share.paired`, with made-up lists twice as long as the prompt."""
    longest = torch.full((heads.total(arena.kv_heads),), 2 * len(slots))
    with mock.patch.object(share, "to_host", return_value=[longest]):
        return original(arena, slots, layer, run, heads)


def names() -> list[str]:
    """Names of the shipped policies."""
    return sorted(path.stem for path in POLICIES.glob("*.yaml") if "." not in path.stem)


@contextmanager
def made_up(shape: ModelShape) -> Iterator[None]:
    """A block in which numbers that the host reads of the device are made up."""

    def counts(self: block.ArrivingNumbers, numbers: torch.Tensor, requests: int, kv: int) -> None:
        self.numbers = numbers
        row = [KEPT, 0, 1, *[KEPT + STEPS] * shape.kv_heads, *[KEPT] * shape.kv_heads]
        rows = np.array([row] * len(numbers))
        self._arriving = SimpleNamespace(arrived=lambda: True)
        self._read = block._fold_numbers(rows, requests, kv)

    program = partial(TorchProgram, deferred_bytes=DEFERRED)
    with (
        mock.patch.object(block.ArrivingNumbers, "__init__", counts),
        mock.patch.object(Run, "_number_chosen", lambda self, chosen: max(len(chosen) // 2, 1)),
        mock.patch.object(request_module, "TorchProgram", program),
        mock.patch.object(request_module, "in_use", return_value=chosen_for("triton", "cuda")),
        mock.patch.object(share, "paired", paired),
    ):
        yield
