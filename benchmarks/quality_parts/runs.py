"""Runs of `kvpolicy eval` that together form one evaluation, some of them at a time."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from kvpolicy.dsl.syntax.library import POLICIES
from kvpolicy.evaluation import records
from kvpolicy.evaluation.records import FULL
from shipped import settings
from tqdm import tqdm

from quality_parts.orderings import LOOSER, WIDE, early

EVAL = (sys.executable, "-P", "-m", "kvpolicy.evaluation.cli", "eval")


class RunFailed(Exception):
    """A run of `kvpolicy eval` failed; the message has its last lines."""


@dataclass(frozen=True)
class Run:
    """One `kvpolicy eval`.

    Attributes:
        folder: value of --out.
        policies: names, or paths of files.
        tasks, budgets, samples, length, seed, model, at_once: values of its options.
        turns: number of questions in a sample.
    """

    folder: Path
    policies: tuple[str, ...]
    tasks: tuple[str, ...]
    budgets: tuple[float, ...]
    samples: int
    length: int
    seed: int
    model: str
    at_once: int
    turns: int = 1

    @property
    def words(self) -> list[str]:
        """The command's words after `kvpolicy eval`."""
        options: dict[str, Sequence[object]] = {
            "--policy": self.policies,
            "--budget": [f"{budget:g}" for budget in self.budgets],
            "--set": [each for policy in self.policies for each in fixed(policy)],
        }
        words = [word for name, values in options.items() for v in values for word in (name, v)]
        return [
            *map(str, words),
            *("--tasks", ",".join(self.tasks), "--lengths", f"{self.length}"),
            *("--samples", f"{self.samples}", "--seed", f"{self.seed}"),
            *("--concurrency", f"{self.at_once}", "--model", self.model),
            *(() if FULL in self.policies else ("--no-full",)),
            *("--out", str(self.folder)),
        ]

    @property
    def questions(self) -> int:
        """The most questions that the run asks: every policy at every budget."""
        series = sum(1 if policy == FULL else len(self.budgets) for policy in self.policies)
        return series * len(self.tasks) * self.samples * self.turns


def fixed(policy: str) -> list[str]:
    """Settings of a policy that depend neither on share nor length, as values of --set."""
    name = Path(policy).stem
    of = "asl" if name in (WIDE, LOOSER) else name
    one, other = (settings(*sizes).get(of, []) for sizes in ((0.5, 512), (0.25, 1000)))
    return [f"{name}.{each}" for each in one if each in other]


def variants(layers: Sequence[int], tau: float, kernel: int, folder: Path) -> list[str]:
    """Writes FastKV with a given layer after which tokens leave, and ASL to compare it with.

    FastKV has two shares: 20 % of the tokens go deeper at any budget. Here both shares are equal,
    as in ASL, so that only the layer differs. ASL comes with its own threshold and a higher one:
    its own was found for models of 32 layers and more, and in a small model the ranking may never
    settle so well. All pool over `kernel` tokens: a width below a key-value pair's length keeps no
    whole pair, and would show nothing.

    Returns:
        Paths of the files.
    """
    fastkv, asl = ((POLICIES / f"{name}.yaml").read_text("utf-8") for name in ("fastkv", "asl"))
    shares = ("tsp_rate:\n    default: 0.2", "tsp_rate:\n    default: kv_rate")
    pooled = ("kernel: {default: 7,", f"kernel: {{default: {kernel},")
    made = {}
    for layer in layers:
        name = early(layer)
        after = ('{default: "max(0, layers // 2 - 1)"', f"{{default: {layer}")
        made[name] = _changed(fastkv, ("policy: fastkv", f"policy: {name}"), shares, pooled, after)
    made[WIDE] = _changed(asl, ("policy: asl", f"policy: {WIDE}"), pooled)
    looser = ("tau: {default: 0.3,", f"tau: {{default: {tau:g},")
    made[LOOSER] = _changed(asl, ("policy: asl", f"policy: {LOOSER}"), pooled, looser)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.yaml" for name in made]
    for path, text in zip(paths, made.values(), strict=True):
        path.write_text(text, encoding="utf-8")
    return [str(path) for path in paths]


def _changed(text: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        if text.count(old) != 1:
            raise RunFailed(
                f"the policy's file has no single {old!r}: no variant can be made of it"
            )
        text = text.replace(old, new)
    return text


def split(policies: Sequence[str], parts: int) -> list[tuple[str, ...]]:
    """Policies dealt out to at most `parts` runs; full KV, which comes first, is in the first."""
    return [tuple(policies[part::parts]) for part in range(min(parts, len(policies)))]


def carry_out(runs: Sequence[Run], servers: int) -> float:
    """Carries out all runs, `servers` at a time; returns the seconds they took.

    A run that was begun earlier is continued.

    Raises:
        RunFailed: one of them failed; the others are stopped.
    """
    started = time.monotonic()
    processes: list[subprocess.Popen] = []
    with (
        ThreadPoolExecutor(servers) as pool,
        tqdm(desc="questions", unit="question", smoothing=0.02, total=1) as bar,
        _stopped_at_the_end(processes),
    ):
        left: set[Future] = {pool.submit(_carry_out, run, processes) for run in runs}
        try:
            while left:
                done, left = wait(left, timeout=1, return_when=FIRST_COMPLETED)
                bar.total = sum(map(_planned, runs))
                bar.update(sum(map(answered_of, runs)) - bar.n)
                for each in done:
                    each.result()
        finally:
            for each in left:
                each.cancel()
    return time.monotonic() - started


def _carry_out(run: Run, processes: list[subprocess.Popen]) -> None:
    run.folder.mkdir(parents=True, exist_ok=True)
    log = run.folder / "log.txt"
    with log.open("a") as output:
        process = subprocess.Popen([*EVAL, *run.words], stdout=output, stderr=subprocess.STDOUT)
        processes.append(process)
        status = process.wait()
    if status:
        last = log.read_text(errors="replace").replace("\r", "\n").splitlines()[-12:]
        raise RunFailed("\n".join([f"kvpolicy eval failed with status {status} ({log}):", *last]))


@contextlib.contextmanager
def _stopped_at_the_end(processes: list[subprocess.Popen]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()


def _planned(run: Run) -> int:
    """Number of questions of a run; its plan, once written, knows policies without a budget."""
    if not (run.folder / "plan.json").exists():
        return run.questions
    return len(_plan(run)["policies"]) * len(run.tasks) * run.samples * run.turns


def answered_of(run: Run) -> int:
    """Number of questions of a run that have an answer."""
    path = run.folder / "samples.jsonl"
    if not path.exists():
        return 0
    with path.open("rb") as lines:
        return sum(1 for _ in lines)


def stages_of(run: Run) -> dict[str, float]:
    """Seconds by stage of an ended run; the questions of all policies are one stage."""
    found: dict[str, float] = {}
    for stage, spent in _plan(run)["stages"].items():
        name = "questions" if stage.startswith("questions ") else stage
        found[name] = found.get(name, 0.0) + spent
    return found


def _plan(run: Run) -> dict:
    return json.loads((run.folder / "plan.json").read_text(encoding="utf-8"))


def merge(runs: Sequence[Run], folder: Path, command: str) -> None:
    """Merges plan.json and the .jsonl files of all runs into one folder."""
    plans = [_plan(run) for run in runs]
    stages = {
        (stage if len(runs) == 1 else f"{stage} (run {number})"): seconds
        for number, run in enumerate(runs, 1)
        for stage, seconds in stages_of(run).items()
    }
    order = {
        Path(policy).stem: (place, number)
        for number, run in enumerate(runs)
        for place, policy in enumerate(run.policies)
    }
    policies = [entry for plan in plans for entry in plan["policies"]]
    policies.sort(key=lambda entry: order[entry["policy"]])
    plan = {**plans[0], "command": command, "policies": policies, "stages": stages}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(plan, indent=1) + "\n", encoding="utf-8")
    with (folder / "samples.jsonl").open("w", encoding="utf-8") as out:
        for run in runs:
            out.writelines(map(records.line, records.read(run.folder / "samples.jsonl")))
    for name in ("kept.jsonl", "errors.jsonl"):
        texts = [p.read_text(encoding="utf-8") for run in runs if (p := run.folder / name).exists()]
        if any(texts):
            (folder / name).write_text("".join(texts), encoding="utf-8")
