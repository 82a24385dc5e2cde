"""Writes the file of measured choices for this kind of GPU, from the facts of tuning cases.

The choice of a case is the fastest variant whose 90th percentile is below the median of the
wrapper's own values; all variants have passed the case's check. If there is none, a choice without
knobs records that the wrapper's own values stand.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import report
import torch
from kvpolicy.kernels.launch import tuned


def chosen(case: dict) -> dict:
    """The choice of one case.

    Args:
        case: facts of a case that has `tuning`.
    """
    tuning = case["tuning"]
    times = {name: call.get("graph", call["called"]) for name, call in case["calls"].items()}
    default, *variants = times
    faster = [name for name in variants if times[name]["p90"] < times[default]["median"]]
    name = min(faster, key=lambda name: times[name]["median"], default=default)
    return {
        "kernel": tuning["kernel"],
        "where": tuning["where"],
        "choice": tuning["knobs"].get(name, {}),
        "call": name,
        "seconds": times[name],
        "default_seconds": times[default],
        "variants": len(times),
        "checked": case["checked"],
    }


def write(facts: dict, name: str, path: Path) -> list[dict]:
    """Write a run's choices; those of earlier runs for other sizes stay.

    Args:
        facts: result of `kernels.run`.
        name: name of the GPU.

    Returns:
        The choices of this run.

    Raises:
        TunedError: the existing file cannot be read.
    """
    choices = [chosen(case) for case in facts["cases"] if case["tuning"]]
    runs: list[dict] = []
    if path.exists():
        tuned.read(path, name)
        runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
    new = [_key(each) for each in choices]
    for run in runs:
        run["choices"] = [each for each in run["choices"] if _key(each) not in new]
    mine = {"command": facts["command"], "machine": facts["machine"], "choices": choices}
    made = {"device": name, "runs": [run for run in (*runs, mine) if run["choices"]]}
    temporary = path.with_suffix(".tmp")
    report.write_json(temporary, made)
    tuned.read(temporary, name)  # refuses a file that a server could not read
    os.replace(temporary, path)
    return choices


def use(facts: dict, device: torch.device) -> None:
    """Let the wrappers take the choices so far, by way of the environment's folder."""
    name = tuned.device_name(device)
    write(facts, name, tuned.path_of(name))
    tuned.load.cache_clear()


def _key(choice: dict) -> tuple:
    return choice["kernel"], choice["where"]


def text(choices: Sequence[dict]) -> str:
    """The choices as a Markdown table."""
    rows = []
    for each in choices:
        where = ", ".join(f"{name} {value}" for name, value in each["where"].items())
        knobs = ", ".join(f"{name} {value}" for name, value in each["choice"].items())
        seconds, default = each["seconds"]["median"], each["default_seconds"]["median"]
        row = (f"{1e6 * seconds:.1f}", f"{1e6 * default:.1f}", f"{default / seconds:.2f} x")
        rows.append((each["kernel"], where, knobs or "as by default", *row))
    header = ("kernel", "where", "choice", "us", "by default, us", "faster")
    return report.table(header, rows)
