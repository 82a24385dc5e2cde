"""Random policy files against the check, `fmt`, and every execution of what is accepted.

    .venv/bin/python -P tests/fuzz/fuzz.py --texts 500000 --executed 50000 --seed 1 --processes 2

Text number i of a seed is always the same. A stopped run is continued. Failures are written to
OUT/failures, shortened, and the exit code is 1. `--again OUT/failures/*.yaml` runs those texts once
more, as after a repair.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import platform
import re
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import torch

# For helpers that compare executions.
sys.path += [
    str(Path(__file__).parents[1] / x) for x in ("", "forks", "fuzz", "executions", "sglang_ext")
]
# Read when kernels are declared.
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

import every_execution
import judge
import mutants
import quicker
import shrink
from tqdm import tqdm

ROOT = Path(__file__).parents[2]
BLOCK = 250  # texts in one task of a process
# Texts of each kind among 20.
MIX = {"characters": 8, "words": 6, "expressions": 2, "sections": 1, "made": 3}
CYCLE = [kind for kind, number in MIX.items() for _ in range(number)]
# Share of accepted texts that is executed, else 1: many changed texts mean the same policy.
EXECUTED = {"characters": 0.1, "words": 0.5}
COLUMNS = ("refused", "accepted", "agreed", "unstable", "not bound", "unserved", "failed")
GROWTH = 512 << 10  # KiB by which a process may grow after its first blocks


@dataclass
class Block:
    """Results of BLOCK texts.

    Attributes:
        counts: kind of text -> outcome -> number of texts.
        failures: name and kind of the text, error, shortened text.
        memory: the most KiB that the process has used.
    """

    number: int
    process: int = 0
    memory: int = 0
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    failures: list[dict] = field(default_factory=list)


def text_of(seed: str, number: int) -> tuple[str, str]:
    """Kind and content of the text with a number."""
    kind = CYCLE[number % len(CYCLE)]
    return kind, mutants.KINDS[kind](Random(f"{seed}:{number}"))


def outcome(text: str, kind: str, seed: str) -> str:
    """Outcome of one text, a name in COLUMNS.

    Raises:
        Exception: any failure.
    """
    checked = judge.judged(text)
    if checked.program is None:
        return "refused"
    if Random(f"{seed}:executed").random() >= EXECUTED.get(kind, 1):
        return "accepted"
    return {"refused": "not bound"}.get(found := every_execution.executed(checked, seed), found)


def signature(error: Exception) -> str:
    """Kind of a failure: the error and the place that raised it, or the violated property."""
    if isinstance(error, judge.Wrong):
        text = re.sub(r"Case\(.*?\): ", "", str(error), flags=re.S)
        return re.sub(r"[\d.]+|`[^`]*`|'[^']*'", "", text)[:40]
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {Path(place.filename).name}, {place.name}"


def run_block(seed: str, number: int, size: int = BLOCK) -> Block:
    """Tries the texts of a block one after the other."""
    torch.set_num_threads(1)
    gc.set_threshold(50_000)  # texts leave many small objects and few cycles
    block = Block(number)
    for place in range(number * size, (number + 1) * size):
        kind, text = text_of(seed, place)
        counts = block.counts.setdefault(kind, {})
        name = f"{seed}:{place}"
        try:
            found = outcome(text, kind, name)
        except Exception as error:
            found = "failed"
            block.failures.append(_failure(error, text, kind, name))
        counts[found] = counts.get(found, 0) + 1
    usage = resource.getrusage(resource.RUSAGE_SELF)
    block.process, block.memory = os.getpid(), usage.ru_maxrss
    return block


def _failure(error: Exception, text: str, kind: str, name: str) -> dict:
    wanted = signature(error)

    def wrong(other: str) -> bool:
        try:
            outcome(other, kind, name)
        except Exception as found:
            return signature(found) == wanted
        return False

    quick = isinstance(error, judge.TooLong)
    short = text if quick else shrink.shrunk(text, wrong)
    return {"name": name, "kind": kind, "error": f"{wanted}: {error}"[:2000], "text": short}


# The whole run.


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; 0 if nothing was found."""
    args = _parser().parse_args(arguments)
    if args.again:
        return int(sum(_wrong_again(Path(each)) for each in args.again) > 0)
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    state = folder / f"{args.seed}.jsonl"
    head = {"seed": args.seed, "code": _digest()}
    blocks, seconds = _read(state, head)
    total = _Total(args, state, blocks, seconds)
    for block in _blocks(args, total):
        total.add(block)
    total.bar.close()
    print("\n".join(total.table()))
    if args.report:
        Path(args.report).write_text("\n".join(total.report()) + "\n")
    for path in sorted((folder / "failures").glob(f"{args.seed}-*.yaml")):
        print(path)
    return int(total.count("failed") > 0 or bool(total.grown))


def _wrong_again(path: Path) -> bool:
    """Tries a failed text again and prints the outcome; returns whether it still fails."""
    text = path.read_text(encoding="utf-8")
    kind, name = text.removeprefix("# ").split(maxsplit=2)[:2]
    torch.set_num_threads(1)
    try:
        found = outcome(text_of(*_place(name))[1], kind, name)
    except Exception as error:
        print(f"{path}: {signature(error)}: {error}")
        return True
    print(f"{path}: {found}")
    return False


def _place(name: str) -> tuple[str, int]:
    seed, _, number = name.rpartition(":")
    return seed, int(number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--texts", type=int, default=5_000, help="at least so many; default 5000")
    parser.add_argument("--executed", type=int, default=500, help="of these executed, at least")
    parser.add_argument("--seed", default="1", help="of all texts; default 1")
    parser.add_argument("--processes", type=int, default=1, help="one per core is best; default 1")
    parser.add_argument("--out", default=str(ROOT / ".cache" / "fuzz"), help="default .cache/fuzz")
    parser.add_argument("--report", help="write the table to a file, as Markdown")
    parser.add_argument("--again", nargs="+", metavar="FILE", help="only these failures once more")
    return parser


def _digest() -> str:
    """Digest of the code under test; counts of different code are not added up."""
    folders = (ROOT / x for x in ("dsl", "kernels", "tests/executions", "tests/fuzz"))
    paths = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:16]


def _read(state: Path, head: dict) -> tuple[list[Block], float]:
    """Blocks that are done already, and the seconds they took."""
    if not state.exists():
        state.write_text(json.dumps(head) + "\n")
        return [], 0.0
    first, *rest = state.read_text().splitlines()
    if json.loads(first) != head:
        sys.exit(f"{state} is of another run or of other code; remove it, or take another --seed")
    lines = [json.loads(line) for line in rest]
    return [Block(**line["block"]) for line in lines], sum(line["seconds"] for line in lines)


def _blocks(args: argparse.Namespace, total: _Total) -> Iterator[Block]:
    """Runs blocks that are not done yet, until there are enough."""
    numbers = (number for number in range(1 << 40) if number not in total.done)
    if args.processes == 1:
        while not total.enough():
            yield run_block(args.seed, next(numbers))
        return
    with ProcessPoolExecutor(args.processes) as pool:
        waiting: set = set()
        while not total.enough():
            while len(waiting) < 2 * args.processes:
                waiting.add(pool.submit(run_block, args.seed, next(numbers)))
            ready, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for each in ready:
                yield each.result()
        for each in waiting:
            each.cancel()


class _Total:
    """Sums over all blocks so far; each block is saved when it is added."""

    def __init__(
        self, args: argparse.Namespace, state: Path, blocks: list[Block], seconds: float
    ) -> None:
        self.args, self.state, self.seconds = args, state, seconds
        self.counts: Counter = Counter()
        self.done = {block.number for block in blocks}
        self.memory: dict[int, list[int]] = {}
        self.grown: set[int] = set()
        self._last = time.monotonic()
        for block in blocks:
            self._sum(block)
        self.bar = tqdm(
            total=max(args.texts, self.count()), initial=self.count(), unit="text", smoothing=0.05,
        )  # fmt: skip

    def count(self, *outcomes: str) -> int:
        """Number of texts with one of these outcomes; of all texts without arguments."""
        return sum(n for (_, name), n in self.counts.items() if not outcomes or name in outcomes)

    @property
    def executed(self) -> int:
        """Number of policies that every execution has run."""
        return self.count("agreed", "unstable")

    def enough(self) -> bool:
        """Whether enough texts are tried and executed."""
        return self.count() >= self.args.texts and self.executed >= self.args.executed

    def _sum(self, block: Block) -> None:
        for kind, counts in block.counts.items():
            for name, number in counts.items():
                self.counts[kind, name] += number

    def add(self, block: Block) -> None:
        """Saves and counts one more block and writes its failures."""
        now = time.monotonic()
        line = {"block": block.__dict__, "seconds": now - self._last}
        with self.state.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.seconds, self._last = self.seconds + now - self._last, now
        self.done.add(block.number)
        self._sum(block)
        own = self.memory.setdefault(block.process, [])
        own.append(block.memory)
        if len(own) > 4 and own[-1] - own[3] > GROWTH:
            self.grown.add(block.process)
        for failure in block.failures:
            self._write(failure)
        self.bar.set_postfix(executed=self.executed, failed=self.count("failed"))
        self.bar.update(sum(n for counts in block.counts.values() for n in counts.values()))

    def _write(self, failure: dict) -> None:
        folder = self.state.parent / "failures"
        folder.mkdir(exist_ok=True)
        lines = [f"{failure['kind']} {failure['name']}", failure["error"]]
        source = shrink.headed(failure["text"], lines)
        name = failure["name"].replace(":", "-")
        (folder / f"{name}.yaml").write_text(source.text, encoding="utf-8", errors="replace")

    def table(self) -> Iterator[str]:
        """The counts by kind of text, as Markdown."""
        yield f"| text | made | {' | '.join(COLUMNS)} |"
        yield "|" + " --- |" * (2 + len(COLUMNS))
        for kind in [*MIX, "all"]:
            kinds = list(MIX) if kind == "all" else [kind]
            own = {name: sum(self.counts[each, name] for each in kinds) for name in COLUMNS}
            numbers = [f"{own[name]:,}" for name in COLUMNS]
            yield f"| {kind} | {sum(own.values()):,} | {' | '.join(numbers)} |"

    def report(self) -> Iterator[str]:
        """The run as a document."""
        words = " ".join(["python tests/fuzz/fuzz.py", *_words(self.args)])
        python = platform.python_version()
        yield f"Command: `{words}`  "
        yield f"Machine: {platform.machine()}, Python {python}, torch {torch.__version__}  "
        yield f"Time: {self.seconds / 3600:.1f} hours"
        yield ""
        yield from self.table()


def _words(args: argparse.Namespace) -> list[str]:
    names = ("texts", "executed", "seed", "processes")
    return [f"--{name} {getattr(args, name)}" for name in names]


if __name__ == "__main__":
    quicker.kernels()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the processes end too
    sys.exit(main())
