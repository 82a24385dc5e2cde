"""Reads a folder of `kvpolicy eval` for a report."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kvpolicy.dsl.syntax.diagnostics import PolicyError, refused
from kvpolicy.evaluation import records
from kvpolicy.evaluation.records import FULL, Record

Series = tuple[str, float | None]
"""A policy and the share that was asked of it."""

_MAP = {"policy", "budget", "task", "length", "index", "tokens", "shape", "bits"}
_WITHOUT = "without this file the report has no maps; remove it, or run `kvpolicy eval` anew"
_AGAIN = "give the folder that `kvpolicy eval --out` wrote"


@dataclass(frozen=True)
class Results:
    """A run, complete or not.

    Attributes:
        plan: content of plan.json.
        records: the answered questions, each once.
        maps: lines of kept.jsonl; empty without the file.
    """

    plan: dict
    records: tuple[Record, ...]
    maps: tuple[dict, ...]

    @property
    def series(self) -> list[Series]:
        """Policies and budgets in the plan's order, full KV first."""
        pairs = [(entry["policy"], entry["budget"]) for entry in self.plan["policies"]]
        return sorted(dict.fromkeys(pairs), key=lambda series: series[0] != FULL)

    @property
    def tasks(self) -> dict[str, str]:
        """Name -> title, in the plan's order."""
        return dict(self.plan["tasks"])

    @property
    def lengths(self) -> list[int]:
        return sorted(self.plan["lengths"])

    @cached_property
    def short(self) -> dict[str, str]:
        """Name of a task -> short name for tables."""
        paths = [_parts(task) for task in self.tasks]
        return {task: _short(task, paths) for task in self.tasks}

    @cached_property
    def samples(self) -> tuple[int, int]:
        """Smallest and largest number of samples per task and length; files may have few."""
        counts = [self._questions(task, n)[0] for task in self.tasks for n in self.lengths]
        return min(counts), max(counts)

    def asked(self, series: Series, task: str, length: int) -> tuple[int, int]:
        """Number of samples that a series is asked, and of their questions; (0, 0) if not asked."""
        entry = next(e for e in self.plan["policies"] if (e["policy"], e["budget"]) == series)
        lengths = [n for alias_lengths in entry.get("aliases", {}).values() for n in alias_lengths]
        return self._questions(task, length) if length in lengths or not lengths else (0, 0)

    def _questions(self, task: str, length: int) -> tuple[int, int]:
        """As `asked` for all series: from the plan, or from the answers if the plan lacks it."""
        counts = self.plan.get("questions", {}).get(task, {}).get(str(length))
        if counts is not None:
            return tuple(counts)
        samples = self.plan["samples"]
        return samples, samples * self._turns[task]

    @cached_property
    def _turns(self) -> dict[str, int]:
        """Task -> questions per sample, as far as the answers show."""
        turns = dict.fromkeys(self.tasks, 1)
        for record in self.records:
            turns[record.task] = max(turns[record.task], record.turn + 1)
        return turns

    def conversations(self) -> list[str]:
        """Tasks whose samples have several questions."""

        def several(task: str, length: int) -> bool:
            samples, questions = self._questions(task, length)
            return questions > samples

        return [task for task in self.tasks if any(several(task, n) for n in self.lengths)]


def _parts(task: str) -> list[str]:
    """The parts of the path of a task `data:PATH`; for other tasks the name alone."""
    kind, _, path = task.partition(":")
    return path.replace("\\", "/").split("/") if kind == "data" and path else [task]


def _short(task: str, paths: list[list[str]]) -> str:
    """A task's name; for `data:PATH` the file's, with as many folders as make it unique."""
    path = _parts(task)
    for count in range(1, len(path) + 1):
        if [other_path[-count:] for other_path in paths].count(path[-count:]) == 1:
            return "/".join(path[-count:])
    return task


def load(folder: Path) -> Results:
    """Reads plan.json, samples.jsonl and, if there is one, kept.jsonl.

    Raises:
        PolicyError: the folder is not one of `kvpolicy eval`, a file is damaged, or there are no
            answers yet.
    """
    plan = _plan(folder)
    path = folder / "samples.jsonl"
    try:
        answers = {record.key: record for record in records.read(path)}
    except FileNotFoundError:
        answers = {}
    except (OSError, ValueError) as error:
        raise _refused(path, str(error)) from None
    planned = {(entry["policy"], entry["budget"]) for entry in plan["policies"]}
    strangers = {(r.policy, r.budget, r.task) for r in answers.values()
                 if (r.policy, r.budget) not in planned or r.task not in plan["tasks"]}  # fmt: skip
    if strangers:
        policy, budget, task = min(strangers, key=str)
        raise _refused(path, f"plan.json knows nothing of policy {policy}, budget {budget}, {task}")
    if not answers:
        raise _refused(
            path, "no question has been answered yet", "run the same `kvpolicy eval` again"
        )
    return Results(plan, tuple(answers.values()), tuple(_lines(folder / "kept.jsonl")))


def _plan(folder: Path) -> dict:
    path = folder / "plan.json"
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise _refused(folder, "there is no plan.json here", _AGAIN) from None
    except (OSError, ValueError) as error:
        raise _refused(path, f"it cannot be read: {error}", _AGAIN) from None
    kinds = {"policies": list, "tasks": dict, "lengths": list, "samples": int}
    for key, kind in kinds.items():
        if not isinstance(plan, dict) or not isinstance(plan.get(key), kind):
            raise _refused(path, f"it is not a plan of `kvpolicy eval`: no {key}", _AGAIN)
    if not all(isinstance(p, dict) and {"policy", "budget"} <= p.keys() for p in plan["policies"]):
        raise _refused(path, "an entry of its policies has no policy or no budget", _AGAIN)
    return plan


def _lines(path: Path) -> list[dict]:
    """Lines of kept.jsonl; a last line that was cut off is left out."""
    if not path.exists():
        return []
    maps = []
    with path.open(encoding="utf-8") as file:
        lines = file.readlines()
    for number, text in enumerate(lines, 1):
        try:
            entry = json.loads(text)
            layers, heads, tokens = entry["shape"]
            packed = base64.b64decode(entry["bits"], validate=True)
            valid = len(packed) == layers * heads * -(-tokens // 8)
            valid = valid and len(entry["tokens"]) == tokens
        except (ValueError, TypeError, LookupError):
            valid = False
        if valid and _MAP <= entry.keys():
            maps.append(entry)
        elif number < len(lines) or text.endswith("\n"):
            raise _refused(path, f"line {number} is not a map of what was kept", _WITHOUT)
    return maps


def _refused(path: Path, message: str, help_: str | None = None) -> PolicyError:
    return refused(str(path), "report", message, help_)
