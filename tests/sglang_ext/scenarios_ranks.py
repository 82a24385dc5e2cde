"""Scenarios for `test_tensor_parallel.py`: ranks, each a real scheduler in its own process.

The same script drives all ranks (see in_process.py). After every step they compare their slots and
requests: if these differed, ranks would schedule different batches and wait for each other forever.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

from scenarios_faults import failing
from scenarios_propagate import prompt, start

PATIENCE = 300  # seconds until a rank that waits for another is given up


def compare(driver: Any) -> None:
    """Raise unless all ranks have the same numbers of slots and the same requests."""
    import torch.distributed
    from kvpolicy.sglang_ext.face import compat

    scheduler, store = driver.scheduler, driver.store
    own = {
        "free": scheduler.token_to_kv_pool_allocator.available_size(),
        "evictable": scheduler.tree_cache.evictable_size(),
        "private": {row: each.slots.numel() for row, each in sorted(store.by_row.items())},
        "entries": {row: each.laid_out for row, each in sorted(store.by_row.items())},
        "waiting": [req.rid for req in scheduler.waiting_queue],
        "running": [req.rid for req in scheduler.running_batch.reqs],
        "answers": {rid: each.tokens for rid, each in driver.answers.items()},
    }
    group = compat.tensor_group()
    found: list[Any] = [None] * group.size
    torch.distributed.all_gather_object(found, own, group=group.host)
    for name, mine in own.items():
        theirs = [each[name] for each in found]
        if any(each != mine for each in theirs):
            raise RuntimeError(f"at step {driver.steps} ranks differ in {name}: {theirs}")


def hold_heads_as_on_a_gpu() -> None:
    """Lets several ranks hold the same KV head; on a CPU, SGLang would add empty heads."""
    from sglang.srt.model_executor import model_runner

    model_runner.adjust_config_with_unaligned_cpu_tp = lambda config, load, ranks: config


def begin(model: str, policies: dict[str, list[str]], rank: int, flags: dict[str, Any]) -> Any:
    hold_heads_as_on_a_gpu()
    driver = start(model, policies, {"rank": rank, **flags})
    driver.each_step += [driver.poison, lambda: compare(driver)]
    return driver


def requests_of(names: list[str], count: int, output: int) -> dict[str, tuple[list[int], str, int]]:
    rnd, made = random.Random(5), {}
    for i in range(count):
        name = [*names, "none"][i % (len(names) + 1)]
        ids = prompt(rnd.randrange(1, 30 if i % 5 == 0 else 120), 1000 + i)
        made[f"{i:03} {name}"] = (prompt(60, i % 3) * (i % 5 > 0) + ids, name, output)
    return made


def told(answer: Any) -> dict[str, Any]:
    facts = answer.facts or {}
    return {
        "tokens": answer.tokens,
        "error": (answer.finish or {}).get("message"),
        "uncompressed": facts.get("uncompressed"),
        "kept": facts.get("entries_kept"),
        "folds": facts.get("folds"),
        "positions": facts.get("kept"),
    }


def together(driver: Any, requests: dict, most: int, abort: float = 0.0) -> dict[str, Any]:
    rnd, aborted = random.Random(7), set()

    def unanswered() -> int:
        return sum(x.finish is None and r not in aborted for r, x in driver.answers.items())

    for rid, (ids, name, new) in requests.items():
        driver.send(rid, ids, policy=name, max_new_tokens=new)
        aborted.update(driver.go_on(rnd, abort))
        driver.run_until(lambda: unanswered() < most)
    driver.finish()
    return {rid: told(driver.answers.pop(rid)) for rid in requests if rid not in aborted} | {
        rid: None for rid in aborted if driver.answers.pop(rid)
    }


def one_by_one(driver: Any, requests: dict, **custom: Any) -> dict[str, Any]:
    """Answers to requests served one at a time, with nothing cached.

    Args:
        custom: custom parameters of all requests.
    """
    found = {}
    for rid, (ids, name, new) in requests.items():
        driver.send(rid, ids, policy=name, max_new_tokens=new, custom=custom)
        driver.finish()
        found[rid] = told(driver.answers.pop(rid))
        driver.flush()
    return found


def faults(model: str, rank: int, flags: dict[str, Any]) -> dict[str, Any]:
    """Requests with one point failing at a time, on the last rank alone or on all alike."""
    policies, points, count = flags.pop("policies"), flags.pop("points"), flags.pop("count")
    output, chance, alike = flags.pop("output", 12), flags.pop("chance"), flags.pop("alike", False)
    driver = begin(model, policies, rank, flags)
    requests = requests_of([Path(each).stem for each in policies], count, output)
    alone = one_by_one(driver, requests)
    result: dict[str, Any] = {}
    for point in points:
        rnd, raised = random.Random(11), [0]

        def fails(rnd=rnd, raised=raised) -> bool:
            here = alike or rank == flags["tp_size"] - 1
            hit = here and (raised[0] == 0 or rnd.random() < chance)
            raised[0] += hit
            return hit

        with failing(point, fails):
            found = together(driver, requests, 6)
        result[point] = {"raised": raised[0], "found": found, **driver.left_over()}
    return {"alone": alone, "points": result}


def mixed(model: str, rank: int, flags: dict[str, Any]) -> dict[str, Any]:
    """Requests of all policies, alone and together, with aborts and retractions."""
    policies, count = flags.pop("policies"), flags.pop("count")
    output, abort = flags.pop("output", 24), flags.pop("abort")
    driver = begin(model, policies, rank, flags)
    requests = requests_of([Path(each).stem for each in policies], count, output)
    alone = one_by_one(driver, requests, kv_policy_kept=True)
    found = together(driver, requests, 8, abort)
    return {"alone": alone, "found": found, "steps": driver.steps, **driver.left_over()}


def alone(model: str, rank: int, flags: dict[str, Any]) -> dict[str, Any]:
    """Requests of all policies, alone: the first part of `mixed`."""
    policies, count, output = flags.pop("policies"), flags.pop("count"), flags.pop("output", 24)
    driver = begin(model, policies, rank, flags)
    requests = requests_of([Path(each).stem for each in policies], count, output)
    return one_by_one(driver, requests, kv_policy_kept=True)


def _give_up() -> None:
    time.sleep(PATIENCE)
    print("a rank waits for the other", file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    name, out, model, text = sys.argv[1:]
    flags = json.loads(text)
    ranks, rank, children = range(flags["tp_size"]), 0, []
    for each in ranks[1:]:
        child = os.fork()
        if child == 0:
            rank = each
            break
        children.append(child)
    threading.Thread(target=_give_up, daemon=True).start()
    try:
        found = {"faults": faults, "mixed": mixed, "alone": alone}[name](model, rank, flags)
        Path(f"{out}.{rank}").write_text(json.dumps(found))
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)
    if rank:
        os._exit(0)
    if all(os.waitpid(child, 0)[1] == 0 for child in children):
        every = [json.loads(Path(f"{out}.{each}").read_text()) for each in ranks]
        Path(out).write_text(json.dumps(every))
    os._exit(0)  # the scheduler's threads would keep the process alive
