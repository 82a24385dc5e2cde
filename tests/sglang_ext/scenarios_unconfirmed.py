"""Scenarios for `test_unconfirmed.py`: `python scenarios_unconfirmed.py NAME OUT.json MODEL '{}'`.

Each runs one real scheduler (see in_process.py) and writes its observations as JSON, on which the
tests make assertions.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from in_process import Driver
from scenarios_propagate import prompt, start

POISONED = 511  # a token whose embedding is infinite
LENGTHS = [100, 61]
OUTPUT = 6


def outcomes(model: str, flags: dict[str, Any]) -> dict[str, Any]:
    """Answers to sound prompts, alone and beside poisoned prompts, and the order of events.

    A poisoned prompt makes the model compute tensors that are not finite.
    """
    policies = flags.pop("policies")
    driver = start(model, policies, flags)
    events = _events(driver)
    runner = driver.scheduler.tp_worker.model_runner
    runner.model.get_input_embeddings().weight.data[POISONED] = float("inf")
    found = {}
    for policy in policies:
        for i, length in enumerate(LENGTHS):
            driver.send(f"alone {i}", prompt(length, i), policy=policy, max_new_tokens=OUTPUT)
        driver.finish()
        driver.flush()
        events.clear()
        for i, length in enumerate(LENGTHS):
            tokens = prompt(length, i)
            driver.send(f"sound {i}", tokens, policy=policy, max_new_tokens=OUTPUT)
            tokens = [*tokens[:20], POISONED, *tokens[20:]]
            driver.send(f"poisoned {i}", tokens, policy=policy, max_new_tokens=OUTPUT)
        driver.finish()
        found[policy] = {
            "answers": {rid: (own.tokens, own.facts) for rid, own in driver.answers.items()},
            "events": list(events),
        }
        driver.flush()
    return found | {"left": driver.left_over()}


def chunks(model: str, flags: dict[str, Any]) -> dict[str, Any]:
    """The order of events for a prompt in two chunks."""
    driver = start(model, {"snapkv": ["capacity=48", "window=16"]}, flags)
    events = _events(driver)
    driver.send("long", prompt(200, 1), policy="snapkv", max_new_tokens=4)
    driver.finish()
    return {"events": list(events), "left": driver.left_over()}


def _events(driver: Driver) -> list[str]:
    """Notes forwards as they begin, and confirmations: whether private before and after."""
    from kvpolicy.sglang_ext.forward.unconfirmed import Unconfirmed
    from kvpolicy.sglang_ext.runtime import Runtime

    events: list[str] = []
    forward, confirm = Runtime.forward, Unconfirmed.confirm

    def noting_forward(self, run, batch):
        events.append("decode" if batch.forward_mode.is_decode() else "extend")
        return forward(self, run, batch)

    def noting_confirm(self, services):
        before = self.state.private is not None
        confirm(self, services)
        after = self.state.private is not None
        events.append(f"{self.request.rid.split()[0]}: {before} to {after}")

    Runtime.forward, Unconfirmed.confirm = noting_forward, noting_confirm
    return events


def misjudged(model: str, flags: dict[str, Any]) -> dict[str, Any]:
    """A request whose lists keep a different number of entries than known ahead."""
    from kvpolicy.sglang_ext.request.request import Served

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("kvpolicy.sglang_ext.forward.failures").addHandler(handler)
    driver = start(model, {"snapkv": ["capacity=48", "window=16"]}, flags)
    (served,) = _served(driver, Served)
    known_counts = served.known_counts
    driver.send("sound", prompt(100, 1), policy="snapkv", max_new_tokens=OUTPUT)
    driver.finish()
    driver.flush()
    served.known_counts = lambda prompt: [number + 1 for number in known_counts(prompt)]
    driver.send("misjudged", prompt(100, 1), policy="snapkv", max_new_tokens=OUTPUT)
    driver.finish()
    served.known_counts = known_counts
    driver.flush()
    driver.send("after", prompt(100, 1), policy="snapkv", max_new_tokens=OUTPUT)
    driver.finish()
    answers = {rid: (own.tokens, own.facts) for rid, own in driver.answers.items()}
    return {"answers": answers, "said": said, "left": driver.left_over()}


def _served(driver: Driver, kind: type) -> list[Any]:
    import gc

    return [each for each in gc.get_objects() if type(each) is kind]


def aborted(model: str, flags: dict[str, Any]) -> dict[str, Any]:
    """Three requests, one of which is aborted before its prompt's result is processed."""
    driver = start(model, {"snapkv": ["capacity=48", "window=16"]}, flags)
    events = _events(driver)
    for i in range(3):
        driver.send(f"{i}", prompt(90 + i, i), policy="snapkv", max_new_tokens=OUTPUT)
    while "extend" not in events:
        driver.step()
    driver.abort("1")
    driver.finish()
    for i in range(3):
        driver.send(f"{i} again", prompt(90 + i, i), policy="snapkv", max_new_tokens=OUTPUT)
    driver.finish()
    answers = {rid: own.tokens for rid, own in driver.answers.items()}
    return {"answers": answers, "events": events, "left": driver.left_over()}


if __name__ == "__main__":
    name, out, model, flags = sys.argv[1:]
    scenarios = {
        "outcomes": outcomes, "chunks": chunks, "misjudged": misjudged, "aborted": aborted,
    }  # fmt: skip
    found = scenarios[name](model, json.loads(flags))
    Path(out).write_text(json.dumps(found))
    os._exit(0)  # the scheduler's threads would keep the process alive
