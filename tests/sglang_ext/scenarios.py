"""Scenarios for `test_scheduler.py`: `python scenarios.py NAME OUT.json '{"flag": value}'`.

Each runs one real scheduler (see in_process.py) on a checkpoint with random weights and writes its
observations as JSON, on which the tests make assertions.
"""

from __future__ import annotations

import json
import logging
import os
import random
import sys
from array import array
from hashlib import sha256
from pathlib import Path
from typing import Any

from in_process import Driver, urgency

ROOT = Path(__file__).parents[2]
POLICIES = {
    "snapkv": ["capacity=48", "window=16"],
    "adakv": ["capacity=40"],
    "lava": ["capacity=48"],
    "dynamickv": ["capacity=40"],
    "simlayerkv-prefill": ["window=32", "threshold=0.5", "reach=64"],
    "sinks-recent": ["capacity=40"],
}
SETTINGS = [f"{name}.{value}" for name, values in POLICIES.items() for value in values]
VOCABULARY = 500


def start(model: str, flags: dict[str, Any]) -> Driver:
    paths = [str(ROOT / "policies" / f"{name}.yaml") for name in POLICIES]
    driver = Driver(model, paths, SETTINGS, **flags)
    from kvpolicy.sglang_ext.face import compat

    allocator = driver.scheduler.token_to_kv_pool_allocator
    driver.each_step.append(lambda: driver.store.check_integrity(compat.free_slots(allocator)))
    return driver


def prompt(rnd: random.Random, length: int) -> list[int]:
    return [rnd.randrange(3, VOCABULARY) for _ in range(length)]


def choices(model: str, flags: dict[str, Any]) -> dict[str, Any]:
    """Compares the entries that each policy keeps with the interpreter's on the same tensors."""
    driver = start(model, flags)
    recorded = _record_runs()
    rnd = random.Random(1)
    prompts = {"long": prompt(rnd, 300), "odd": prompt(rnd, 131)}
    result = {}
    for policy in POLICIES:
        for name, tokens in prompts.items():
            for again in (False, True):  # the second time with a prefix hit
                rid = f"{policy} {name}{' again' if again else ''}"
                driver.send(rid, tokens, policy=policy, max_new_tokens=4)
                driver.finish()
                answer = driver.answers[rid]
                result[rid] = _compare(recorded.pop()) | {
                    "tokens": answer.tokens,
                    "cached": answer.cached_tokens,
                    "facts": answer.facts,
                }
            driver.flush()
    return result


def _record_runs() -> list[Any]:
    """Makes the torch program note its inputs and kept entries; the latest run comes last."""
    from kvpolicy.dsl.execute.prefill.run import Run

    runs: list[Any] = []
    observe, finish = Run.observe, Run.finish

    def noting_observe(self, layer, q, k, v, tokens=None, *, lse=None):
        self.__dict__.setdefault("seen", {})[layer] = (q.clone(), k.clone(), v)
        return observe(self, layer, q, k, v, tokens, lse=lse)

    def noting_finish(self, *, wait=True):
        finished = finish(self, wait=wait)
        self.kept = finished.kept
        runs.append(self)
        return finished

    Run.observe, Run.finish = noting_observe, noting_finish
    return runs


def _compare(run: Any) -> dict[str, Any]:
    import numpy as np
    from kvpolicy.dsl.interpret.interpreter import interpret

    layers = [run.seen[i] for i in range(len(run.seen))]
    q, k = (np.stack([each[i].numpy() for each in layers]) for i in (0, 1))
    values = [each[1] if each[2] is None else each[2] for each in layers]
    v = np.stack([each.numpy() for each in values])
    kept = np.stack([each.numpy() for each in run.kept])
    wanted = np.stack(interpret(run.program.bound, q, k, v).kept)
    return {
        "differ": int((kept != wanted).sum()),
        "kept": sha256(np.packbits(kept).tobytes()).hexdigest(),
        "entries": int(kept.sum()),
    }


def mixed(model: str, flags: dict[str, Any]) -> dict[str, Any]:
    """Random requests of all policies, alone and then together with aborts."""
    count, seed = flags.pop("count"), flags.pop("seed")
    driver = start(model, flags)
    rnd = random.Random(seed)
    bases = [prompt(rnd, rnd.randrange(1, 400)) for _ in range(5)]
    requests = []
    for i in range(count):
        base = rnd.choice(bases)
        tokens = base[: rnd.randrange(1, len(base) + 1)] + prompt(rnd, rnd.randrange(0, 40))
        requests.append((f"{i:04}", tokens, rnd.choice([*POLICIES, "none"]), rnd.randrange(1, 24)))
    alone = driver.alone(requests)
    aborted = set()
    for rid, tokens, policy, output in requests:
        stream = rnd.random() < 0.5
        options = {"policy": policy, "max_new_tokens": output, "stream": stream}
        driver.send(rid, tokens, **options, priority=urgency(rid))
        aborted |= driver.go_on(rnd, 0.2)
    driver.finish()
    answers = {rid: a for rid, a in driver.answers.items() if rid not in aborted}
    result = {
        "different": [rid for rid, a in answers.items() if a.tokens != alone[rid].tokens],
        "compressed": sum("entries_kept" in (a.facts or {}) for a in answers.values()),
        "in_full": sum("uncompressed" in (a.facts or {}) for a in answers.values()),
        "retractions": sum(a.retractions for a in answers.values()),
        "aborted": len(aborted),
    }
    return result | driver.left_over()


def prefix(model: str, flags: dict[str, Any]) -> dict[str, Any]:
    """Prefix hits on a prompt whose first request decodes from its compressed copy."""
    driver = start(model, flags)
    rnd = random.Random(2)
    first = prompt(rnd, 256)
    driver.send("first", first, policy="snapkv", max_new_tokens=40)
    tree = driver.scheduler.tree_cache
    driver.run_until(lambda: driver.store.held > 0)
    for _ in range(3):
        driver.step()
    result = {
        "private": driver.store.held,
        "protected": tree.protected_size(),
        "evictable": tree.evictable_size(),
    }
    driver.send("same", first, policy="snapkv", max_new_tokens=2)
    driver.send("longer", first + prompt(rnd, 40), policy="lava", max_new_tokens=2)
    driver.send("plain", first + prompt(rnd, 30), policy="none", max_new_tokens=2)
    done = [driver.answers[rid] for rid in ("same", "longer", "plain")]
    driver.run_until(lambda: all(each.finish for each in done))
    result["first_still_decoding"] = driver.answers["first"].finish is None
    driver.finish()
    # Its output depends on the kept entries: a continuation must not hit it.
    driver.send("next", first + driver.answers["first"].tokens, policy="none", max_new_tokens=2)
    driver.finish()
    return result | {f"cached_{rid}": a.cached_tokens for rid, a in driver.answers.items()}


def capacity(model: str, flags: dict[str, Any]) -> dict[str, Any]:
    """Number of long requests that decode at once without and with a policy, in one pool."""
    length, output = 320, 16
    driver = start(model, {"max_total_tokens": 3 * (length + output) + 20, **flags})
    rnd = random.Random(3)
    prompts = [prompt(rnd, length) for _ in range(16)]
    result = {}
    running = [0]
    batch = driver.scheduler
    driver.each_step.append(
        lambda: running.__setitem__(0, max(running[0], len(batch.running_batch.reqs)))
    )
    for policy in ("none", "sinks-recent"):
        running[0] = 0
        for i, tokens in enumerate(prompts):
            driver.send(f"{policy}{i}", tokens, policy=policy, max_new_tokens=output)
        driver.finish()
        driver.flush()
        result[policy] = running[0]
    facts = driver.answers["sinks-recent0"].facts
    dropped = 1 - facts["entries_kept"] / facts["entries_before"]
    return result | {"freed_share": facts["slots_freed"] / (dropped * length)}


def tight(model: str, flags: dict[str, Any]) -> dict[str, Any]:
    """Requests in a pool that holds one prompt and its copy, but not its output besides."""
    length, output, kept = 320, 48, 40  # `sinks-recent` keeps 40 tokens
    driver = start(model, {"max_total_tokens": length + kept + 24, **flags})
    rnd = random.Random(4)
    prompts = [prompt(rnd, length) for _ in range(6)]
    running = [0]
    driver.each_step.append(
        lambda: running.__setitem__(0, max(running[0], len(driver.scheduler.running_batch.reqs)))
    )
    for i, tokens in enumerate(prompts):
        driver.send(f"{i}", tokens, policy="sinks-recent", max_new_tokens=output)
    driver.finish()
    together = {rid: answer.tokens for rid, answer in driver.answers.items()}
    result = {
        "compressed": sum("entries_kept" in answer.facts for answer in driver.answers.values()),
        "retractions": sum(answer.retractions for answer in driver.answers.values()),
        "at once": running[0],
    }
    driver.flush()
    alone = driver.alone(
        [(f"{i}", tokens, "sinks-recent", output) for i, tokens in enumerate(prompts)]
    )
    result["different"] = [rid for rid, tokens in together.items() if tokens != alone[rid].tokens]
    # Only the prefix that a prompt has in the radix cache could make room for it.
    for name, first, longer, new in (
        ("longer prompt", "sinks-recent", prompts[0] + prompts[1][:50], 8),
        ("same prompt, long output", "none", prompts[0], length + kept - 300),
    ):
        driver.flush()
        for rid, tokens, policy, ahead in (
            (f"before the {name}", prompts[0], first, 8), (name, longer, "sinks-recent", new)
        ):  # fmt: skip
            driver.send(rid, tokens, policy=policy, max_new_tokens=ahead)
            driver.run_until(lambda rid=rid: driver.answers[rid].finish is not None, 400)
        result[name] = "entries_kept" in driver.answers[name].facts
    driver.flush()
    return result | driver.left_over()


def within(model: str, flags: dict[str, Any]) -> dict[str, Any]:
    """Requests whose policy halves the prompt, in a pool full of such requests."""
    from kvpolicy.sglang_ext.memory.store import Store

    length, output = 83, 16  # `sinks-recent` keeps 40 tokens
    driver = start(model, {"max_total_tokens": 320, **flags})
    rnd = random.Random(6)
    prompts = [prompt(rnd, length) for _ in range(12)]
    moved: list[int] = []
    borrow = Store.borrow

    def noting(self: Store, row: int, *arguments: Any) -> Any:
        moved.append(row)
        return borrow(self, row, *arguments)

    Store.borrow = noting
    running = [0]
    driver.each_step.append(
        lambda: running.__setitem__(0, max(running[0], len(driver.scheduler.running_batch.reqs)))
    )
    cases = [
        (f"{i}", tokens, ("sinks-recent", "lava")[i % 2], (1, output)[i > 1])
        for i, tokens in enumerate(prompts)
    ]
    for rid, tokens, policy, new in cases:
        driver.send(rid, tokens, policy=policy, max_new_tokens=new)
    driver.finish()
    together = {rid: answer.tokens for rid, answer in driver.answers.items()}
    result = {
        "moved": len(moved),
        "at once": running[0],
        "retractions": sum(answer.retractions for answer in driver.answers.values()),
        "compressed": sum("entries_kept" in answer.facts for answer in driver.answers.values()),
    }
    driver.flush()
    moved.clear()
    alone = driver.alone(cases)
    result["moved alone"] = len(moved)
    result["different"] = [rid for rid, tokens in together.items() if tokens != alone[rid].tokens]
    return result | driver.left_over()


def evicted(model: str, flags: dict[str, Any]) -> dict[str, Any]:
    """What is left of two prompts in a full pool after a later request has hit the older one."""
    os.environ["SGLANG_KV_POLICY_EXPERIMENT"] = "experiment.yaml"  # set by the front end
    os.environ["SGLANG_KV_POLICY_EXPERIMENT_SLOTS"] = "128"
    driver = start(model, {"max_total_tokens": 528, **flags})
    aside, lent = driver.store.set_aside, {0}
    driver.each_step.append(lambda: lent.add(aside.lent))
    rnd = random.Random(5)
    result = {"dense": driver.scheduler.max_total_num_tokens}
    internal = {"kv_policy_assigned": {"scores": True}}
    for name, length, custom in (
        ("client", 110, {}),
        ("shadow", 110, internal),
        ("shadow of a part", 60, internal),
    ):
        older, newer = prompt(rnd, 100), prompt(rnd, 100)
        later = {"older": older, "newer": newer, "finds": (older + prompt(rnd, 10))[:length]}
        for rid, tokens in later.items():
            options = {"custom": custom, "max_new_tokens": 0} if rid == "finds" else {}
            driver.send(
                f"{name} {rid}", tokens, **{"policy": "none", "max_new_tokens": 2} | options
            )
            driver.finish()
        driver.send(f"{name} fills", prompt(rnd, 250), policy="none", max_new_tokens=2)
        driver.finish()
        for rid in ("newer", "older"):
            result[f"{name}: {rid}"] = _found(driver, later[rid])
        result[f"{name}: found"] = driver.answers[f"{name} finds"].cached_tokens
        driver.flush()
    said: list[str] = []
    log = logging.Handler(logging.WARNING)
    log.emit = lambda record: said.append(record.getMessage())
    logging.getLogger().addHandler(log)
    older = prompt(rnd, 340)
    driver.send("older", older, policy="none", max_new_tokens=2)
    driver.finish()
    for length in (60, 100, 150):
        options = {"policy": "none", "custom": internal, "max_new_tokens": 0}
        driver.send(f"{length} new", prompt(rnd, length), **options)
        driver.finish()
        result[f"{length} new"] = driver.answers[f"{length} new"].finish
    result["still found"] = _found(driver, older)
    result |= {"said": said, "lent": [aside.lent, max(lent)]}
    return result | driver.left_over()


def preempts(model: str, flags: dict[str, Any]) -> dict[str, Any]:
    """Whether a request ends before a more urgent one, and how often it is retracted.

    The last of the others is an internal one, which SGLang gives the default priority.
    """
    os.environ["SGLANG_KV_POLICY_EXPERIMENT"] = "experiment.yaml"  # of the front end
    os.environ["SGLANG_KV_POLICY_EXPERIMENT_SLOTS"] = "128"
    options = {"enable_priority_scheduling": True, "max_running_requests": 1}
    options |= {"priority_scheduling_preemption_threshold": 0, "max_total_tokens": 1152}
    driver, rnd, result = start(model, {**options, **flags}), random.Random(3), {}
    dense = driver.scheduler.max_total_num_tokens
    internal = {"custom": {"kv_policy_assigned": {"scores": True}}, "max_new_tokens": 0}
    urgent = {"max_new_tokens": 20, "priority": 5}
    for name, length, policy, more in (
        ("short", 300, "sinks-recent", urgent),
        ("long", dense - 120, "sinks-recent", urgent),
        ("no room for a copy", dense - 30, "sinks-recent", urgent),
        ("internal", 60, "none", {**internal, "priority": 5}),
    ):
        driver.send(name, prompt(rnd, 200), policy="sinks-recent", max_new_tokens=100, priority=0)
        for _ in range(20):
            driver.step()
        driver.send(f"{name} other", prompt(rnd, length), policy=policy, **more)
        driver.run_until(lambda name=name: driver.answers[f"{name} other"].finish is not None, 400)
        running = driver.answers[name]
        ended = running.finish is not None
        driver.finish()
        result[name] = [ended, running.retractions]
        driver.flush()
    return result | driver.left_over()


def starved(model: str, flags: dict[str, Any]) -> dict[str, Any]:
    """A chunked prompt without free slots after its first chunk, beside a running request."""
    driver = start(model, flags)
    scheduler, rnd = driver.scheduler, random.Random(5)
    allocator, long = scheduler.token_to_kv_pool_allocator, prompt(rnd, 200)
    driver.send("alone", long, policy="snapkv", max_new_tokens=4)
    driver.finish()
    driver.flush()
    driver.send("runs", prompt(rnd, 30), policy="snapkv", max_new_tokens=40)
    driver.run_until(lambda: driver.answers["runs"].tokens or scheduler.running_batch.reqs)
    driver.send("long", long, policy="snapkv", max_new_tokens=4)
    driver.run_until(lambda: scheduler.chunked_req is not None)
    taken = allocator.alloc(allocator.available_size() - 24)
    seen = []
    for _ in range(3):
        driver.step()
        seen.append(scheduler.chunked_req.prefix_len)
    allocator.free(taken)
    driver.finish()
    tokens = {rid: answer.tokens for rid, answer in driver.answers.items()}
    return {"seen": seen, "tokens": tokens, **driver.left_over()}


def sessions(model: str, flags: dict[str, Any]) -> dict[str, Any]:
    """Two turns of a session, with requests between them that fill the pool."""
    driver, rnd = start(model, flags), random.Random(9)
    found: dict[str, Any] = {}
    for policy in ("none", "snapkv"):
        first, session = prompt(rnd, 200), f"of {policy}"
        driver.send(f"{policy} 1", first, policy=policy, session=session, max_new_tokens=12)
        driver.finish()
        for i in range(8):
            driver.send(f"{policy} other {i}", prompt(rnd, 200), policy="none", max_new_tokens=4)
            driver.finish()
        again = [*first, *prompt(rnd, 20)]
        driver.send(f"{policy} 2", again, policy=policy, session=session, max_new_tokens=4)
        driver.finish()
        found[policy] = driver.answers[f"{policy} 2"].cached_tokens
        driver.flush()
    return found | driver.left_over()


def _found(driver: Driver, tokens: list[int]) -> int:
    """Number of a prompt's tokens in the radix cache."""
    from sglang.srt.mem_cache.radix_cache import RadixKey

    core = driver.scheduler.tree_cache.tree_core
    return core.match_full_device_prefix(RadixKey(array("q", tokens), None))[0]


SCENARIOS = {
    "choices": choices,
    "mixed": mixed,
    "prefix": prefix,
    "capacity": capacity,
    "tight": tight,
    "within": within,
    "evicted": evicted,
    "preempts": preempts,
    "starved": starved,
    "sessions": sessions,
}


if __name__ == "__main__":
    name, out, model, flags = sys.argv[1:]
    found = SCENARIOS[name](model, json.loads(flags))
    Path(out).write_text(json.dumps(found))
    os._exit(0)  # the scheduler's threads would keep the process alive
