"""Exchanges between ranks for a policy (`--tp-size`), timed beside those for the model.

Each rank is a process with some heads of two layers; ranks exchange through gloo, as those of a
server on a CPU do, by the plugin's own code. A policy's prefill of one prompt of random tensors is
computed on all ranks, and once by one process with all heads; if they keep different entries, there
are no figures. Ranks meet at a barrier before each exchange, so that only the exchange is timed.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as distributed
import torch.multiprocessing
from kvpolicy.dsl.bind.bind import Bound, bind
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.execute.apply import prefilled
from kvpolicy.dsl.execute.program import TorchProgram
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.evaluation.serving import free_port
from kvpolicy.sglang_ext.face.compat import TensorGroup
from kvpolicy.sglang_ext.face.ranks import TensorRanks

SHAPE = ModelShape(2, 32, 8, 128)  # two layers of Llama 3.1 8B
HIDDEN = SHAPE.heads * SHAPE.head_dim
POLICIES = ("snapkv", "cake", "lava", "tova")
SUMS = 2  # all-reduces of hidden states in each layer


class Timed(TensorRanks):
    """Ranks that time their exchanges.

    Attributes:
        seconds: seconds of each exchange, the meeting of the hosts in it included.
        sent: bytes that this rank sends in each exchange.
    """

    def __init__(self, group: TensorGroup, kv_heads: int) -> None:
        super().__init__(group, kv_heads)
        self.seconds: list[float] = []
        self.sent: list[int] = []

    def _exchange(self, x: torch.Tensor) -> torch.Tensor:
        distributed.barrier()
        started = time.perf_counter()
        found = super()._exchange(x)
        self.seconds.append(time.perf_counter() - started)
        self.sent.append(x.numel())
        return found


def measured(ranks: int, tokens: int, rounds: int) -> dict[str, dict[str, Any]]:
    """By policy: bytes that a rank sends for a prompt, seconds for them and for the model's sums.

    Raises:
        SystemExit: ranks and one process keep different entries.
    """
    with TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (ranks, free_port(), tokens, rounds, folder), ranks)
        found = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(ranks)]
    for name in POLICIES:
        kept = [each[name].pop("kept") for each in found]
        joined = [[head for part in layer for head in part] for layer in zip(*kept, strict=True)]
        if joined != _kept(TorchProgram(_bound(name)), _recording(tokens)):
            raise SystemExit(f"scale: with {name} {ranks} ranks keep other entries than one")
    return found[0]


def _bound(name: str) -> Bound:
    return bind(load(name).require(), SHAPE)


def _recording(tokens: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    sizes = (SHAPE.heads, SHAPE.kv_heads, SHAPE.kv_heads)
    return [
        rng.standard_normal((SHAPE.layers, each, tokens, SHAPE.head_dim), np.float32)
        for each in sizes
    ]


def _kept(program: TorchProgram, recording: Sequence[np.ndarray]) -> list[list[list[int]]]:
    """Kept positions per layer and KV head."""
    kept = prefilled(program, *recording).finished.kept
    return [[own.nonzero()[:, 0].tolist() for own in layer] for layer in kept]


def _rank(rank: int, ranks: int, port: int, tokens: int, rounds: int, folder: str) -> None:
    """The work of one rank, in its own process; figures go to a file of the folder."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    world = distributed.group.WORLD
    recording = [np.split(x, ranks, 1)[rank] for x in _recording(tokens)]
    made: dict[str, dict[str, Any]] = {}
    for name in POLICIES:
        timed = Timed(TensorGroup(rank, ranks, world, world), SHAPE.kv_heads)
        program, spent = TorchProgram(_bound(name), heads=timed.heads), []
        for _ in range(rounds):
            timed.seconds, timed.sent = [], []
            kept = _kept(program, recording)
            spent.append(sum(timed.seconds))
        made[name] = {"kept": kept, "sent": timed.sent, "seconds": spent}
        made[name]["model"] = [_sums(tokens) for _ in range(rounds)]
    Path(folder, str(rank)).write_text(json.dumps(made))
    distributed.barrier()
    os._exit(0)  # gloo's threads may still run, and would abort the interpreter's end


def _sums(tokens: int) -> float:
    """Seconds of the all-reduces of the model's layers."""
    hidden, seconds = torch.ones(tokens, HIDDEN, dtype=torch.bfloat16), 0.0
    for _ in range(SUMS * SHAPE.layers):
        distributed.barrier()
        started = time.perf_counter()
        distributed.all_reduce(hidden)
        seconds += time.perf_counter() - started
    return seconds


def rows(ranks: int, found: dict[str, dict[str, Any]]) -> list[list[object]]:
    """Table rows, one per policy."""
    made: list[list[object]] = []
    for name, own in found.items():
        policy, model = (statistics.median(own[each]) for each in ("seconds", "model"))
        made.append(
            [name, ranks, len(own["sent"]), f"{sum(own['sent']) / 1024:,.1f}",
             f"{1e3 * policy:.1f}", f"{1e3 * model:.1f}", f"{100 * policy / model:.1f}"]
        )  # fmt: skip
    return made
