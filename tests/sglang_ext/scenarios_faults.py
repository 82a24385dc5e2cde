"""Scenarios for `test_faults.py`: a policy fails somewhere, for some requests of a mixed batch.

Each runs one real scheduler (see in_process.py) and writes its observations as JSON, on which the
tests make assertions.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import flashinfer_stand_in as stand_in
from scenarios_propagate import prompt, start


class Fault(RuntimeError):
    """An error raised on purpose."""


# Points that may raise: name -> (module, function or `Class.method` in it).
POINTS = {
    "variant": ("sglang_ext.start", "warm_variant"),
    "arrival": ("sglang_ext.request.request", "Served.folds_within"),
    "prefix": ("sglang_ext.request.request", "RequestState.queries"),
    "reservation": ("sglang_ext.request.admission", "reserve"),
    "growth": ("sglang_ext.request.admission", "still_needs"),
    "allocation": ("sglang_ext.memory.store", "Store.allocate"),
    "slots just taken": ("sglang_ext.memory.store", "_joined"),
    "start of scoring": ("dsl.execute.program", "TorchProgram.start"),
    "scoring": ("sglang_ext.face.compat", "scaled"),
    "sums over chunks": ("dsl.execute.prefill.run", "Run.accumulate"),
    "choosing": ("dsl.execute.prefill.run", "Run.finish"),
    "end of choosing": ("dsl.execute.prefill.finished", "FinishedPrefill.settle"),
    "what stays": ("sglang_ext.forward.prefill_step", "PrefillStep._numbers"),
    "compaction": ("sglang_ext.forward.prefill_step", "compress"),
    "copy": ("sglang_ext.forward.compress", "copy_kept"),
    "layout": ("sglang_ext.memory.store", "Store.fill"),
    "memory": ("sglang_ext.request.request", "RequestState.remember"),
    "known counts": ("sglang_ext.forward.prefill_step", "known_counts"),
    "what fits": ("sglang_ext.forward.unconfirmed", "Unconfirmed.fitting"),
    "numbers of the device": ("dsl.execute.tensors.arriving", "Arriving.read"),
    "pairs": ("sglang_ext.forward.share", "compress"),
    "report": ("sglang_ext.report.reports", "Reports.finished_prompt"),
    "when entries leave": ("sglang_ext.request.request", "RequestState.leaves_at"),
    "last fold": ("sglang_ext.forward.decode_step", "check_last_fold"),
    "pending steps": ("sglang_ext.request.request", "RequestState.pending_positions"),
    "noted queries": ("sglang_ext.forward.decode_step", "queries_of"),
    "following": ("sglang_ext.forward.group_fold", "follow_together"),
    "fold": ("sglang_ext.forward.group_fold", "GroupFold._drops"),
    "fold in place": ("sglang_ext.forward.group_fold", "GroupFold._launch"),
    "fold elsewhere": ("sglang_ext.forward.group_fold", "GroupFold._move"),
    "fold by layer": ("sglang_ext.forward.fold", "Fold.write_by_layer"),
    "fold anew": ("sglang_ext.forward.fold", "Fold.write_anew"),
    "tail": ("sglang_ext.forward.fold", "Fold.give_up_tail"),
    "report of a fold": ("sglang_ext.report.reports", "Reports.finished_fold"),
    "attention": ("sglang_ext.forward.decode_step", "DecodeStep.overwrite"),
    "chosen rows": ("sglang_ext.forward.prefill_step", "Scored.narrow"),
    "restart": ("sglang_ext.forward.prefill_step", "Scored.restart"),
    "second prefill": ("sglang_ext.face.compat", "embed"),
    "view": ("sglang_ext.forward.view", "make"),
    "planned view": ("sglang_ext.forward.view", "make"),
    "resumed pass": ("sglang_ext.request.request", "RequestState.next_end"),
    "resumed reader": ("sglang_ext.forward.reader", "EntryReader.of"),
    "resumed attention": ("sglang_ext.forward.resume", "attend"),
    "resumed following": ("sglang_ext.forward.resume", "Group"),
    "candidates": ("sglang_ext.experiment.raw", "take"),
}
AFTERWARDS = ("planned view",)  # points that raise after the function has done its work


@contextmanager
def failing(point: str, fails: Callable[[], bool]) -> Iterator[None]:
    """A block in which a point raises `Fault` whenever `fails` returns True."""
    module, path = POINTS[point]
    owner: Any = import_module(f"kvpolicy.{module}")
    *outer, name = path.split(".")
    for each in outer:
        owner = getattr(owner, each)
    original = vars(owner)[name]
    kind = type(original)
    function = original.fget if kind is property else getattr(original, "__func__", original)

    @wraps(function)
    def faulty(*args: Any, **options: Any) -> Any:
        made = function(*args, **options) if point in AFTERWARDS else None
        if fails():
            raise Fault(f"{point} on purpose")
        return made if point in AFTERWARDS else function(*args, **options)

    wrapped = kind(faulty) if kind in (property, classmethod, staticmethod) else faulty
    setattr(owner, name, wrapped)
    try:
        yield
    finally:
        setattr(owner, name, original)


def mixed(model: str, flags: dict[str, Any]) -> dict[str, Any]:
    """Requests of all policies together, with one point failing at a time."""
    policies, points = flags.pop("policies"), flags.pop("points")
    count, chance, output = flags.pop("count"), flags.pop("chance"), flags.pop("output", 12)
    common, together = flags.pop("common", 60), flags.pop("together", count)
    if flags.get("attention_backend") == "flashinfer":
        stand_in.install()
    driver = start(model, policies, flags)
    driver.each_step.append(driver.poison)
    stages = _record_failures()
    rnd = random.Random(5)
    names = [Path(each).stem for each in policies]
    requests = {}
    for i in range(count):
        name = [*names, "none"][i % (len(names) + 1)]
        # Some prompts share their beginning, some are short.
        ids = prompt(rnd.randrange(1, 30 if i % 5 == 0 else 120), 1000 + i)
        ids = prompt(common, i % 3) * (i % 5 > 0) + ids
        requests[f"{i:03} {name}"] = (ids, name, rnd.randrange(3, output))
    alone, full = {}, {}
    for rid, (ids, name, new) in requests.items():
        alone |= driver.alone([(rid, ids, name, new)])
        full |= driver.alone([(rid, ids, "none", new)])
    stages.clear()
    result = {}
    for point in points:
        times = [0]

        def fails(times=times) -> bool:
            hit = times[0] == 0 or rnd.random() < chance
            times[0] += hit
            return hit

        with failing(point, fails):
            for rid, (ids, name, new) in requests.items():
                driver.send(rid, ids, policy=name, max_new_tokens=new)
                for _ in range(rnd.randrange(3)):
                    driver.step()
                driver.run_until(lambda: _unfinished(driver) < together)
            driver.finish()
        found = {rid: driver.answers.pop(rid) for rid in requests}
        outcomes = {
            rid: _outcome(rid, answer, alone[rid], full[rid], stages.get(rid))
            for rid, answer in found.items()
        }
        messages = {a.finish["message"] for a in found.values() if a.finish["type"] == "abort"}
        result[point] = {
            "raised": times[0],
            "noted": dict(stages),
            "wrong": [rid for rid, outcome in outcomes.items() if outcome.startswith("wrong")],
            "outcomes": sorted(set(outcomes.values())),
            "messages": sorted(messages),
            **driver.left_over(),
        }
        stages.clear()
    served = driver.scheduler.get_internal_state(None).internal_state["kv_policy"]
    return {"points": result, "failures": {each["name"]: each["failures"] for each in served}}


def _unfinished(driver: Any) -> int:
    return sum(answer.finish is None for answer in driver.answers.values())


def _record_failures() -> dict[str, tuple[str, bool, bool]]:
    """Makes the plugin note failures: request -> (stage, whether it goes on, whether it had begun
    to decode under its policy).
    """
    from kvpolicy.sglang_ext.forward.failures import Failures
    from kvpolicy.sglang_ext.request.request import state_of

    stages: dict[str, tuple[str, bool, bool]] = {}
    original = Failures.note

    def note(self, req, stage, error, *, whole=None):
        state = state_of(req)
        if not isinstance(error, Fault):
            raise error
        first = state is not None and not state.failed
        decoding = len(req.output_ids) > 0 or (
            req.kv.holds_kv and req.kv.kv_committed_len > state.prompt
        )
        original(self, req, stage, error, whole=whole)
        if first:
            stages[req.rid] = (stage, req.to_finish is None, decoding)

    Failures.note = note
    return stages


def _outcome(rid: str, answer: Any, alone: Any, full: Any, noted: tuple | None) -> str:
    """How a request ended, in one phrase; begins with `wrong` if it should not have."""
    if answer.finish["type"] == "abort":
        right = noted is not None and not noted[1] and answer.finish["status_code"] == 500
        return "ended" if right else f"wrong: {answer.finish}"
    facts = answer.facts or {}
    if noted is not None:
        if facts.get("uncompressed") != "policy_error" or not noted[1]:
            return f"wrong: {facts}"
        same = answer.tokens == full.tokens or noted[2]
        return "in full" if same else "wrong: not as without a policy"
    if facts.get("uncompressed") == "policy_error":
        return "wrong: nothing failed"
    return "as alone" if answer.tokens == alone.tokens else "wrong: not as alone"


def borrowed(model: str, flags: dict[str, Any]) -> dict[str, Any]:
    """Prompts admitted on slots that running requests need later.

    First they are compressed as expected; then they are not, as their policy fails.
    """
    from kvpolicy.sglang_ext.forward import prefill_step
    from kvpolicy.sglang_ext.request import admission

    length, output = flags.pop("length"), flags.pop("output")
    driver = start(model, {"sinks-recent": ["capacity=40"]}, flags)
    driver.each_step.append(driver.poison)
    cases = [(f"{i}", prompt(length, 50 + i), "sinks-recent", output) for i in range(7)]
    full = driver.alone([(rid, ids, "none", new) for rid, ids, _, new in cases])
    alone = driver.alone(cases)
    lent: list[str] = []
    borrowed_reserve, compress = admission._borrowed_reserve, prefill_step.compress

    def noting(adder: Any, req: Any, now: int, later: int) -> int | None:
        found = borrowed_reserve(adder, req, now, later)
        if found is not None and req.rid not in lent:
            lent.append(req.rid)
        return found

    def faulty(services: Any, req: Any, *arguments: Any) -> None:
        if fails and req.rid in lent:
            raise Fault("compaction on purpose")
        compress(services, req, *arguments)

    admission._borrowed_reserve, prefill_step.compress = noting, faulty
    stages, result = _record_failures(), {}
    for fails in (False, True):
        driver.flush()
        lent.clear()
        for rid, ids, policy, new in cases:
            driver.send(rid, ids, policy=policy, max_new_tokens=new)
        driver.finish()
        found = {rid: driver.answers.pop(rid) for rid, *_ in cases}
        outcomes = {
            rid: _outcome(rid, answer, alone[rid], full[rid], stages.get(rid))
            for rid, answer in found.items()
        }
        result["failing" if fails else "compressed"] = {
            "lent": len(lent),
            "failed": len(stages),
            "outcomes": sorted(set(outcomes.values())),
            "retractions": sum(answer.retractions for answer in found.values()),
        }
    return result | driver.left_over()


def disabled(model: str, flags: dict[str, Any]) -> dict[str, Any]:
    """One of two policies fails until it is disabled."""
    driver = start(model, {"snapkv": ["capacity=40", "window=8"], "lava": ["capacity=40"]}, flags)
    found, name = {}, ""
    with failing("choosing", lambda: name == "snapkv"):
        for i in range(6):
            for name in ("snapkv", "lava", "none"):
                rid = f"{i} {name}"
                driver.send(rid, prompt(100, i), policy=name, max_new_tokens=4)
                driver.finish()
                facts = driver.answers[rid].facts or {}
                found[rid] = [driver.answers[rid].tokens, facts.get("uncompressed")]
    state = driver.scheduler.get_internal_state(None).internal_state["kv_policy"]
    return {"answers": found, "policies": {each["name"]: each for each in state}}


if __name__ == "__main__":
    name, out, model, flags = sys.argv[1:]
    found = {"mixed": mixed, "borrowed": borrowed, "disabled": disabled}[name](
        model, json.loads(flags)
    )
    Path(out).write_text(json.dumps(found))
    os._exit(0)  # the scheduler's threads would keep the process alive
