"""Scenario for `test_served.py`: `python served.py OUT.json MODEL '{"flag": value}'`.

Sends requests of every method, and without one, to one scheduler in mixed batches, with shared
prefixes and aborts. Flags: `methods`; `each`, the number of requests per method; `pause`, the most
steps between two requests; `scales`, the checkpoint's scales of keys and values per layer;
`adapter`, the folder of a LoRA adapter, which every third request names. Other flags are SGLang's.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from in_process import Driver
from methods import settings

ROOT = Path(__file__).parents[2]
VOCABULARY = 500
OUTPUT = 10
ADAPTER = "adapter"


def requests(rnd: random.Random, methods: list[str], each: int) -> list[tuple[str, list[int]]]:
    """(Policy, token ids) of requests; every other prompt begins with the same 24 tokens."""

    def drawn(length: int) -> list[int]:
        return [rnd.randrange(3, VOCABULARY) for _ in range(length)]

    base, found = drawn(24), []
    for i, policy in enumerate([*methods, "none", "none", "none"]):
        for j in range(each):
            shares = (i + j) % 2 == 0
            tail = drawn(rnd.randrange(26, 40) if shares else rnd.randrange(45, 70))
            found.append((policy, base + tail if shares else tail))
    rnd.shuffle(found)
    return found


def start(model: str, methods: list[str], flags: dict) -> Driver:
    """A scheduler that checks after every step that no slot is used twice or leaked."""
    paths = [str(ROOT / "policies" / f"{name}.yaml") for name in methods]
    adapter = flags.pop("adapter", None)
    if adapter is not None:
        flags |= {"enable_lora": True, "lora_paths": [named(adapter)], "max_loras_per_batch": 2}
    driver = Driver(model, paths, settings(methods), **flags)
    from kvpolicy.sglang_ext.face import compat

    allocator = driver.scheduler.token_to_kv_pool_allocator
    driver.each_step.append(lambda: driver.store.check_integrity(compat.free_slots(allocator)))
    return driver


def set_scales(scales: Sequence[tuple[float, float]]) -> None:
    """Gives every attention layer scales as a checkpoint would."""
    import torch
    from sglang.srt.layers.radix_attention import RadixAttention

    original = RadixAttention.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        self.k_scale_float, self.v_scale_float = scales[self.layer_id]
        self.k_scale, self.v_scale = torch.tensor(scales[self.layer_id])

    RadixAttention.__init__ = init


def named(folder: str) -> Any:
    """SGLang's reference to the adapter in a folder."""
    from sglang.srt.lora.lora_registry import LoRARef

    return LoRARef(lora_id=ADAPTER, lora_name="adapter", lora_path=folder, pinned=False)


def send_all(
    driver: Driver, rnd: random.Random, sent: list[tuple[str, list[int]]], pause: int
) -> int:
    """Sends requests between steps, and aborts copies of some; returns the number aborted."""
    doomed: list[str] = []
    aborted = 0
    for i, (policy, ids) in enumerate(sent):
        asked = {} if policy == "none" else {"kv_policy_kept": True}
        common = {"policy": policy, "adapter": adapter_of(driver, i)}
        driver.send(f"{i}", ids, custom=asked, max_new_tokens=OUTPUT, **common)
        if rnd.random() < 0.25:
            doomed.append(f"{i} unwanted")
            driver.send(doomed[-1], ids, max_new_tokens=40, stream=True, **common)
        for _ in range(rnd.randrange(pause + 1)):
            driver.step()
        if doomed and rnd.random() < 0.5:
            driver.abort(doomed.pop(0))
            aborted += 1
    for rid in doomed:
        driver.abort(rid)
    return aborted + len(doomed)


def adapter_of(driver: Driver, number: int) -> str | None:
    """The adapter that a request names, or None."""
    has_one = driver.scheduler.tp_worker.model_runner.lora_manager is not None
    return ADAPTER if has_one and number % 3 == 0 else None


def answered(
    driver: Driver, rnd: random.Random, sent: list[tuple[str, list[int]]], pause: int
) -> dict[str, Any]:
    """Every answer, the number of aborts, and slots in use when all have ended."""
    aborted = send_all(driver, rnd, sent, pause)
    driver.finish()
    used, private = driver.used_slots(), driver.store.held
    driver.flush()
    allocator = driver.scheduler.token_to_kv_pool_allocator
    left = [used, private, allocator.size - allocator.available_size()]
    found = {"answers": [], "aborted": aborted, "left": left}
    for i, (policy, ids) in enumerate(sent):
        answer = driver.answers[f"{i}"]
        each = {"policy": policy, "prompt": ids, "tokens": answer.tokens}
        each["adapter"] = adapter_of(driver, i)
        each |= {"cached": answer.cached_tokens, "retractions": answer.retractions}
        found["answers"].append(each | {"facts": answer.facts or {}})
    return found


def main(out: str, model: str, flags: dict) -> None:
    """Runs the scenario and writes its results."""
    rnd = random.Random(7)
    methods, pause = flags.pop("methods"), flags.pop("pause")
    sent = requests(rnd, methods, flags.pop("each"))
    scales = flags.pop("scales", None)
    if scales is not None:
        set_scales(scales)
    found = answered(start(model, methods, flags), rnd, sent, pause)
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
    os._exit(0)  # the scheduler's threads would keep the process alive
