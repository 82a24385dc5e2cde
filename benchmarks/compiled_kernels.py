"""Kernels compiled for GPUs that are not there: registers, shared memory, spills, and seconds.

    python benchmarks/compiled_kernels.py --save
    python benchmarks/compiled_kernels.py --targets 90 --heads 128 --groups 4 --policies snapkv

Of each GPU and shape of heads all kernels are compiled that a server compiles before it is ready,
by the same code: the attention of decode steps, and of each policy what prefills, copies and folds
launch. What lies in Triton's cache is taken from there; `--fresh` compiles all of it anew.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import asdict

import report
import torch
import triton
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.sglang_ext.forward.warm import warm, warm_attention
from tqdm import tqdm

for folder in ("kernels", "sglang_ext"):
    sys.path.insert(0, str(report.ROOT / "tests" / folder))
from on_device import KEPT, made_up, served, services  # noqa: E402
from sm90 import Compiled, compiling, on_device  # noqa: E402

ATTENTION, RUNNING = "attention", 200
SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # bytes that a program may use
# Every kind of kernel: window scores, sums over all queries, ranks over layers, merges, pairs.
POLICIES = f"{ATTENTION},snapkv,h2o,cake,d2o,minicache"
HEADER = (
    "GPU", "head size", "query heads per KV head", "kernels", "that spill",
    "most registers of a thread", "most KiB of shared memory", "seconds",
)  # fmt: skip


def kernels_of(name: str, shape: ModelShape, target: int) -> dict[str, Compiled]:
    """Kernels of a policy, or of the attention, by their hash."""
    found: dict[str, Compiled] = {}
    with made_up(shape), on_device(compiling(found), KEPT, target):
        if name == ATTENTION:
            for pairs in (False, True):
                parts = services(shape, pairs=pairs)
                warm_attention(parts, shape.heads, torch.bfloat16, RUNNING)
        else:
            parts = services(shape)
            warm(parts, served(parts, shape, name))
    return found


def observe(names: list[str], shape: ModelShape, target: int) -> dict:
    """What is compiled for one GPU and one shape of heads."""
    found: dict[str, Compiled] = {}
    counts = {}
    for name in names:
        own = kernels_of(name, shape, target)
        counts[name] = len(own)
        found |= own
    made = list(found.values())
    wrong = [x for x in made if x.spilled or x.shared > SHARED[target]]
    return {
        "target": target, "size": shape.head_dim, "group": shape.group, "kernels": counts,
        "all": len(made), "seconds": sum(x.seconds for x in made),
        "registers": max(x.registers for x in made), "shared": max(x.shared for x in made),
        "wrong": [asdict(x) for x in wrong],
        "decode": [asdict(x) for x in made if x.name == "_decode"],
    }  # fmt: skip


def programs(kernel: dict, target: int) -> int:
    """How many of a kernel run at once on a processor, by its registers and shared memory."""
    # Registers are handed out to warps, 256 at a time.
    registers = -(-kernel["registers"] * 32 // 256) * 256 * kernel["warps"]
    held = SHARED[target] // max(kernel["shared"] + 1024, 1)  # 1 KiB of each is the system's
    return min(65536 // registers, held, 64 // kernel["warps"])


def parse() -> argparse.Namespace:
    parser = report.arguments(__doc__)
    parser.add_argument("--targets", default="80,90,100", help="compute capabilities")
    parser.add_argument("--heads", default="64,80,96,128,256", help="sizes of a head")
    parser.add_argument("--groups", default="1,4,8,32", help="query heads of a KV head")
    parser.add_argument("--policies", default=POLICIES, help=f"and `{ATTENTION}`")
    parser.add_argument("--fresh", action="store_true", help="take nothing from Triton's cache")
    return parser.parse_args()


def main() -> None:
    options = parse()
    targets, sizes, groups = (
        [int(number) for number in each.split(",")]
        for each in (options.targets, options.heads, options.groups)
    )
    cells = [(t, d, g) for t in targets for d in sizes for g in groups]
    data = []
    with tempfile.TemporaryDirectory() as folder:
        if options.fresh:
            os.environ["TRITON_CACHE_DIR"] = folder
        for target, size, group in tqdm(cells, desc="shapes", unit="shape"):
            kv_heads = 1 if group >= 32 else 8
            shape = ModelShape(4, kv_heads * group, kv_heads, size)
            data.append(observe(options.policies.split(","), shape, target))
    rows = [
        [
            f"sm_{each['target']}", each["size"], each["group"], each["all"], len(each["wrong"]),
            each["registers"], each["shared"] >> 10, f"{each['seconds']:.0f}",
        ]
        for each in data
    ]  # fmt: skip
    words = (
        f"Triton {triton.__version__}, bfloat16, {options.policies}. As spilling counts, too, what "
        "needs more shared memory than a program of that GPU may use. 32 query heads per KV head: "
        "one KV head for all. Seconds: of processors, for compiling, with Triton's cache "
        f"{'empty' if options.fresh else 'used'}.\n\n" + report.table(HEADER, rows)
    )
    wrong = [
        [f"sm_{each['target']}", each["size"], each["group"], x["name"], x["spilled"], x["shared"]]
        for each in data
        for x in each["wrong"]
    ]
    if wrong:
        header = ("GPU", "head size", "group", "kernel", "bytes spilled", "bytes shared")
        words += "\n\n" + report.table(header, wrong)
    decode = [
        [f"sm_{each['target']}", each["size"], each["group"], x["registers"], x["shared"] >> 10,
         programs(x, each["target"])]
        for each in data
        for x in each["decode"]
    ]  # fmt: skip
    if decode:
        header = ("GPU", "head size", "group", "registers", "KiB shared", "programs at once")
        words += (
            "\n\nDecode attention in all its variants, and how many programs a processor holds; "
            "lists are cut for three.\n\n" + report.table(header, decode)
        )
    name = f"compiled_kernels_{triton.__version__.replace('.', '_')}"
    report.publish(name, "Kernels compiled without a GPU", words, {"shapes": data}, options.save)


if __name__ == "__main__":
    main()
