"""The kernels at the sizes of Llama 3.1 8B on a GPU: share of a copy's bandwidth, others beside.

    python benchmarks/kernels.py                    every figure, within --seconds
    python benchmarks/kernels.py --topics scoring --lengths 32768
    python benchmarks/kernels.py --toy              small sizes in Triton's interpreter, on a CPU
    python benchmarks/kernels.py --topics tuning --write    the fastest knobs, for this kind of GPU
    python benchmarks/kernels.py --list             what would run, in this order
    python benchmarks/kernels.py --draw FILE.json   the picture of an earlier run once more

Every case is checked before it is timed. On a GPU the results of all cases go to docs/performance/;
those of a part, or of a run without a GPU, are printed, and written where --out says.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from dataclasses import asdict
from pathlib import Path

import checkout  # noqa: F401
import torch

# isort: split
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is declared

import pictures
import report
from cases import (
    attention,
    folds,
    following,
    memory,
    merging,
    scoring,
    spread,
    summary,
    tuned_file,
    tuning,
)
from cases.case import Bench, Case, Model, Planned
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.kernels.launch import tuned
from timing import Clock, Times
from tqdm import tqdm

# A real dependency of SGLang is called `kernels`, as this file is.
sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]

TOPICS = ("scoring", "attention", "memory", "merging", "folds")
# Options that, unless default, make a run cover a part of the cases or another model.
PARTS = ("cases", "lengths", "batches", "heads", "dtype")
DTYPES = ("bfloat16", "float16", "float32")
PACKAGES = ("torch", "triton", "sglang", "flashinfer-python", "sglang-kernel", "flash-attn-3")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--toy", action="store_true", help="small sizes, also without a GPU")
    parser.add_argument(
        "--topics", default=",".join(TOPICS), help="also: tuning, the kernels' knobs"
    )
    parser.add_argument("--cases", help="only these, as --list has them; a `;` between two")
    parser.add_argument("--lengths", help="tokens; default 4096 to 131072, each twice the last")
    parser.add_argument("--batches", help="requests decoded together; default 1,4,16,64")
    parser.add_argument("--kept", type=float, default=0.125, help="share, for decode attention")
    parser.add_argument("--entries", type=int, default=2048, help="kept, for the other kernels")
    parser.add_argument("--window", type=int, default=32, help="queries of the scoring window")
    parser.add_argument("--layers", type=int, default=32, help="of the model, not of the sizes")
    parser.add_argument("--seconds", type=float, default=480, help="limit for the whole run")
    parser.add_argument("--case-seconds", type=float, default=0.6, help="rounds of one case")
    parser.add_argument("--heads", default="32,8,128", help="query heads, KV heads, head size")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of keys and values")
    parser.add_argument("--out", type=Path, help="folder for kernels.json, .md and .png")
    parser.add_argument(
        "--write", type=Path, nargs="?", const=tuned.SHIPPED, metavar="FOLDER",
        help="with --topics tuning: write what is fastest where servers on such a GPU find it, or "
        "into a folder",
    )  # fmt: skip
    parser.add_argument("--draw", type=Path, metavar="JSON", help="only the picture, beside it")
    parser.add_argument("--check", action="store_true", help="hold cases to references, no times")
    parser.add_argument("--list", action="store_true", help="the cases in their order, no more")
    options = parser.parse_args()
    _checked(parser, options)
    return options


def _checked(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse options that contradict each other; set `out`, the folder of results, and `name`."""
    gpu = torch.cuda.is_available()
    if not gpu and not (options.toy or options.draw or options.list):
        parser.error("there is no GPU; --toy runs small sizes without one")
    # A part of the cases must not replace the figures of all of them.
    whole = all(getattr(options, x) == parser.get_default(x) for x in PARTS)
    whole &= set(options.topics.split(",")) in ({*TOPICS}, {"tuning"})
    if gpu and whole and options.out is None and not options.toy:
        options.out = report.PERFORMANCE
    options.name = "tuning" if options.topics == "tuning" else "kernels"
    toy = options.toy or not gpu
    if toy and options.out and options.out.resolve() == report.PERFORMANCE:
        parser.error("docs/performance/ holds figures of a GPU at full size, not of --toy")
    if options.write and options.topics != "tuning":
        parser.error("--write: only --topics tuning has anything to write there")
    if toy and options.write and options.write.resolve() == tuned.SHIPPED.resolve():
        parser.error(f"--write: {tuned.SHIPPED} is for GPUs; --toy needs a folder of its own")
    sizes = options.heads.split(",")
    if len(sizes) != 3 or not all(size.isdigit() and int(size) for size in sizes):
        parser.error(f"--heads: expected three numbers such as 32,8,128, got {options.heads}")
    if int(sizes[0]) % int(sizes[1]):
        parser.error(f"--heads: {sizes[1]} KV heads do not divide {sizes[0]} query heads")
    known = (*TOPICS, "tuning")
    unknown = set(options.topics.split(",")) - set(known)
    if unknown:
        parser.error(f"--topics: there is {', '.join(known)}, not {', '.join(sorted(unknown))}")


def model_of(options: argparse.Namespace) -> Model:
    """Llama 3.1 8B, or a small model of the same kind."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.toy:
        options.window, options.entries = min(options.window, 8), min(options.entries, 24)
        return Model(ModelShape(2, 4, 2, 32), device, torch.float32, 64, 128)
    shape = ModelShape(options.layers, *(int(size) for size in options.heads.split(",")))
    return Model(shape, device, getattr(torch, options.dtype), 4096, 14336)


def plan(options: argparse.Namespace) -> list[Planned]:
    """The cases by rank: those with targets first."""
    default = ("96", "2") if options.toy else ("4096,8192,16384,32768,65536,131072", "1,4,16,64")
    lengths = [int(n) for n in (options.lengths or default[0]).split(",")]
    batches = [int(n) for n in (options.batches or default[1]).split(",")]
    made = {
        "scoring": lambda: [
            *scoring.planned(lengths, options.window),
            *spread.planned(lengths),
            *following.planned(lengths),
        ],
        "attention": lambda: attention.planned(lengths, batches, options.kept),
        "memory": lambda: memory.planned(lengths, options.entries),
        "merging": lambda: merging.planned(lengths, options.entries),
        "folds": lambda: folds.planned(options.entries, batches),
        "tuning": lambda: tuning.planned(options.entries, options.window, options.toy),
    }
    chosen = [case for topic in options.topics.split(",") for case in made[topic]()]
    if options.cases:
        asked = options.cases.split(";")
        if missing := set(asked) - {case.label for case in chosen}:
            raise SystemExit(f"kernels: --list has no case {', '.join(sorted(missing))}")
        chosen = [case for case in chosen if case.label in asked]
    return sorted(chosen, key=lambda case: case.rank)


def measured(case: Case, bench: Bench) -> dict:
    """Facts of one case, checked and then timed."""
    checked = case.check()
    times = bench.clock.times(case.calls, case.waits)
    first = next(iter(case.calls))
    facts = {
        "topic": case.topic,
        "case": case.name,
        "tokens": case.tokens,
        "batch": case.batch,
        "layers": case.layers,
        "checked": checked,
        "counted_bytes": case.counted,
        "note": case.note,
        "calls": {name: each.facts() for name, each in times.items()},
        "targets": [target.facts(times) for target in case.targets],
        "tuning": asdict(case.tuning) if case.tuning else None,
    }
    for name, each in times.items():
        facts["calls"][name].update(_shares(case, each, bench))
        facts["calls"][name]["ratio"] = _median(each) / _median(times[first])
    return facts


def _median(times: Times) -> float:
    return statistics.median(times.kernels)


def _shares(case: Case, times: Times, bench: Bench) -> dict[str, float]:
    made = {}
    if case.counted is not None:
        made["share_of_copy"] = bench.share_of_copy(case.counted, times)
    if case.prefill:
        made["share_of_prefill"] = bench.share_of_prefill(case, times)
        made["share_of_prefill_kernels"] = bench.share_of_prefill(case, times, called=False)
    return made


def run(options: argparse.Namespace) -> dict:
    """Check and time every planned case for which there is time; return all facts."""
    started = time.monotonic()
    model = model_of(options)
    torch.manual_seed(0)
    clock = Clock(model.device, 0 if options.toy else options.case_seconds)
    bandwidth = clock.copy_bandwidth(1 << 20 if options.toy else 4 << 30)
    bench = Bench(model, clock, bandwidth)
    facts = {
        "command": report.command(),
        "machine": report.machine(*PACKAGES),
        "kernels": tuned.load(model.device).summary,
        "model": {**asdict(model.shape), "dtype": str(model.dtype).removeprefix("torch.")},
        "copy": bandwidth,
        "cases": [],
        "failed": [],
        "left_out": [],
    }
    waiting = plan(options)
    for planned in (bar := tqdm(waiting, desc="cases", mininterval=1)):
        bar.set_postfix_str(planned.label)
        if time.monotonic() - started > options.seconds:
            facts["left_out"].append(planned.label)
            continue
        try:
            if planned.as_chosen:
                tuned_file.use(facts, model.device)
            facts["cases"].append(measured(planned.build(bench), bench))
        except Exception as error:  # one kernel that fails must not hide the others' figures
            traceback.print_exc()
            facts["failed"].append({"case": planned.label, "error": _first_line(error)})
        facts["prefill_seconds"] = {n: bench.prefill(n) for n in sorted(bench.prefills)}
        _release(model.device)
        if options.out:
            report.write_json(options.out / f"{options.name}.json", facts)
    facts["seconds"] = time.monotonic() - started
    return facts


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}"


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def main() -> None:
    options = parse()
    if options.draw:
        facts = json.loads(options.draw.read_text(encoding="utf-8"))
        pictures.kernels(facts, options.draw.with_suffix(".png"))
        return
    if options.list:
        print("\n".join(planned.label for planned in plan(options)))
        return
    if options.check:
        check(options)
        return
    try:
        path = written_to(options)
        facts = tune(options) if "tuning" in options.topics.split(",") else run(options)
    except tuned.TunedError as error:
        raise SystemExit(f"kernels: {error}") from None
    report.show(options.name, options.name.capitalize(), summary.text(facts), facts, options.out)
    if options.out and options.name == "kernels":
        pictures.kernels(facts, options.out / "kernels.png")
    if path:
        choices = tuned_file.write(facts, tuned.device_name(model_of(options).device), path)
        print(f"\n## Chosen\n\n{tuned_file.text(choices)}\n\nwritten to {path}")
    if facts["failed"]:
        raise SystemExit(f"kernels: {len(facts['failed'])} cases failed")


def check(options: argparse.Namespace) -> None:
    """Compare every planned case with its reference; the first failure is raised."""
    model = model_of(options)
    bench = Bench(model, Clock(model.device, 0), {})
    for planned in plan(options):
        print(f"{planned.label}: {planned.build(bench).check()}", flush=True)


def written_to(options: argparse.Namespace) -> Path | None:
    """The file of measured choices that `--write` asks for.

    Raises:
        TunedError: it exists and cannot be read; this is raised before anything is measured.
    """
    if options.write is None:
        return None
    name = tuned.device_name(model_of(options).device)
    path = tuned.path_of(name, options.write)
    if path.exists():
        tuned.read(path, name)
    return path


def tune(options: argparse.Namespace) -> dict:
    """`run` without earlier choices, so that variants are compared with the wrappers' own values.

    Choices that later cases take are written to a folder of this run alone.
    """
    with tempfile.TemporaryDirectory() as empty:
        os.environ[tuned.FOLDER_VARIABLE] = empty
        return run(options)


if __name__ == "__main__":
    main()
