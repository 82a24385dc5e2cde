"""Scenarios for `test_folds.py`: `python scenarios_folds.py NAME OUT.json MODEL '{"flag": value}'`.

Requests whose policies have `decode:`, in one real scheduler (see in_process.py) on a checkpoint
with random weights. After every step, free slots are filled with NaN.
"""

from __future__ import annotations

import json
import os
import random
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

from in_process import Driver, urgency
from remembered import remembered

ROOT = Path(__file__).parents[2]
POLICIES = {
    "streamingllm": ["start=3", "window=21"],
    "h2o": ["heavy=12", "window=10"],
    "tova": ["capacity=24"],
    "roco": ["capacity=6", "newest=2"],
    "simlayerkv": ["threshold=0.3", "window=16"],
    "cake": ["capacity=20", "window=6"],
    "vatp": ["rate=0.2", "start=2"],
    "d2o": ["rate=0.4", "minmax_heads=true"],
    "d2o-code": ["rate=0.4"],
    "cam": ["start=2", "window=24", "reach=4"],
    "pyramidinfer": ["floor_rate=0.5", "recent_rate=0.05", "least=10", "batch=4"],
}
SETTINGS = [f"{name}.{value}" for name, values in POLICIES.items() for value in values]
VOCABULARY = 500
END = 2  # the model's end of text


def start(model: str, flags: dict[str, Any], names: tuple[str, ...] = tuple(POLICIES)) -> Driver:
    paths = [str(ROOT / "policies" / f"{name}.yaml") for name in names]
    settings = [each for each in SETTINGS if each.split(".")[0] in names]
    driver = Driver(model, paths, settings, **flags)
    from kvpolicy.sglang_ext.face import compat

    allocator = driver.scheduler.token_to_kv_pool_allocator
    driver.each_step.append(lambda: driver.store.check_integrity(compat.free_slots(allocator)))
    driver.each_step.append(driver.poison)
    return driver


def drawn(rnd: random.Random, length: int) -> list[int]:
    return [rnd.randrange(3, VOCABULARY) for _ in range(length)]


def watch(driver: Driver) -> dict[str, dict[int, Any]]:
    """Notes cached positions: request -> decode step -> positions per layer and KV head."""
    from kvpolicy.sglang_ext.request.request import state_of

    seen: dict[str, dict[int, Any]] = {}

    def note() -> None:
        for request in driver.scheduler.running_batch.reqs:
            state = state_of(request)
            if state is not None and state.decoding is not None:
                memory = state.memory
                # Pending steps, which the policy takes later.
                noted = list(state.pending_positions(request.kv.kv_committed_len))
                step = memory.generated + len(noted)
                seen.setdefault(request.rid, {})[step] = _cached(memory, noted)

    driver.each_step.append(note)
    return seen


def _cached(memory: Any, noted: list[int]) -> list[list[list[int]]]:
    found = []
    for layer in range(memory.bound.shape.layers):
        positions, there = remembered(memory, layer)
        found.append([[*positions[each].tolist(), *noted] for each in there])
    return found


def prompts(names: list[str]) -> list[tuple[str, str, list[int], int]]:
    """(Request, policy, token ids, output tokens); a long prompt and a short one per policy."""
    rnd = random.Random(5)
    base = drawn(rnd, 17)
    requests = []
    for name in names:
        requests.append((f"{name} long", name, base + drawn(rnd, rnd.randrange(30, 50)), 10))
        requests.append((f"{name} short", name, drawn(rnd, 15), 14))
    return requests


def alone(model: str, flags: dict[str, Any]) -> dict[str, Any]:
    """Requests of every policy, one after the other."""
    names = flags.pop("names", list(POLICIES))
    driver = start(model, flags, tuple(names))
    seen = watch(driver)
    found = {}
    for rid, policy, tokens, output in prompts(names):
        driver.send(rid, tokens, policy=policy, max_new_tokens=output)
        driver.finish()
        answer = driver.answers[rid]
        found[rid] = {
            "policy": policy,
            "prompt": tokens,
            "tokens": answer.tokens,
            "facts": answer.facts,
            "kept": seen.get(rid, {}),
        }
    return {"requests": found, **driver.left_over()}


def mixed(model: str, flags: dict[str, Any]) -> dict[str, Any]:
    """Random requests, alone and then together, with shared prefixes, stops and aborts."""
    count, seed, names = flags.pop("count"), flags.pop("seed"), flags.pop("names")
    driver = start(model, flags, tuple(names))
    rnd = random.Random(seed)
    bases = [drawn(rnd, rnd.randrange(1, 90)) for _ in range(4)]
    requests = []
    for i in range(count):
        base = rnd.choice(bases)
        tokens = base[: rnd.randrange(1, len(base) + 1)] + drawn(rnd, rnd.randrange(0, 30))
        policy = rnd.choice(names) if rnd.random() < 0.8 else "none"
        requests.append((f"{i:04}", tokens, policy, rnd.randrange(2, 40)))
    alone = driver.alone(requests)
    aborted, cut = set(), {}
    for rid, tokens, policy, output in requests:
        options = {"policy": policy, "max_new_tokens": output, "stream": rnd.random() < 0.5}
        if rnd.random() < 0.25:
            # SGLang cannot foresee this end: with overlap, one more step is computed.
            stop = rnd.choice(alone[rid].tokens)
            cut[rid] = _up_to(alone[rid].tokens, {stop, END})
            options["stop_token_ids"] = {stop}
        driver.send(rid, tokens, **options, priority=urgency(rid))
        aborted |= driver.go_on(rnd, 0.2)
    driver.finish()
    gone = aborted | {r for r, a in driver.answers.items() if (a.facts or {}).get("skipped_folds")}
    answers = {rid: a for rid, a in driver.answers.items() if rid not in gone}
    whole = [rid for rid in answers if rid not in cut]
    return {
        "different": [r for r, a in answers.items() if a.tokens != cut.get(r, alone[r].tokens)],
        "facts": [
            rid for rid in whole if _decided(answers[rid].facts) != _decided(alone[rid].facts)
        ],
        "folds": sum((a.facts or {}).get("folds", 0) for a in answers.values()),
        "cut": len(cut),
        "retractions": sum(a.retractions for a in answers.values()),
        "aborted": len(aborted),
        "skipped": len(gone - aborted),
        "mixed": driver.mixed,
        **driver.left_over(),
    }


def _up_to(tokens: list[int], ends: set[int]) -> list[int]:
    last = min(i for i, token in enumerate(tokens) if token in ends)
    return tokens[: last + 1]


def _decided(facts: dict | None) -> dict:
    """Facts that depend neither on the clock nor on retractions."""
    names = ("policy", "uncompressed", "entries_kept", "folds", "entries_dropped_in_decode")
    return {name: (facts or {}).get(name) for name in names}


def shared(model: str, flags: dict[str, Any]) -> dict[str, Any]:
    """A prompt in the radix cache while its request folds, merges and rotates."""
    driver = start(model, flags)
    rnd = random.Random(2)
    result = {}
    for policy in ("d2o-code", "d2o", "cam", "roco", "tova"):
        tokens = drawn(rnd, 61)
        driver.send(policy, tokens, policy=policy, max_new_tokens=24)
        driver.run_until(lambda: bool(driver.scheduler.running_batch.reqs))
        before = _tree(driver)
        request = driver.scheduler.running_batch.reqs[0]
        for _ in range(9):
            driver.step()
        private = driver.store.held
        after = _tree(driver)
        for rid, name in (("plain", "none"), ("same", policy)):
            driver.send(f"{policy} {rid}", tokens, policy=name, max_new_tokens=8)
        driver.finish()
        driver.flush()
        driver.send(f"{policy} alone", tokens, policy="none", max_new_tokens=8)
        driver.finish()
        answers = {rid: driver.answers[f"{policy} {rid}"] for rid in ("plain", "same", "alone")}
        result[policy] = {
            "tree": before == after and len(before) == 61,
            "private": private,
            "locked": request.lock is not None,
            "cached": answers["plain"].cached_tokens,
            "plain": answers["plain"].tokens == answers["alone"].tokens,
            "same": answers["same"].tokens == driver.answers[policy].tokens[:8],
        }
        driver.flush()
    return result | driver.left_over()


def _tree(driver: Driver) -> dict[int, str]:
    """Slots in the radix cache -> digest of their entries."""
    tree = driver.scheduler.tree_cache
    allocator, store = driver.scheduler.token_to_kv_pool_allocator, driver.store
    from kvpolicy.sglang_ext.face import compat

    held = set(range(1, allocator.size + 1)) - set(compat.free_slots(allocator).tolist())
    for private in store.by_row.values():
        held -= set(private.slots.tolist())
    for request in driver.scheduler.running_batch.reqs:
        row = tree.req_to_token_pool.req_to_token[request.kv.req_pool_idx]
        own = row[request.kv.cache_protected_len : request.kv.kv_allocated_len]
        held -= set(own.tolist())
    storage = store.arena.storage
    return {slot: sha256(storage[:, :, slot].numpy().tobytes()).hexdigest() for slot in held}


def long(model: str, flags: dict[str, Any]) -> dict[str, Any]:
    """Long generations, alone and together, in a pool too small for two with full KV."""
    names = ("h2o", "d2o", "cam")
    driver = start(model, flags | {"max_total_tokens": 240}, names)
    rnd = random.Random(4)
    allocator, tree = driver.scheduler.token_to_kv_pool_allocator, driver.scheduler.tree_cache
    used: list[int] = []
    together = [0]

    def note() -> None:
        used.append(allocator.size - allocator.available_size() - tree.evictable_size())
        together[0] = max(together[0], len(driver.scheduler.running_batch.reqs))

    driver.each_step.append(note)
    prompts = {name: drawn(rnd, 60) for name in names}
    result, alone = {}, {}
    for name, tokens in prompts.items():
        used.clear()
        driver.send(name, tokens, policy=name, max_new_tokens=120)
        driver.finish()
        answer = driver.answers.pop(name)
        alone[name] = answer.tokens
        result[name] = {
            "tokens": len(answer.tokens),
            "first": max(used[10:40]),
            "most": max(used[40:]),
            "folds": answer.facts["folds"],
            "dropped": answer.facts["entries_dropped_in_decode"],
        }
    driver.flush()
    for name, tokens in prompts.items():
        driver.send(name, tokens, policy=name, max_new_tokens=120)
    driver.finish()
    answers = driver.answers
    return {
        "requests": result,
        "together": together[0],
        "same": [name for name in names if answers[name].tokens == alone[name]],
        "retractions": sum(answers[name].retractions for name in names),
        **driver.left_over(),
    }


def tight(model: str, flags: dict[str, Any]) -> dict[str, Any]:
    """Folds without free slots, as another request needs the same prompt."""
    driver = start(model, flags | {"max_total_tokens": 130}, ("roco",))
    tokens = drawn(random.Random(6), 60)
    driver.send("other", tokens, policy="none", max_new_tokens=24)
    driver.run_until(lambda: bool(driver.scheduler.running_batch.reqs))
    driver.send("tight", tokens, policy="roco", max_new_tokens=40)
    driver.finish()
    answer = driver.answers["tight"]
    return {
        "skipped": answer.facts["skipped_folds"],
        "tokens": len(answer.tokens),
        "folds": answer.facts["folds"],
        "retractions": answer.retractions,
        **driver.left_over(),
    }


SCENARIOS = {"alone": alone, "mixed": mixed, "shared": shared, "long": long, "tight": tight}

if __name__ == "__main__":
    name, out, model, flags = sys.argv[1:]
    found = SCENARIOS[name](model, json.loads(flags))
    Path(out).write_text(json.dumps(found))
    os._exit(0)  # the scheduler's threads would keep the process alive
