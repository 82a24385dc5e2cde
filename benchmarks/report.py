"""Arguments and output that all benchmarks share: command, machine, spread, table."""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvpolicy.evaluation.asking.machine import machine

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
PERFORMANCE = ROOT / "docs" / "performance"


def command() -> str:
    """The command that is running, as it would be typed from the project's folder."""
    script = Path(sys.argv[0]).resolve().relative_to(ROOT)
    return shlex.join(["python", str(script), *sys.argv[1:]])


def spread(values: Sequence[float], digits: int = 2, scale: float = 1) -> str:
    """`median (min-max)` of the values times scale."""
    numbers = [scale * f for f in (statistics.median(values), min(values), max(values))]
    return "{:.{d}f} ({:.{d}f}-{:.{d}f})".format(*numbers, d=digits)


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def publish(name: str, title: str, text: str, data: dict, folder: Path | None) -> None:
    """Print a result; if there is a folder, also write NAME.md and NAME.json there."""
    show(name, title, text, {"command": command(), "machine": machine(), **data}, folder)


def show(name: str, title: str, text: str, data: dict, folder: Path | None) -> None:
    """Print a result; write FOLDER/NAME.md and NAME.json if there is a folder.

    Args:
        data: JSON data of the result, with keys `command` and `machine`.
    """
    head = f"# {title}\n\nCommand: `{data['command']}`  \nMachine: {data['machine']}\n"
    print(f"{head}\n{text}")
    if folder is not None:
        write_json(folder / f"{name}.json", data)
        (folder / f"{name}.md").write_text(f"{head}\n{text}\n", encoding="utf-8")
        print(f"\nwritten to {folder}/{name}.md and .json", file=sys.stderr)


def write_json(path: Path, data: dict) -> None:
    """Write a JSON file and its folder; a reader meanwhile finds the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    new.replace(path)


def arguments(doc: str) -> argparse.ArgumentParser:
    """A parser with the options of all benchmarks that need a model."""
    parser = saving(doc)
    parser.add_argument("--model", default=str(ROOT / "examples" / "model-tiny"))
    parser.add_argument("--seed", type=int, default=0)
    return parser


def saving(doc: str) -> argparse.ArgumentParser:
    """A parser with the options of all benchmarks."""
    parser = argparse.ArgumentParser(description=doc.split("\n\n")[0])
    parser.add_argument(
        "--save", type=Path, nargs="?", const=RESULTS, metavar="FOLDER",
        help="write the results as well, into docs/results/ unless a folder is named",
    )  # fmt: skip
    return parser
