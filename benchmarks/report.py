"""What every benchmark prints and commits: command, machine, spread, table."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"


def command() -> str:
    """The command that is running, as it would be typed from the project's folder."""
    script = Path(sys.argv[0]).resolve().relative_to(ROOT)
    return shlex.join(["python", str(script), *sys.argv[1:]])


def machine() -> str:
    """Processor, cores, memory and the versions that matter."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = ", ".join(f"{p} {importlib.metadata.version(p)}" for p in ("sglang", "torch"))
    return (
        f"{_processor()}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB, "
        f"Python {platform.python_version()}, {versions}"
    )


def _processor() -> str:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def spread(values: Sequence[float], digits: int = 2, scale: float = 1) -> str:
    """`median (min-max)` of the values times scale."""
    numbers = [scale * f for f in (statistics.median(values), min(values), max(values))]
    return "{:.{d}f} ({:.{d}f}-{:.{d}f})".format(*numbers, d=digits)


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def publish(name: str, title: str, text: str, data: dict, save: bool) -> None:
    """Print a result; with `save`, also write docs/results/NAME.md and NAME.json."""
    head = f"# {title}\n\nCommand: `{command()}`  \nMachine: {machine()}\n"
    print(f"{head}\n{text}")
    if save:
        RESULTS.mkdir(parents=True, exist_ok=True)
        (RESULTS / f"{name}.md").write_text(f"{head}\n{text}\n", encoding="utf-8")
        data = {"command": command(), "machine": machine(), **data}
        (RESULTS / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        print(f"\nwritten to docs/results/{name}.md and .json", file=sys.stderr)


def arguments(doc: str) -> argparse.ArgumentParser:
    """A parser with what all benchmarks share."""
    parser = argparse.ArgumentParser(description=doc.split("\n\n")[0])
    parser.add_argument("--model", default=str(ROOT / "examples" / "model-tiny"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true", help="write docs/results/ as well")
    return parser
