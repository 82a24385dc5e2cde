"""Scenarios for `test_asked.py`: `python scenarios_asked.py NAME OUT.json MODEL '{"flag": value}'`.

Options of requests: to report the kept positions, and to force output tokens. Each scenario runs
one real scheduler (see in_process.py); the tests make assertions on its results.
"""

from __future__ import annotations

import base64
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
from in_process import Answer
from scenarios_propagate import prompt, start

KEPT, FORCE = "kv_policy_kept", "kv_policy_force"
END = 2  # the model's end of text


def positions(said: dict[str, Any]) -> list[list[list[int]]]:
    """Positions in the `kept` of an answer, by layer and KV head."""
    layers, heads, tokens = said["shape"]
    packed = np.frombuffer(base64.b64decode(said["bits"]), dtype=np.uint8)
    bits = np.unpackbits(packed.reshape(layers, heads, -1), axis=-1)
    assert not bits[:, :, tokens:].any()
    return [[each.nonzero()[0].tolist() for each in layer] for layer in bits]


def kept(model: str, flags: dict[str, Any]) -> dict[str, Any]:
    """Compares the positions that requests report as kept with the keys in their private pages.

    The policy `none` is included.
    """
    policies, lengths = flags.pop("policies"), flags.pop("lengths")
    output = flags.pop("output", 4)
    driver = start(model, policies, flags)
    pages = _record_pages()
    found = {}
    for name in [*(Path(policy).stem for policy in policies), "none"]:
        for length in lengths:
            pages.clear()
            ids, rid = prompt(length, length), f"{name} {length}"
            driver.send(rid, ids, policy=name, custom={KEPT: True}, max_new_tokens=output)
            driver.finish()
            facts = driver.answers[rid].facts
            found[rid] = {"ids": ids, "facts": facts, "pages": None}
            if pages:
                found[rid]["pages"] = _same_keys(facts["kept"], *pages.pop())
            driver.flush()
    driver.send("not asked", prompt(300, 1), max_new_tokens=2)
    driver.finish()
    return found | {"not asked": driver.answers["not asked"].facts}


def _record_pages() -> list[tuple[Any, list[list[Any]]]]:
    """Makes the plugin note a prompt's keys [L, G, N, D] and its pages' keys, by layer and head.

    Only if the copy holds unchanged keys, and the run's positions are the prompt's.
    """
    import kvpolicy.sglang_ext.forward.prefill_step as module

    seen: list = []
    original = module.compress

    def noting(services, request, state, slots, chosen, counts, run):
        arena, bound = services.arena, run.program.bound
        keys = arena.storage[:, 0][:, slots].transpose(1, 2).clone()  # they may move
        original(services, request, state, slots, chosen, counts, run)
        private = state.private
        changed = bound.folded.prefill.merge is not None or bound.positions == "slots"
        if private is None or changed or state.progress.shift:
            return
        table, own = arena.pages(private.slots), []
        for layer, row_of_counts in enumerate(private.counts.tolist()):
            own.append([])
            for head, count in enumerate(row_of_counts):
                first = int(private.first_page[layer, head])
                entries = [
                    int(table[first + i // arena.kv_heads]) * arena.kv_heads + i % arena.kv_heads
                    for i in range(count)
                ]
                own[-1].append(arena.entries[entries].clone())
        seen.append((keys, own))

    module.compress = noting
    return seen


def _same_keys(said: dict[str, Any], keys: Any, pages: list[list[Any]]) -> bool:
    """Whether pages hold the keys of the positions that an answer reports."""
    return all(
        pages[layer][head].equal(keys[layer, head, where])
        for layer, heads in enumerate(positions(said))
        for head, where in enumerate(heads)
    )


def own(model: str, flags: dict[str, Any]) -> dict[str, Any]:
    """Requests forced to output what they output by themselves, with logprobs."""
    policies = flags.pop("policies")
    driver = start(model, policies, flags)
    found = {}
    for seed, name in enumerate([*policies, "none"]):
        ids, answers = prompt(150, seed), []
        for force in (0, 9, 24):
            rid = f"{name} {force}"
            custom = {FORCE: answers[0].tokens[:force]} if force else {}
            driver.send(rid, ids, policy=name, custom=custom, max_new_tokens=24, top=3)
            driver.finish()
            answers.append(driver.answers[rid])
            driver.flush()
        found[name] = [_outcome(each) for each in answers]
    return found


def others(model: str, flags: dict[str, Any]) -> dict[str, Any]:
    """Requests forced to output other tokens, and the same text as a prompt.

    Among the forced tokens is a stop token, which must not stop the request.
    """
    policies = flags.pop("policies")
    driver = start(model, policies, flags)
    found = {}
    for seed, name in enumerate([*policies, "none"]):
        ids, rnd = prompt(150, seed), random.Random(seed)
        forced = [*(rnd.randrange(3, 500) for _ in range(6)), END, 7, END]
        options = {"policy": name, "top": 3, "stop_token_ids": [END]}
        driver.send(name, ids, custom={FORCE: forced}, max_new_tokens=30, **options)
        driver.send(f"{name} cut", ids, custom={FORCE: forced}, max_new_tokens=5, **options)
        driver.send(f"{name} free", ids, max_new_tokens=30, **options)
        driver.finish()
        driver.flush()
        driver.send(f"{name} next", ids + forced, max_new_tokens=21, **options)
        driver.finish()
        driver.flush()
        found[name] = {"forced": forced}
        for key, part in (("answer", ""), ("cut", " cut"), ("free", " free"), ("next", " next")):
            found[name][key] = _outcome(driver.answers[name + part])
    return found


def _outcome(answer: Answer) -> dict[str, Any]:
    return {
        "tokens": answer.tokens,
        "logprobs": answer.logprobs,
        "top": answer.top,
        "finish": answer.finish,
    }


def mixed(model: str, flags: dict[str, Any]) -> dict[str, Any]:
    """Random requests, every third forced, alone and then together, with sampled copies of some."""
    policies, count, seed = flags.pop("policies"), flags.pop("count"), flags.pop("seed")
    driver = start(model, policies, flags)
    rnd = random.Random(seed)
    requests = _drawn(rnd, [*policies, "none"], count, seed)
    alone = {}
    for rid, (ids, options) in requests.items():
        driver.send(rid, ids, **options)
        driver.finish()
        alone[rid] = driver.answers.pop(rid)
        driver.flush()
    for rid, (ids, options) in requests.items():
        driver.send(rid, ids, **options, stream=rnd.random() < 0.5)
        if rnd.random() < 0.3:
            driver.send(f"sampled {rid}", ids, max_new_tokens=20, temperature=1.0, top_p=0.9)
        driver.go_on(rnd, 0.0)
    driver.finish()
    answers = {rid: driver.answers[rid] for rid in requests}
    forced = {rid: o["custom"][FORCE] for rid, (_, o) in requests.items() if "custom" in o}
    for rid, tokens in forced.items():
        forced[rid] = tokens[: requests[rid][1]["max_new_tokens"]]
    logprobs = [zip(alone[r].logprobs, answers[r].logprobs, strict=True) for r in forced]
    return {
        "different": [rid for rid, each in answers.items() if each.tokens != alone[rid].tokens],
        "not_forced": [r for r, each in forced.items() if answers[r].tokens[: len(each)] != each],
        "apart": max(abs(x - y) for pairs in logprobs for x, y in pairs),
        "retracted": sum(answers[rid].retractions > 0 for rid in forced),
    } | driver.left_over()


def _drawn(rnd: random.Random, names: list[str], count: int, seed: int) -> dict[str, tuple]:
    """Token ids and options of requests, by id."""
    requests = {}
    for i in range(count):
        options = {"policy": rnd.choice(names), "max_new_tokens": rnd.randrange(2, 28)}
        if i % 3 == 0:
            forced = [rnd.randrange(END, 500) for _ in range(rnd.randrange(1, 20))]
            options |= {"custom": {FORCE: forced}, "top": 2, "stop_token_ids": [END]}
        requests[f"{i:04}"] = (prompt(rnd.randrange(1, 300), seed * count + i), options)
    return requests


if __name__ == "__main__":
    name, out, model, flags = sys.argv[1:]
    scenarios = {"kept": kept, "own": own, "others": others, "mixed": mixed}
    Path(out).write_text(json.dumps(scenarios[name](model, json.loads(flags))))
    os._exit(0)  # the scheduler's threads would keep the process alive
