"""Scenario for `test_freed.py`: `python scenarios_freed.py freed OUT.json MODEL '{}'`.

One real scheduler (see in_process.py) serves requests one after the other while Python does not
look for circles of objects; then all that only such a search frees is listed. And it serves many
at once while Python's searches are counted.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

from in_process import Driver
from random_tokens import prompt
from scenarios_propagate import start


def freed(model: str, flags: dict[str, Any]) -> dict[str, Any]:
    policies = flags.pop("policies")
    driver = start(model, policies, flags)
    found = {each: _circles(driver, each) for each in policies}
    return {"requests": found, "searches": _searches(driver, "d2o")}


def _circles(driver: Driver, policy: str) -> dict[str, Any]:
    """Types of objects that hold each other after a request of a policy, and the last one's facts.

    Of the first request they are not counted: what is made once may stay.
    """

    def ask(number: int) -> None:
        rid = f"{policy} {number}"
        driver.send(rid, prompt(number, 200 + number), policy=policy, max_new_tokens=40)
        driver.finish()

    ask(1)
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    ask(2)
    gc.collect()
    found = sorted({type(each).__name__ for each in gc.garbage})
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()
    return {"circles": found, "facts": driver.answers[f"{policy} 2"].facts}


def _searches(driver: Driver, policy: str) -> int:
    """Number of searches while 16 requests of a policy that folds decode 64 steps."""
    for number in range(16):
        tokens = prompt(number, 100 + number)
        driver.send(f"many {number}", tokens, policy=policy, max_new_tokens=100)
    for _ in range(20):
        driver.step()
    found: list[str] = []
    gc.collect()
    gc.callbacks.append(lambda phase, facts: found.append(phase))
    for _ in range(64):
        driver.step()
    gc.callbacks.pop()
    driver.finish()
    return found.count("stop")


if __name__ == "__main__":
    _, out, model, flags = sys.argv[1:]
    Path(out).write_text(json.dumps(freed(model, json.loads(flags))))
    os._exit(0)  # the scheduler's threads would keep the process alive
