"""A plugin of SGLang for tests: makes the copies of the hierarchical cache, as late as it may.

On a GPU, functions of `sgl_kernel` make them. Here, slots are copied to the host when SGLang finds
that they have been, after a number of turns that differs from stage to stage. Slots that come back
are not numbers until a forward waits for their layer.

Each process writes to its output what it copies, for `copied`.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

LATEST = 8  # turns
_asked: list[Callable[[], None]] = []  # copies that no event follows yet


def copied(log: str) -> dict[str, dict[str, int]]:
    """Slots that each process has saved and loaded, by its id, from a server's output."""
    found: dict[str, dict[str, int]] = {}
    for pid, what, slots in re.findall(r"process (\d+) has (saved|loaded) (\d+) slots", log):
        own = found.setdefault(pid, {"saved": 0, "loaded": 0})
        own[what] += int(slots)
    return found


class Copied:
    """An event that follows the copies asked for before it is recorded.

    It makes them itself, when it is waited for or has come.

    Args:
        turns: number of times that it has not come when it is asked.
    """

    def __init__(self, turns: int = 0) -> None:
        self._turns = turns
        self._copies: list[Callable[[], None]] = []

    def record(self) -> None:
        self._copies, _asked[:] = [*_asked], []

    def query(self) -> bool:
        self._turns -= 1
        if self._turns >= 0:
            return False
        self.synchronize()
        return True

    def synchronize(self) -> None:
        copies, self._copies = self._copies, []
        for each in copies:
            each()


def register() -> None:
    """Replaces SGLang's copies and the events that follow them."""
    import sglang.srt.managers.cache_controller as controller
    import sglang.srt.mem_cache.l2_transfer as transfer
    import sglang.srt.mem_cache.pool_host.mha as mha

    host, loading = mha.MHATokenToKVPoolHost, controller.LayerLoadingEvent
    save, load = host.backup_from_device_all_layer, host.load_to_device_per_layer
    late, begins = random.Random(os.getpid()), transfer.device_module.Event

    def save_late(self: Any, device: Any, to: Any, slots: torch.Tensor, *given: Any) -> None:
        _asked.append(partial(save, self, device, to, slots, *given))
        print(f"process {os.getpid()} has saved {slots.numel()} slots", flush=True)

    def load_late(
        self: Any, device: Any, to: Any, slots: torch.Tensor, layer: int, *given: Any, **more: Any
    ) -> None:
        for buffer in (device.k_buffer[layer], device.v_buffer[layer]):
            buffer[slots] = torch.nan
        _asked.append(partial(load, self, device, to, slots, layer, *given, **more))
        if layer == 0:
            print(f"process {os.getpid()} has loaded {slots.numel()} slots", flush=True)

    def complete(self: Any, layer: int) -> None:
        self.load_events[layer] = Copied()
        self.load_events[layer].record()

    mha.transfer_kv_direct = _copy
    host.backup_from_device_all_layer, host.load_to_device_per_layer = save_late, load_late
    transfer.make_timing_event_pair = lambda: (begins(), Copied(late.randrange(LATEST)), False)
    loading.complete = complete
    loading.wait = lambda self, layer: self.load_events[layer].synchronize()


def _copy(
    src_layers: list[torch.Tensor],
    dst_layers: list[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]
