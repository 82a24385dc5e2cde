"""Scenarios for `test_propagate.py`: `python scenarios_propagate.py NAME OUT.json MODEL '{...}'`.

Each runs one real scheduler (see in_process.py) and writes its observations as JSON, on which the
tests make assertions.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from in_process import Driver, urgency

ROOT = Path(__file__).parents[2]
VOCABULARY = 500


def start(model: str, policies: dict[str, list[str]], flags: dict[str, Any]) -> Driver:
    """A driver with policies, by name or path, and their settings.

    The flag `scratch` replaces `reserved.SCRATCH`, which limits propagating prompts per forward.
    """
    from kvpolicy.sglang_ext.serving import reserved

    reserved.SCRATCH = flags.pop("scratch", reserved.SCRATCH)
    paths = [p if "/" in p else str(ROOT / "policies" / f"{p}.yaml") for p in policies]
    settings = [f"{Path(p).stem}.{value}" for p, values in policies.items() for value in values]
    driver = Driver(model, paths, settings, **flags)
    from kvpolicy.sglang_ext.face import compat

    allocator = driver.scheduler.token_to_kv_pool_allocator
    driver.each_step.append(lambda: driver.store.check_integrity(compat.free_slots(allocator)))
    return driver


def prompt(length: int, seed: int) -> list[int]:
    """Token ids of a prompt; prompts of different seeds share no prefix."""
    rnd = random.Random(seed)
    return [3 + seed % VOCABULARY, *(rnd.randrange(3, VOCABULARY) for _ in range(length - 1))]


def answers(model: str, flags: dict[str, Any]) -> dict[str, Any]:
    """Answers to prompts one after the other, kept positions, and rows that enter each layer.

    Free slots hold NaN before each prompt, as entries that deeper layers lack must not be read.
    `prefix`: number of first tokens of each prompt that are in the radix cache, from a request
    without a policy.
    """
    policies, lengths = flags.pop("policies"), flags.pop("lengths")
    prefix, output = flags.pop("prefix", 0), flags.pop("output", 6)
    driver = start(model, policies, flags)
    kept, rows = _record(driver)
    found = {}
    for policy in policies:
        name = Path(policy).stem
        for length in lengths:
            ids = prompt(length, length)
            if prefix:
                driver.send("before", ids[:prefix], policy="none", max_new_tokens=1)
                driver.finish()
            driver.poison()
            rows.clear()
            rid = f"{name} {length}"
            driver.send(rid, ids, policy=name, max_new_tokens=output)
            driver.finish()
            answer = driver.answers[rid]
            found[rid] = {
                "ids": ids,
                "tokens": answer.tokens,
                "cached": answer.cached_tokens,
                "facts": answer.facts,
                "kept": kept.pop() if kept else None,
                "rows": [sum(rows[i]) - output + 1 for i in sorted(rows)],
            }
            driver.flush()
    return found | {"used": driver.used_slots(), "private": driver.store.held}


def _record(driver: Driver) -> tuple[list, dict[int, list[int]]]:
    """Makes the plugin note kept positions, and the model the rows that enter each layer."""
    import kvpolicy.sglang_ext.forward.prefill_step as module

    kept: list = []
    original = module.compress

    def noting(services, request, state, slots, chosen, counts, run):
        kept.append([[each.nonzero()[:, 0].tolist() for each in layer] for layer in chosen])
        assert counts.tolist() == chosen.sum(dim=2).tolist()
        original(services, request, state, slots, chosen, counts, run)

    module.compress = noting
    rows: dict[int, list[int]] = {}
    model = driver.scheduler.tp_worker.model_runner.model.model
    for number, layer in enumerate(model.layers):

        def note(_, arguments, options, number=number):
            rows.setdefault(number, []).append(options["hidden_states"].shape[0])

        layer.self_attn.register_forward_pre_hook(note, with_kwargs=True)
    return kept, rows


def mixed(model: str, flags: dict[str, Any]) -> dict[str, Any]:
    """Random requests of all policies and of none, alone and then together with aborts."""
    policies = flags.pop("policies")
    count, seed = flags.pop("count"), flags.pop("seed")
    driver = start(model, policies, flags)
    rnd = random.Random(seed)
    names = [*(Path(policy).stem for policy in policies), "none"]
    requests = []
    for i in range(count):
        tokens = prompt(rnd.randrange(1, 300), seed * count + i)
        requests.append((f"{i:04}", tokens, rnd.choice(names), rnd.randrange(1, 20)))
    alone = driver.alone(requests)
    aborted = set()
    for rid, tokens, policy, output in requests:
        options = {"policy": policy, "max_new_tokens": output, "stream": rnd.random() < 0.5}
        driver.send(rid, tokens, **options, priority=urgency(rid))
        aborted |= driver.go_on(rnd, 0.3)
    driver.finish()
    done = {rid: a for rid, a in driver.answers.items() if rid not in aborted}
    result = {
        "different": [
            f"{rid} {policy}"
            for rid, _, policy, _ in requests
            if rid in done and done[rid].tokens != alone[rid].tokens
        ],
        "left": sum(
            a.facts is not None and a.facts.get("propagated_tokens", 0) < a.facts["prompt_tokens"]
            for a in done.values()
            if a.facts and "propagated_tokens" in a.facts
        ),
        "retractions": sum(a.retractions for a in done.values()),
        "aborted": len(aborted),
        "mixed": driver.mixed,
    }
    return result | driver.left_over()


def shared(model: str, flags: dict[str, Any]) -> dict[str, Any]:
    """Prefix hits after prompts whose tokens left the prefill, or did not."""
    policies = flags.pop("policies")
    driver = start(model, policies, flags)
    found = {}
    for seed, policy in enumerate(policies):
        ids = prompt(200, seed)
        for rid, name, tokens in (("long", policy, 4), ("again", "none", 1), ("one", policy, 1)):
            driver.send(f"{policy} {rid}", ids, policy=name, max_new_tokens=tokens)
            driver.finish()
            if rid == "again":
                driver.flush()
        found[policy] = {
            "facts": driver.answers[f"{policy} long"].facts,
            "tokens": driver.answers[f"{policy} long"].tokens,
            "cached": driver.answers[f"{policy} again"].cached_tokens,
            "one": driver.answers[f"{policy} one"].tokens,
        }
    return found


def aborted(model: str, flags: dict[str, Any]) -> dict[str, Any]:
    """A prompt aborted between its chunks, and the rows and slots that it held until then."""
    policies = flags.pop("policies")
    driver = start(model, policies, flags)
    found = {}
    for policy in policies:
        driver.send(policy, prompt(300, 1), policy=policy, max_new_tokens=4)
        driver.run_until(lambda: _in_chunks(driver.scheduler) >= 150)
        rows, private = _held(driver.scheduler.chunked_req)
        driver.abort(policy)
        driver.finish()
        found[policy] = {"rows": rows, "private": private, "after": driver.store.held}
    driver.flush()
    allocator = driver.scheduler.token_to_kv_pool_allocator
    return found | {"missing_after_flush": allocator.size - allocator.available_size()}


def _in_chunks(scheduler: Any) -> int:
    """Number of computed tokens of the chunked request."""
    return 0 if scheduler.chunked_req is None else scheduler.chunked_req.prefix_len


def _held(request: Any) -> tuple[int, int]:
    """Numbers of rows that wait for a request's last chunk, and of its private slots."""
    from kvpolicy.sglang_ext.request.request import state_of

    state = state_of(request)
    return sum(each.ids.numel() for each in state.progress.held), len(state.private.slots)


if __name__ == "__main__":
    name, out, model, flags = sys.argv[1:]
    scenarios = {"answers": answers, "mixed": mixed, "shared": shared, "aborted": aborted}
    found = scenarios[name](model, json.loads(flags))
    Path(out).write_text(json.dumps(found))
    os._exit(0)  # the scheduler's threads would keep the process alive
