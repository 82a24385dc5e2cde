"""Scenarios for `test_kernels_served.py`: `python scenarios_kernels.py NAME OUT.json MODEL '{}'`.

Each runs one real scheduler (see in_process.py) and writes its observations as JSON, on which the
tests make assertions.
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
    """Waits of the host in the plugin's part of every prefill forward, by policy."""
    policies, lengths = flags.pop("policies"), flags.pop("lengths")
    output = flags.pop("output", 2)
    driver = start(model, policies, flags)
    forwards = _watch(driver)
    found = {}
    for policy in policies:
        name, forwards[:] = Path(policy).stem, []
        for i, length in enumerate(lengths):
            driver.send(f"{name} {i}", prompt(length, i), policy=name, max_new_tokens=output)
        driver.finish()
        found[name] = {
            "forwards": list(forwards),
            "facts": [driver.answers[f"{name} {i}"].facts for i in range(len(lengths))],
        }
        driver.flush()
    return found


def _watch(driver: Driver) -> list[dict[str, Any]]:
    """Makes every extend forward note the waits in the plugin's code."""
    from host_waits import HostWaits, on_host
    from kvpolicy.sglang_ext.forward.prefill_step import PrefillStep
    from kvpolicy.sglang_ext.forward.propagate import PropagateStep
    from kvpolicy.sglang_ext.forward.step import ForwardStep
    from kvpolicy.sglang_ext.runtime import Runtime

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

    allocate, end = watched(Runtime.allocate), watched(ForwardStep.finish)

    def begin(self, batch):
        noted.clear()
        on_host(batch.seq_lens_cpu)
        allocate(self, batch)

    def finish(self):
        end(self)
        if self.prefill is not None:
            forwards.append({"waits": list(noted), "ended": len(self.prefill.scored)})

    Runtime.allocate, ForwardStep.finish = begin, finish
    ForwardStep.__init__ = watched(ForwardStep.__init__)
    PrefillStep.observe = watched(PrefillStep.observe)
    layer = PropagateStep.layer

    def around_layer(self, number, run, *args, **options):
        waits = HostWaits()

        def model(*args, **options):
            waits.__exit__(None, None, None)
            try:
                return run(*args, **options)
            finally:
                waits.__enter__()

        with waits:
            made = layer(self, number, model, *args, **options)
        noted.extend(waits.found)
        return made

    PropagateStep.layer = around_layer
    return forwards


def decode_waits(model: str, flags: dict[str, Any]) -> dict[str, Any]:
    """Waits of the host in the plugin's part of every decode forward, by policy.

    `lagging`: numbers never arrive before they are read, as on a device that is behind.
    """
    from host_waits import HostWaits, on_host
    from kvpolicy.dsl.execute.decode.lists import ArrivingNumbers
    from kvpolicy.sglang_ext.forward.step import ForwardStep
    from kvpolicy.sglang_ext.report.reports import Reports
    from kvpolicy.sglang_ext.runtime import Runtime

    policies, lengths = flags.pop("policies"), flags.pop("lengths")
    output = flags.pop("output")
    if flags.pop("lagging", False):
        ArrivingNumbers.arrived = lambda self: False
    driver = start(model, policies, flags)
    seen: list[dict[str, Any]] = []
    forward, make, end = Runtime.forward, ForwardStep.__init__, ForwardStep.finish
    finished = Reports.finished_fold

    def watched(method, *args):
        waits = HostWaits()
        with waits:
            method(*args)
        seen[-1]["waits"] += waits.found

    def noting_forward(self, run, batch):
        on_host(batch.seq_lens_cpu)
        seen.append({"decodes": batch.forward_mode.is_decode(), "waits": [], "folds": 0})
        return forward(self, run, batch)

    def noting_fold(self, *args):
        seen[-1]["folds"] += 1
        finished(self, *args)

    Runtime.forward, Reports.finished_fold = noting_forward, noting_fold
    ForwardStep.__init__ = lambda self, *args: watched(make, self, *args)
    ForwardStep.finish = lambda self: watched(end, self)
    found = {}
    for policy in policies:
        name, seen[:] = Path(policy).stem, []
        for i, length in enumerate(lengths):
            driver.send(f"{name} {i}", prompt(length, i), policy=name, max_new_tokens=output)
        driver.finish()
        found[name] = {
            "forwards": [each for each in seen if each["decodes"]],
            "folds": [driver.answers[f"{name} {i}"].facts["folds"] for i in range(len(lengths))],
            "tokens": [driver.answers[f"{name} {i}"].tokens for i in range(len(lengths))],
        }
        driver.flush()
    return found | {"left": driver.left_over()}


def same(model: str, flags: dict[str, Any]) -> dict[str, Any]:
    """Answers and facts of prompts served together, and the number of calls of each kernel.

    `attended`: whether attention hands over its log-sum-exp.
    """
    policies, lengths = flags.pop("policies"), flags.pop("lengths")
    output = flags.pop("output")
    called = _count_calls()
    if flags.pop("attended", False):
        _hand_over_lse()
    driver = start(model, policies, flags)
    at_start = dict(called)
    for policy in policies:
        for i, length in enumerate(lengths):
            tokens = prompt(length, i)
            driver.send(f"{policy} {length}", tokens, policy=policy, max_new_tokens=output)
        driver.finish()
        driver.flush()
    answers = {}
    for rid, answer in driver.answers.items():
        facts = {k: v for k, v in answer.facts.items() if k != "compression_seconds"}
        answers[rid] = {"tokens": answer.tokens, "facts": facts}
    counts = {"called": called, "called at start": at_start}
    return {"answers": answers, **counts, **driver.left_over()}


def _hand_over_lse() -> None:
    """Makes the torch-native prefill return its log-sum-exp, as FlashInfer's does."""
    import torch
    from kvpolicy.sglang_ext.face import compat

    def of_request(q: torch.Tensor, keys: torch.Tensor, before: int, scale: float) -> torch.Tensor:
        keys = keys.repeat_interleave(q.shape[1] // keys.shape[1], 1).double()
        logits = torch.einsum("thd,nhd->thn", q.double(), keys) * scale
        later = torch.arange(len(keys)) > before + torch.arange(len(q))[:, None]
        return logits.masked_fill(later[:, None], -torch.inf).logsumexp(-1).float()

    def extend(name, forward, backend, q, k, v, layer, batch, *rest, **options):
        out = forward(backend, q, k, v, layer, batch, *rest, **options)
        keys = backend.token_to_kv_pool.get_key_buffer(layer.layer_id)
        table = backend.req_to_token_pool.req_to_token
        heads = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        parts, end = [], 0
        lengths = zip(
            batch.extend_prefix_lens.tolist(), batch.extend_seq_lens.tolist(), strict=True
        )
        for row, (before, number) in zip(batch.req_pool_indices, lengths, strict=True):
            start, end = end, end + number
            own = keys[table[row, : before + number].long()]
            parts.append(of_request(heads[start:end], own, before, layer.scaling))
        return out, torch.cat(parts)

    compat.gives_lse = lambda name, backend: True
    compat.extend_with_lse = extend


def _count_calls() -> dict[str, int]:
    """Counts calls of functions that Triton compiles or interprets.

    Keys are module and name of the kernel, or of the policy's function that completes it.
    """
    import triton

    calls: dict[str, int] = {}
    for kind in (triton.runtime.JITFunction, triton.runtime.interpreter.InterpretedFunction):

        def run(self, *args, original=kind.run, **options):
            own = options.get("STORE", self).fn
            name = f"{own.__module__.rpartition('.')[2]}.{own.__name__}"
            calls[name] = calls.get(name, 0) + 1
            return original(self, *args, **options)

        kind.run = run
    return calls


if __name__ == "__main__":
    name, out, model, flags = sys.argv[1:]
    scenarios = {"waits": waits, "decode_waits": decode_waits, "same": same}
    found = scenarios[name](model, json.loads(flags))
    Path(out).write_text(json.dumps(found))
    os._exit(0)  # the scheduler's threads would keep the process alive
