"""What a run of `kvpolicy eval` is to do, as plan.json says it; and its folder."""

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

# Files up to this size are told apart by their content, larger ones by size and time.
_SMALL = 64 << 20
# What decides answers, and the option that says it.
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
class Plan:
    """A run.

    Attributes:
        command: as it was typed.
        model: folder of the checkpoint, or the model's name at a server.
        form: of the tasks, as in the catalog.
        lengths: N of the prompts.
        tasks: titles by name.
        seed, samples: of each task and length.
        variants: what is asked, full KV first.
        notes: what is not as it was asked for.
        server: url, version, L, G, bytes_per_token; what is not known is None.
        machine: on what it runs.
        decides: by keys of _OPTIONS, what decides the answers.
        questions: by task and length, how many samples there are and how many questions they hold.
        stages: seconds by name, of all runs that wrote to the folder.
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
        """Adds the seconds of a `with` block to a stage."""
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
    """One entry per policy and budget; values that differ by length say of which they are."""
    groups: dict[tuple, list[Variant]] = {}
    for variant in variants:
        groups.setdefault((variant.policy, variant.budget), []).append(variant)
    entries = []
    for (policy, budget), group in groups.items():
        predicted = {n: share for each in group for n, share in sorted(each.predicted.items())}
        entries.append(
            {
                "policy": policy,
                "budget": budget,
                "setting": _setting(group),
                "about": group[0].about,
                "path": group[0].path,
                "aliases": {each.alias: list(each.lengths) for each in group},
                "predicted": {str(n): round(share, 5) for n, share in predicted.items()},
            }
        )
    return entries


def _setting(group: Sequence[Variant]) -> dict[str, str]:
    """Values by parameter; `60 (512), 121 (1000)` where they differ by length."""
    found = {}
    for name in dict.fromkeys(name for each in group for name in each.setting):
        values = {each.setting.get(name, "default"): each.lengths for each in group}
        if len(values) == 1:
            found[name] = next(iter(values))
            continue
        pairs = sorted((lengths, value) for value, lengths in values.items())
        found[name] = ", ".join(
            f"{value} ({', '.join(map(str, lengths))})" for lengths, value in pairs
        )
    return found


def fingerprint(*paths: Path) -> str:
    """Digest of files; of large ones without reading them."""
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
        PolicyError: it cannot be written, another run writes to it, or it holds another plan.
    """

    def __init__(self, path: Path, plan: Plan) -> None:
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
            earlier = self._earlier()
        except PolicyError:
            self.close()
            raise
        for name, seconds in earlier.get("stages", {}).items():
            plan.stages[name] = plan.stages.get(name, 0.0) + seconds

    def _earlier(self) -> Mapping[str, Any]:
        """The plan that is there already; empty if none is."""
        path = self.path / "plan.json"
        if not path.exists():
            if (self.path / "samples.jsonl").exists():
                message = "there are answers without a plan.json here"
                raise refused(str(self.path), "file", message, "take another --out")
            return {}
        try:
            earlier = json.loads(path.read_text(encoding="utf-8"))
            there = earlier["decides"]
        except (OSError, ValueError, KeyError, TypeError):
            message = "this is not the plan of a `kvpolicy eval` that can go on"
            raise refused(str(path), "file", message, "take another --out") from None
        different = [_OPTIONS[k] for k, v in self._plan.decides.items() if there.get(k) != v]
        answers = self.path / "samples.jsonl"
        if different and not (answers.exists() and answers.stat().st_size):
            return {}  # nothing was answered, perhaps because a server did not start
        if different:
            verb = "differs" if len(different) == 1 else "differ"
            message = f"another evaluation is here already: {' and '.join(different)} {verb}"
            help_ = "take another --out, or delete this folder to begin anew"
            raise refused(str(self.path), "file", message, help_)
        return earlier

    def write(self) -> None:
        """Writes plan.json; a run that ends while it is written leaves the earlier one."""
        text = json.dumps(self._plan.as_json(), indent=1, ensure_ascii=False)
        new = self.path / "plan.json.new"
        new.write_text(text + "\n", encoding="utf-8")
        new.replace(self.path / "plan.json")

    def close(self) -> None:
        """Lets another run write."""
        self._lock.close()
