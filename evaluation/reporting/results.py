"""Reads a folder of `kvpolicy eval` for a report."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kvpolicy.dsl.syntax.diagnostics import PolicyError, refused, why
from kvpolicy.evaluation import records
from kvpolicy.evaluation.plan_form import plan_problem
from kvpolicy.evaluation.records import FULL, Record

Series = tuple[str, float | None]
"""A policy and the share that was asked of it."""

_PLACE = ("policy", "budget", "task", "length")
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
    except OSError as error:
        raise _refused(path, why(error, "it cannot be read")) from None
    except ValueError as error:
        raise _refused(path, str(error)) from None
    planned = _planned(plan)
    strangers = {(r.policy, r.budget, r.task, r.length) for r in answers.values()} - planned
    if strangers:
        policy, budget, task, length = min(strangers, key=str)
        message = f"plan.json knows nothing of policy {policy}, budget {budget}, {task} at {length}"
        raise _refused(path, message)
    if not answers:
        raise _refused(
            path, "no question has been answered yet", "run the same `kvpolicy eval` again"
        )
    maps = [m for m in _maps(folder / "kept.jsonl") if tuple(m[key] for key in _PLACE) in planned]
    return Results(plan, tuple(answers.values()), tuple(maps))


def _planned(plan: dict) -> set[tuple]:
    """The policies, budgets, tasks and lengths of a plan; `_PLACE` names them."""
    return {
        (entry["policy"], entry["budget"], task, length)
        for entry in plan["policies"]
        for task in plan["tasks"]
        for length in plan["lengths"]
    }


def _plan(folder: Path) -> dict:
    path = folder / "plan.json"
    try:
        plan = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise _refused(folder, "there is no plan.json here", _AGAIN) from None
    except OSError as error:
        raise _refused(path, why(error, "it cannot be read"), _AGAIN) from None
    except (ValueError, RecursionError) as error:
        raise _refused(path, f"it cannot be read: {error}", _AGAIN) from None
    problem = plan_problem(plan)
    if problem is not None:
        raise _refused(path, f"it is not a plan of `kvpolicy eval`: {problem}", _AGAIN)
    return plan


def _maps(path: Path) -> list[dict]:
    """The lines of kept.jsonl, of which an earlier run may have left some."""
    try:
        return list(records.read_maps(path))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _refused(path, why(error, "it cannot be read"), _WITHOUT) from None
    except ValueError as error:
        raise _refused(path, str(error), _WITHOUT) from None


def _refused(path: Path, message: str, help_: str | None = None) -> PolicyError:
    return refused(str(path), "report", message, help_)
