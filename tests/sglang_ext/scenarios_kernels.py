"""Scenarios for `test_kernels_served.py`: `python scenarios_kernels.py NAME OUT.json MODEL '{}'`.

Each runs one real scheduler (see in_process.py) and writes what it saw as JSON; the assertions are
the tests'.
"""

from __future__ import annotations

import json
import os
import sys
from functools import wraps
from pathlib import Path
from typing import Any

from in_process import Driver
from scenarios_propagate import prompt, start


def waits(model: str, flags: dict[str, Any]) -> dict[str, Any]:
    """What makes the host wait in the plugin's part of forwards that end prompts, by policy."""
    policies, lengths = flags.pop("policies"), flags.pop("lengths")
    driver = start(model, policies, flags)
    forwards = _watch(driver)
    found = {}
    for policy in policies:
        name, forwards[:] = Path(policy).stem, []
        for i, length in enumerate(lengths):
            driver.send(f"{name} {i}", prompt(length, i), policy=name, max_new_tokens=2)
        driver.finish()
        found[name] = {
            "forwards": list(forwards),
            "facts": [driver.answers[f"{name} {i}"].facts for i in range(len(lengths))],
        }
        driver.flush()
    return found


def _watch(driver: Driver) -> list[dict[str, Any]]:
    """Makes every extend forward note the waits in the plugin's steps."""
    from host_waits import HostWaits
    from kvpolicy.sglang_ext.prefill_step import PrefillStep
    from kvpolicy.sglang_ext.propagate import PropagateStep
    from kvpolicy.sglang_ext.runtime import Runtime
    from kvpolicy.sglang_ext.step import Step

    forwards: list[dict[str, Any]] = []
    noted: list[str] = []  # since the latest extend batch was made

    def watched(method):
        @wraps(method)
        def run(self, *args, **options):
            waits = HostWaits()
            with waits:
                made = method(self, *args, **options)
            noted.extend(waits.found)
            return made

        return run

    allocate, end = watched(Runtime.allocate), watched(Step.finish)

    def begin(self, batch):
        noted.clear()
        allocate(self, batch)

    def finish(self):
        scored = [] if self.prefill is None else self.prefill.scored
        end(self)
        if scored:
            forwards.append({"waits": list(noted), "ended": len(scored)})

    Runtime.allocate, Step.finish = begin, finish
    Step.__init__ = watched(Step.__init__)
    PrefillStep.observe = watched(PrefillStep.observe)
    PropagateStep._narrow = watched(PropagateStep._narrow)
    PropagateStep._widen = watched(PropagateStep._widen)
    return forwards


if __name__ == "__main__":
    name, out, model, flags = sys.argv[1:]
    found = {"waits": waits}[name](model, json.loads(flags))
    Path(out).write_text(json.dumps(found))
    os._exit(0)  # the scheduler's threads would keep the process alive
