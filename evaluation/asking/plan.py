"""The plan of a run of `kvpolicy eval`, which plan.json holds, and its folder."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvpolicy.dsl.syntax.diagnostics import PolicyError, refused, why
from kvpolicy.evaluation.asking.variants import Variant
from kvpolicy.evaluation.plan_form import plan_problem

# Bytes up to which a file is identified by its content; larger files by size and time.
_SMALL = 64 << 20
# Key of `RunPlan.decides` -> the option that sets it, for messages.
_OPTIONS = {
    "model": "the model",
    "form": "the form of the tasks",
    "tasks": "--tasks",
    "data": "the data of a task",
    "lengths": "--lengths",
    "samples": "--samples",
    "seed": "--seed",
    "policies": "the policies, budgets or settings",
    "server": "the server or --server-args",
}


@dataclass
class RunPlan:
    """The plan of a run.

    Attributes:
        command: the command as it was typed.
        model: folder of the checkpoint, or the model's name at a server.
        form: form of the tasks, one of `catalog.FORMS`.
        lengths: lengths of the prompts in tokens.
        tasks: name -> title.
        seed: seed of the samples.
        samples: number of samples per task and length.
        variants: the policies with settings that are asked, full KV first.
        notes: sentences on what differs from the command.
        server: url, api, version, arguments, L, G, bytes_per_token; None for what is not known.
        machine: description of the machine.
        decides: key of `_OPTIONS` -> the value that decides the answers.
        questions: task -> length -> number of samples, and number of their questions.
        stages: name -> seconds, over all runs that wrote to the folder.
    """

    command: str
    model: str
    form: str
    lengths: list[int]
    tasks: dict[str, str]
    seed: int
    samples: int
    variants: list[Variant]
    notes: list[str]
    server: dict[str, Any]
    machine: str
    decides: dict[str, Any]
    questions: dict[str, dict[int, tuple[int, int]]] = field(default_factory=dict)
    stages: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the seconds that a `with` block takes to a stage."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.stages[name] = self.stages.get(name, 0.0) + time.monotonic() - started

    def as_json(self) -> dict[str, Any]:
        """The content of plan.json."""
        names = ("command", "model", "form", "lengths", "tasks", "seed", "samples")
        return {
            **{name: getattr(self, name) for name in names},
            "policies": _policies(self.variants),
            "questions": self.questions,
            "notes": self.notes,
            "server": self.server,
            "machine": self.machine,
            "stages": {name: round(seconds, 2) for name, seconds in self.stages.items()},
            "decides": self.decides,
        }


def _policies(variants: Sequence[Variant]) -> list[dict[str, Any]]:
    """One entry per policy and budget; values that differ by length name their lengths."""
    groups: dict[tuple, list[Variant]] = {}
    for variant in variants:
        groups.setdefault((variant.policy, variant.budget), []).append(variant)
    entries = []
    for (policy, budget), group in groups.items():
        predicted = {
            n: share for variant in group for n, share in sorted(variant.predicted.items())
        }
        entries.append(
            {
                "policy": policy,
                "budget": budget,
                "setting": _setting(group),
                "about": group[0].about,
                "path": group[0].path,
                "aliases": {variant.alias: list(variant.lengths) for variant in group},
                "predicted": {str(n): round(share, 5) for n, share in predicted.items()},
            }
        )
    return entries


def _setting(group: Sequence[Variant]) -> dict[str, str]:
    """Values by parameter; `60 (512), 121 (1000)` where they differ by length."""
    setting = {}
    for name in dict.fromkeys(name for variant in group for name in variant.setting):
        values = {variant.setting.get(name, "default"): variant.lengths for variant in group}
        if len(values) == 1:
            setting[name] = next(iter(values))
            continue
        pairs = sorted((lengths, value) for value, lengths in values.items())
        setting[name] = ", ".join(
            f"{value} ({', '.join(map(str, lengths))})" for lengths, value in pairs
        )
    return setting


def fingerprint(*paths: Path) -> str:
    """Digest of files by name, size and content; by modification time where they are large."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        facts = path.stat()
        digest.update(f"{path.name} {facts.st_size} ".encode())
        large = facts.st_size > _SMALL
        digest.update(str(facts.st_mtime_ns).encode() if large else path.read_bytes())
    return digest.hexdigest()


class Folder:
    """The folder of --out while a run writes to it; one run at a time.

    Raises:
        PolicyError: the folder cannot be written, another run writes to it, or it holds the
            answers of another plan.
    """

    def __init__(self, path: Path, plan: RunPlan) -> None:
        self.path, self._plan = path, plan
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = (path / ".lock").open("w")
        except OSError as error:
            message = f"this cannot be the folder of a report: {why(error, '')}"
            raise refused(str(path), "file", message) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            message = "another `kvpolicy eval` is writing to this folder now"
            raise refused(
                str(path), "file", message, "wait for it, or take another --out"
            ) from None
        try:
            earlier_plan = self._earlier()
        except PolicyError:
            self.close()
            raise
        for name, seconds in (earlier_plan.get("stages") or {}).items():
            plan.stages[name] = plan.stages.get(name, 0.0) + seconds
        # Only a server that is asked tells it, and perhaps nothing is left to ask.
        if plan.server.get("bytes_per_token") is None:
            known = (earlier_plan.get("server") or {}).get("bytes_per_token")
            plan.server["bytes_per_token"] = known

    def _earlier(self) -> Mapping[str, Any]:
        """The plan in the folder; empty if there is none, or a different one without answers."""
        path = self.path / "plan.json"
        if not path.exists():
            if (self.path / "samples.jsonl").exists():
                message = "there are answers without a plan.json here"
                raise refused(str(self.path), "file", message, "take another --out")
            return {}
        try:
            earlier_plan = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError):
            earlier_plan = None
        decides = earlier_plan.get("decides") if isinstance(earlier_plan, dict) else None
        if not isinstance(decides, dict) or plan_problem(earlier_plan) is not None:
            message = "this is not the plan of a `kvpolicy eval` that can go on"
            raise refused(str(path), "file", message, "take another --out")
        differences = [_OPTIONS[k] for k, v in self._plan.decides.items() if decides.get(k) != v]
        answers = self.path / "samples.jsonl"
        if differences and not (answers.exists() and answers.stat().st_size):
            # Nothing was answered, for example because no server started.
            (self.path / "kept.jsonl").unlink(missing_ok=True)  # of other prompts
            return {}
        if differences:
            verb = "differs" if len(differences) == 1 else "differ"
            message = f"another evaluation is here already: {' and '.join(differences)} {verb}"
            help_ = "take another --out, or delete this folder to begin anew"
            raise refused(str(self.path), "file", message, help_)
        return earlier_plan

    def write(self) -> None:
        """Replaces plan.json atomically."""
        text = json.dumps(self._plan.as_json(), indent=1, ensure_ascii=False)
        new_path = self.path / "plan.json.new"
        new_path.write_text(text + "\n", encoding="utf-8")
        new_path.replace(self.path / "plan.json")

    def close(self) -> None:
        """Releases the lock of the folder."""
        self._lock.close()
