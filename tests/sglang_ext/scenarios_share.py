"""Scenarios for `test_share_served.py`: layers stored in pairs in a real scheduler.

`python scenarios_share.py NAME OUT.json MODEL '{"flag": value}'`; see scenarios.py.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import scenarios

T, GAMMA = 0.6, 0.05
UPPERS = (1, 3)  # upper layers of the pairs of four layers, with start=0
scenarios.POLICIES = {
    "minicache": ["start=0", f"t={T}", f"gamma={GAMMA}"],
    "snapkv": ["capacity=48", "window=16"],
    "tova": ["capacity=40"],  # entries leave in decode
}
scenarios.SETTINGS = [
    f"{n}.{value}" for n, values in scenarios.POLICIES.items() for value in values
]


def answers(model: str, flags: dict[str, Any]) -> dict[str, Any]:
    """Answers and facts of single prompts, and answers of an eager model that shares layers."""
    output = 24
    driver = scenarios.start(model, flags)
    rnd = random.Random(1)
    result = {}
    for length in (300, 131, 40, 2):
        tokens = scenarios.prompt(rnd, length)
        for again in (False, True):  # the second time, all but the last token are a prefix hit
            rid = f"{length}{' again' if again else ''}"
            driver.send(rid, tokens, policy="minicache", max_new_tokens=output)
            answer = driver.answers[rid]
            driver.run_until(lambda answer=answer: driver.store.held or answer.finish)
            driver.step()
            held = driver.store.held
            driver.finish()
            result[rid] = {
                "tokens": answer.tokens,
                "cached": answer.cached_tokens,
                "facts": answer.facts,
                "held": held,
                "slot_bytes": driver.store.arena.slot_bytes,
            }
            if not again:
                expected, excepted = eager(model, tokens, output, shares=True)
                full, _ = eager(model, tokens, output, shares=False)
                result[rid] |= {"eager": expected, "full": full, "excepted": excepted}
        driver.flush()
    return result


def eager(model: str, tokens: list[int], output: int, *, shares: bool) -> tuple[list[int], int]:
    """Greedy answer of the eager model, and the number of vector pairs that were not shared."""
    import torch
    from transformers import DynamicCache, LlamaForCausalLM

    net = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    cache, answer, excepted = DynamicCache(), [], 0
    given = torch.tensor([tokens])
    with torch.no_grad():
        for step in range(output):
            logits = net(given, past_key_values=cache).logits[0, -1]
            answer.append(int(logits.argmax()))
            given = torch.tensor([[answer[-1]]])
            if step == 0 and shares:
                for upper in UPPERS:
                    below, own = cache.layers[upper - 1], cache.layers[upper]
                    for name in ("keys", "values"):
                        low, high, apart = _restored(getattr(below, name), getattr(own, name))
                        setattr(below, name, low)
                        setattr(own, name, high)
                        excepted += apart
    return answer, excepted


def _restored(x: Any, y: Any) -> tuple[Any, Any, int]:
    """Two tensors [1, G, N, D] after MiniCache as in the paper, in float64; pairs not shared."""
    below, own = x.double(), y.double()
    u, v = below / below.norm(dim=-1, keepdim=True), own / own.norm(dim=-1, keepdim=True)
    angle = (u * v).sum(-1, keepdim=True).clamp(-1, 1).acos()
    e = (((1 - T) * angle).sin() * u + (T * angle).sin() * v) / angle.sin()
    widest, narrowest = angle.amax(2, keepdim=True), angle.amin(2, keepdim=True)
    apart = angle > widest - GAMMA * (widest - narrowest)
    low, high = (z.where(apart, e * z.norm(dim=-1, keepdim=True)).to(x.dtype) for z in (below, own))
    return low, high, int(apart.sum())


if __name__ == "__main__":
    name, out, model, flags = sys.argv[1:]
    found = {"answers": answers, "mixed": scenarios.mixed}[name](model, json.loads(flags))
    Path(out).write_text(json.dumps(found))
    os._exit(0)  # the scheduler's threads would keep the process alive
