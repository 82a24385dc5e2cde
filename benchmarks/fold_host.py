"""Host work of decode steps and folds: torch operations, launches and time, by requests in a batch.

No model is computed and no kernel: requests decode over random queries and entries through the
plugin's own decode step, and what a GPU would compute is left out of clock and count. Before
anything is printed the result is checked: every request folded as often as it should, lists are no
longer than the policy's budget, and every slot is where the store says. Attention is left out, too:
one launch a layer, and one graph where SGLang captures them.
"""

from __future__ import annotations

import argparse

import report
import torch
from folding_requests import Case, Crowd
from kvpolicy.dsl.ir.nodes import ModelShape
from tqdm import tqdm

# With which each policy holds 32 entries per layer and KV head, but for three layers of d2o-code;
# roco the prompt and 16.
SETTINGS = {
    "snapkv": {"capacity": "32", "window": "4"},
    "h2o": {"heavy": "16", "window": "16"},
    "tova": {"capacity": "32"},
    "streamingllm": {"start": "4", "window": "28"},
    "vatp": {"rate": "0.25", "start": "4"},
    "cake": {"capacity": "32", "window": "4"},
    "cam": {"start": "4", "window": "28", "reach": "4"},
    "d2o": {"rate": "0.01", "start": "4", "least": "0.5"},
    "d2o-code": {"rate": "0.001", "start": "32"},
    "cam-original": {"start_rate": "0.0625", "recent_rate": "0.4375", "reach": "4"},
    "roco": {"capacity": "16", "newest": "4", "safe_rate": "0"},
}
LATE = ("roco",)  # nothing leaves at the first interval
PROMPT, HELD = 64, 32
HEADER = (
    "policy",
    "requests",
    "folds in the busiest step",
    "operations in it",
    "views among them",
    "launches in it",
    "operations + launches per request and fold",
    "operations + launches of a step between folds",
    "host us of it",
    "host ms per decode step",
    "host ms of the slowest step",
)


def entries(policy: str, prompt: int, layers: int, steps: int) -> int:
    """How many entries a KV head holds at all layers, after a fold that so many steps led to."""
    if policy == "cam-original":
        return layers * (int(prompt * 0.0625) + int(prompt * 0.4375))
    if policy == "roco":
        return layers * (prompt + 16)
    if policy == "d2o":
        return layers * (prompt // 2)
    if policy == "d2o-code":
        return 3 * (prompt + steps) + (layers - 3) * HELD
    return layers * (2 * (prompt // 4) if policy == "vatp" else HELD)


def observe(policy: str, requests: int, options: argparse.Namespace) -> dict:
    """Numbers of one policy and batch: counts of one interval, times of the others."""
    shape = ModelShape(options.layers, 2 * options.kv_heads, options.kv_heads, options.head_dim)
    prompts = [PROMPT + i % (options.lengths or 1) for i in range(requests)]
    rounds = options.rounds + 2
    case = Case(policy, SETTINGS[policy], prompts, shape, options.interval, options.seed)
    crowd = Crowd(case, rounds * options.interval)
    # After two intervals every request holds what it goes on holding.
    for _ in range(2 * options.interval):
        crowd.step()
    steps, between, means, slowest = [], [], [], []
    for turn in range(options.rounds):
        seconds = []
        for _ in range(options.interval):
            before = crowd.folds
            observed, spent = crowd.step(counting=turn == 0)
            seconds.append(spent)
            if turn == 0:
                steps.append((observed, crowd.folds - before))
            elif crowd.folds == before:
                between.append(spent)
        if turn:
            means.append(sum(seconds) / len(seconds))
            slowest.append(max(seconds))
    made = (entries(policy, each, shape.layers, rounds * options.interval) for each in prompts)
    crowd.check(shape.kv_heads * sum(made))
    folding = rounds - (policy in LATE)
    if crowd.folds != (requests * folding if crowd.goes_on else 0):
        raise SystemExit(f"fold_host: {crowd.folds} folds of {requests} requests in {rounds} turns")
    busiest, folds = max(steps, key=lambda each: each[0].operations)
    total = sum(each.operations + each.launches for each, _ in steps)
    return {
        "folds": folds,
        "operations": busiest.operations,
        "views": busiest.views,
        "launches": busiest.launches,
        "per_fold": total / max(sum(number for _, number in steps), 1),
        "between": max(x.operations + x.launches for x, number in steps if not number),
        "between_seconds": between,
        "mean_seconds": means,
        "slowest_seconds": slowest,
    }


def row(policy: str, requests: int, made: dict) -> list[str]:
    """A line of the table."""
    return [
        policy,
        str(requests),
        str(made["folds"]),
        f"{made['operations']:,}",
        f"{made['views']:,}",
        f"{made['launches']:,}",
        f"{made['per_fold']:,.1f}",
        f"{made['between']:,}",
        report.spread(made["between_seconds"], 0, 1e6),
        report.spread(made["mean_seconds"], 2, 1000),
        report.spread(made["slowest_seconds"], 1, 1000),
    ]


def parse() -> argparse.Namespace:
    parser = report.arguments(__doc__)
    parser.add_argument("--policies", default=",".join(SETTINGS))
    parser.add_argument("--requests", default="1,32,128", help="decoded together")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=8)
    parser.add_argument("--interval", type=int, default=16, help="decode steps between folds")
    parser.add_argument("--lengths", type=int, default=16, help="different lengths of prompts")
    parser.add_argument("--rounds", type=int, default=4, help="intervals; the first is counted")
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    names = options.policies.split(",")
    numbers = [int(n) for n in options.requests.split(",")]
    rows, data = [], {}
    bar = tqdm(total=len(names) * len(numbers), desc="policies x batches")
    for name in names:
        for number in numbers:
            data[f"{name}@{number}"] = made = observe(name, number, options)
            rows.append(row(name, number, made))
            bar.update()
    bar.close()
    text = (
        f"{options.layers} layers, {options.kv_heads} KV heads, folds every {options.interval} "
        f"steps; prompts of {PROMPT} to {PROMPT + max(options.lengths - 1, 0)} tokens. Times: "
        f"median (min-max) of {options.rounds - 1} intervals, on a CPU, without what stands for "
        "kernels, and of the processor, not by the clock. Between folds: of every step without one."
        "\n\n" + report.table(HEADER, rows)
    )
    report.publish("fold_host", "Host work of folds", text, data, options.save)


if __name__ == "__main__":
    main()
