"""Kernels compiled for GPUs that are not there: registers, shared memory, spills, and seconds.

    python benchmarks/compiled_kernels.py --save
    python benchmarks/compiled_kernels.py --targets 90 --heads 128 --groups 4 --policies snapkv

Of each GPU and shape of heads all kernels are compiled that a server compiles before it is ready,
by the same code: the attention of decode steps, and of each policy what prefills, copies and folds
launch. What lies in Triton's cache is taken from there; `--fresh` compiles all of it anew. A run
that is saved keeps what earlier runs of the same Triton have found of other shapes and policies.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import report
import torch
import triton
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.kernels.launch.occupancy import Processor
from kvpolicy.sglang_ext.forward.warm import warm, warm_attention
from tqdm import tqdm

for folder in ("", "kernels", "sglang_ext"):
    sys.path.insert(0, str(report.ROOT / "tests" / folder))
from on_device import KEPT, made_up, served, services  # noqa: E402
from sm90 import Compiled, compiling, on_device  # noqa: E402

ATTENTION, RUNNING, MQA = "attention", 200, 32
PROCESSORS = {
    80: Processor(1 << 16, 164 << 10, warps=64, programs=32),
    89: Processor(1 << 16, 100 << 10, warps=48, programs=24),
    90: Processor(1 << 16, 228 << 10, warps=64, programs=32),
    100: Processor(1 << 16, 228 << 10, warps=64, programs=32),
}
# Every kind of kernel: window scores, sums over all queries, ranks over layers, merges, pairs.
POLICIES = f"{ATTENTION},snapkv,h2o,cake,d2o,minicache"
# Key of one GPU, shape and policy in a file.
PLACE = ("target", "size", "group", "name")
HEADER = (
    "GPU", "head size", "kernels of", "query heads per KV head", "kernels", "that spill",
    "most registers of a thread", "most KiB of shared memory", "seconds",
)  # fmt: skip


def kernels_of(name: str, shape: ModelShape, target: int) -> list[Compiled]:
    """Kernels compiled for a policy, or for decode attention (`ATTENTION`)."""
    found: dict[str, Compiled] = {}
    with made_up(shape), on_device(compiling(found), KEPT, target):
        if name == ATTENTION:
            for pairs in (False, True):
                parts = services(shape, pairs=pairs)
                warm_attention(parts, shape.heads, torch.bfloat16, RUNNING)
        else:
            parts = services(shape)
            warm(parts, served(parts, shape, name), torch.bfloat16)
    return list(found.values())


def observe(name: str, shape: ModelShape, target: int) -> dict:
    """Facts on the kernels of a policy, or of attention, for one GPU and one shape of heads."""
    made, processor = kernels_of(name, shape, target), PROCESSORS[target]
    kernels = [
        {
            "name": x.name, "warps": x.warps, "registers": x.registers, "shared": x.shared,
            "spilled": x.spilled,
            "programs": processor.programs_at_once(x.registers, x.shared, x.warps),
        }
        for x in made
    ]  # fmt: skip
    return {
        "target": target, "size": shape.head_dim, "group": shape.group, "name": name,
        "seconds": round(sum(x.seconds for x in made), 1), "kernels": kernels,
    }  # fmt: skip


def earlier(folder: Path | None, name: str) -> list[dict]:
    """Cells that earlier runs have saved."""
    path = None if folder is None else folder / f"{name}.json"
    if path is None or not path.exists():
        return []
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def merged(cells: Iterable[dict]) -> list[dict]:
    """The last cell of each GPU, shape and policy, sorted."""
    kept = {tuple(each[key] for key in PLACE): each for each in cells}
    return [kept[place] for place in sorted(kept)]


def _of(cells: Sequence[dict], *keys: str) -> dict[tuple, list[dict]]:
    found: dict[tuple, list[dict]] = {}
    for each in cells:
        found.setdefault(tuple(each[key] for key in keys), []).append(each)
    return found


def _group(number: int) -> str:
    return "all (MQA)" if number == MQA else str(number)


def described(cells: Sequence[dict]) -> str:
    """The tables."""
    rows = []
    for (target, size, name), own in _of(cells, "target", "size", "name").items():
        kernels = [kernel for each in own for kernel in each["kernels"]]
        rows.append([
            f"sm_{target}", size, name, ", ".join(_group(each["group"]) for each in own),
            len(kernels), sum(_wrong(each, target) for each in kernels),
            max(each["registers"] for each in kernels),
            max(each["shared"] for each in kernels) >> 10, f"{sum(x['seconds'] for x in own):.0f}",
        ])  # fmt: skip
    words = report.table(HEADER, rows)
    wrong = [
        [f"sm_{each['target']}", each["size"], _group(each["group"]), x["name"], x["spilled"],
         x["shared"] >> 10]
        for each in cells
        for x in each["kernels"]
        if _wrong(x, each["target"])
    ]  # fmt: skip
    if wrong:
        header = ("GPU", "head size", "group", "kernel", "bytes spilled", "KiB shared")
        words += "\n\nThose that spill:\n\n" + report.table(header, wrong)
    for kernel, title in (
        ("_decode", "decode attention; lists are cut for so many"),
        ("_paged", "attention of resumed requests; lists are cut for so many"),
        ("columns", "`columns`, which adds up what queries say of each token"),
    ):
        text = _at_once([each for each in cells if _named(each, kernel)], kernel)
        if text:
            words += f"\n\nPrograms at once on a processor, of {title}:\n\n{text}"
    return words


def _wrong(kernel: dict, target: int) -> bool:
    """Whether the kernel spills, or does not fit on a processor."""
    return bool(kernel["spilled"]) or not kernel["programs"]


def _named(cell: dict, kernel: str) -> list[dict]:
    return [each for each in cell["kernels"] if each["name"] == kernel]


def _at_once(cells: Sequence[dict], kernel: str) -> str:
    """Table of programs per processor, by GPU, head size and policy; variants as a range."""
    groups = sorted({each["group"] for each in cells})
    rows = []
    for (target, size, name), own in _of(cells, "target", "size", "name").items():
        by_group = {each["group"]: [x["programs"] for x in _named(each, kernel)] for each in own}
        shown = []
        for group in groups:
            low, high = min(by_group.get(group, [0])), max(by_group.get(group, [0]))
            shown.append("" if not high else str(low) if low == high else f"{low}-{high}")
        rows.append([f"sm_{target}", size, name, *shown])
    header = ("GPU", "head size", "of", *(f"group {_group(each)}" for each in groups))
    return report.table(header, rows) if rows else ""


def parse() -> argparse.Namespace:
    parser = report.saving(__doc__)
    parser.add_argument("--targets", default="80,89,90,100", help="compute capabilities")
    parser.add_argument("--heads", default="64,80,96,128,256", help="sizes of a head")
    parser.add_argument("--groups", default="1,2,4,5,7,8,32", help="query heads of a KV head")
    parser.add_argument("--policies", default=POLICIES, help=f"and `{ATTENTION}`")
    parser.add_argument("--fresh", action="store_true", help="take nothing from Triton's cache")
    return parser.parse_args()


def main() -> None:
    options = parse()
    targets, sizes, groups = (
        [int(number) for number in each.split(",")]
        for each in (options.targets, options.heads, options.groups)
    )
    names = options.policies.split(",")
    cells = [(t, d, g, n) for t in targets for d in sizes for g in groups for n in names]
    file = f"compiled_kernels_{triton.__version__.replace('.', '_')}"
    made = earlier(options.save, file)
    with tempfile.TemporaryDirectory() as folder:
        if options.fresh:
            os.environ["TRITON_CACHE_DIR"] = folder
        for target, size, group, name in tqdm(cells, desc="shapes x policies", unit="cell"):
            kv_heads = 1 if group == MQA else 8
            shape = ModelShape(4, kv_heads * group, kv_heads, size)
            made = merged([*made, observe(name, shape, target)])
            if options.save is not None:
                report.write_json(options.save / f"{file}.json", {"cells": made})
    words = (
        f"Triton {triton.__version__}, bfloat16. As spilling counts, too, what needs more shared "
        "memory than a program of that GPU may use. All query heads of one KV head: 32. Seconds: "
        "of processors, for compiling what was not in Triton's cache. Kernels are counted for each "
        "group; those in which it plays no part are compiled once. Of several runs; the command is "
        "the last one's.\n\n" + described(made)
    )
    report.publish(file, "Kernels compiled without a GPU", words, {"cells": made}, options.save)


if __name__ == "__main__":
    main()
