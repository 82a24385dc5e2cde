"""Scenarios for `test_tensor_parallel.py`: two ranks, each a real scheduler in its own process.

Both are driven by the same script (see in_process.py). After every step they compare what they
hold: if it ever differed, they would schedule different batches and wait for each other for ever.
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
from scenarios_propagate import poison, prompt, start

RANKS = 2
PATIENCE = 100  # seconds; then a rank that waits for the other is given up


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
    found: list[Any] = [None] * RANKS
    torch.distributed.all_gather_object(found, own, group=compat.tensor_group().host)
    for name, mine in own.items():
        theirs = [each[name] for each in found]
        if any(each != mine for each in theirs):
            raise RuntimeError(f"at step {driver.steps} ranks differ in {name}: {theirs}")


def begin(model: str, policies: dict[str, list[str]], rank: int, flags: dict[str, Any]) -> Any:
    driver = start(model, policies, {"rank": rank, "tp_size": RANKS, **flags})
    driver.each_step += [lambda: poison(driver), lambda: compare(driver)]
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


def faults(model: str, rank: int, flags: dict[str, Any]) -> dict[str, Any]:
    """One point fails at a time, on the second rank alone."""
    policies, points, count = flags.pop("policies"), flags.pop("points"), flags.pop("count")
    output, chance = flags.pop("output", 12), flags.pop("chance")
    driver = begin(model, policies, rank, flags)
    requests = requests_of([Path(each).stem for each in policies], count, output)
    alone = {}
    for rid, (ids, name, new) in requests.items():
        alone |= {x: told(y) for x, y in driver.alone([(rid, ids, name, new)]).items()}
    result: dict[str, Any] = {}
    for point in points:
        rnd, raised = random.Random(11), [0]

        def fails(rnd=rnd, raised=raised) -> bool:
            hit = rank == RANKS - 1 and (raised[0] == 0 or rnd.random() < chance)
            raised[0] += hit
            return hit

        with failing(point, fails):
            found = together(driver, requests, 6)
        result[point] = {"raised": raised[0], "found": found, **driver.left_over()}
    return {"alone": alone, "points": result}


def mixed(model: str, rank: int, flags: dict[str, Any]) -> dict[str, Any]:
    """Requests of all policies, alone and together, with aborts and retraction."""
    policies, count = flags.pop("policies"), flags.pop("count")
    output, abort = flags.pop("output", 24), flags.pop("abort")
    driver = begin(model, policies, rank, flags)
    requests = requests_of([Path(each).stem for each in policies], count, output)
    alone = {}
    for rid, (ids, name, new) in requests.items():
        alone |= {x: told(y) for x, y in driver.alone([(rid, ids, name, new)]).items()}
    found = together(driver, requests, 8, abort)
    return {"alone": alone, "found": found, "steps": driver.steps, **driver.left_over()}


def _give_up() -> None:
    time.sleep(PATIENCE)
    print("a rank waits for the other", file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    name, out, model, text = sys.argv[1:]
    child = os.fork()
    rank = 1 if child == 0 else 0
    threading.Thread(target=_give_up, daemon=True).start()
    try:
        found = {"faults": faults, "mixed": mixed}[name](model, rank, json.loads(text))
        Path(f"{out}.{rank}").write_text(json.dumps(found))
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)
    if rank:
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status == 0:
        both = [json.loads(Path(f"{out}.{each}").read_text()) for each in range(RANKS)]
        Path(out).write_text(json.dumps(both))
    os._exit(0)  # the scheduler's threads would keep the process alive
