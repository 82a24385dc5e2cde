"""Scenario for `test_hierarchical.py`: `python hierarchical.py OUT.json MODEL '{"flag": value}'`.

The scenario of served.py with the hierarchical cache, whose copies to and from the host it checks.
Every prompt is sent again when its entries have left the device for the host.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import served
import torch
from in_process import Driver


class Copies:
    """Makes SGLang's copies between device and host, and checks them.

    `copy` replaces the function of `sgl_kernel` that makes them on a GPU.

    Attributes:
        saved, loaded: number of slots copied to the host, and back, over all calls.
        private: number of saved slots that were private.
        changed: number of rows that came back different.
        waits: number of forwards that loaded entries.
        unwaited: number of layers for which these forwards did not wait.
    """

    def __init__(self, driver: Driver) -> None:
        import sglang.srt.mem_cache.pool_host.mha as module

        self._driver = driver
        self._pool = driver.scheduler.tp_worker.model_runner.token_to_kv_pool
        self._saved: dict[tuple[int, int], torch.Tensor] = {}  # by address of a layer, slot
        self.saved = self.loaded = self.private = self.changed = 0
        module.transfer_kv_direct = self.copy
        self.waits, self.unwaited = 0, 0
        self._awaited: set[int] | None = None  # layers, by the current forward, if it loads
        self._follow(self._pool.layer_transfer_counter)

    def _follow(self, counter: Any) -> None:
        """Notes the layers for which a forward waits until their entries are loaded."""
        begin, wait, load = counter.set_consumer, counter.wait_until, counter.update_producer
        loads = [0, 0]  # loads begun, and loads seen by forwards

        def update_producer() -> int:
            loads[0] += 1
            return load()

        def set_consumer(index: int) -> None:
            begin(index)
            if index >= 0 and loads[0] == loads[1]:
                return  # it decodes entries that an earlier forward has waited for
            if self._awaited is not None:
                self.waits += 1
                self.unwaited += counter.num_layers - len(self._awaited)
            self._awaited, loads[1] = (set() if index >= 0 else None), loads[0]

        def wait_until(layer: int) -> None:
            if self._awaited is not None:
                self._awaited.add(layer)
            wait(layer)

        counter.set_consumer, counter.wait_until = set_consumer, wait_until
        counter.update_producer = update_producer

    def copy(
        self,
        src_layers: list[torch.Tensor],
        dst_layers: list[torch.Tensor],
        src_indices: torch.Tensor,
        dst_indices: torch.Tensor,
        page_size: int,
    ) -> None:
        """Copies rows of layers; rows that come back are compared with those saved."""
        backs_up = src_layers[0].data_ptr() == self._pool.k_buffer[0].data_ptr()
        if backs_up:
            self.private += int(torch.isin(src_indices, self._private_slots()).sum())
            self.saved += src_indices.numel()
        else:
            self.loaded += src_indices.numel()
        for source, target in zip(src_layers, dst_layers, strict=True):
            rows = source[src_indices]
            target[dst_indices] = rows
            host = target if backs_up else source
            for slot, row in zip(
                (dst_indices if backs_up else src_indices).tolist(), rows, strict=True
            ):
                key = (host.data_ptr(), slot)
                if backs_up:
                    self._saved[key] = row.clone()
                else:
                    self.changed += not torch.equal(row, self._saved[key])

    def _private_slots(self) -> torch.Tensor:
        held = [each.slots for each in self._driver.store.by_row.values()]
        return torch.cat([*held, torch.zeros(0, dtype=torch.int64)])


def come_back_to_chunks(driver: Driver) -> None:
    """Sends a prompt whose first tokens are on the host; in some chunks no row goes deeper."""
    from kvpolicy.sglang_ext.face import compat

    ids = list(range(3, 100))
    driver.send("before", ids[:40], policy="none", max_new_tokens=1)
    driver.finish()
    scheduler = driver.scheduler
    compat.evict(scheduler.tree_cache, scheduler.token_to_kv_pool_allocator.size)
    driver.send("in chunks", ids, policy="fastkv", max_new_tokens=2)
    driver.finish()


def main(out: str, model: str, flags: dict[str, Any]) -> None:
    """Writes every answer, the counts of copies, and slots in use when all have ended."""
    rnd = random.Random(7)
    methods, pause = flags.pop("methods"), flags.pop("pause")
    sent = served.requests(rnd, methods, flags.pop("each"))
    driver = served.start(model, methods, {"enable_hierarchical_cache": True, **flags})
    copies = Copies(driver)
    come_back_to_chunks(driver)
    found = served.answered(driver, rnd, [*sent, *sent], pause)
    names = ("saved", "loaded", "private", "changed", "waits", "unwaited")
    Path(out).write_text(json.dumps(found | {name: getattr(copies, name) for name in names}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
    os._exit(0)  # the scheduler's threads would keep the process alive
