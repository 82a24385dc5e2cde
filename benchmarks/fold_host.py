"""Host work of decode steps and folds: torch operations, launches and time, by requests in a batch.

No model is computed and no kernel: requests decode over random queries and entries through the
plugin's own decode step, and what a GPU would compute is left out of clock and count. Before
anything is printed the result is checked: every request folded as often as it should, lists are no
longer than the policy's budget, and every slot is where the store says. Attention is left out, too:
one launch a layer, and one graph where SGLang captures them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import report
import torch
from folding_requests import Case, Crowd
from kvpolicy.dsl.ir.nodes import ModelShape
from tqdm import tqdm

PROMPT, HELD = 64, 32


@dataclass(frozen=True)
class Setting:
    """How to run a policy so that every request folds once in each interval.

    Attributes:
        given: (decode steps between folds) -> values of parameters.
        held: (prompt tokens, layers, folds, decode steps between folds) -> entries that a KV head
            holds at the end, summed over layers.
        first: number of intervals until entries leave for the first time.
    """

    given: Callable[[int], dict[str, str]]
    held: Callable[[int, int, int, int], int] = lambda prompt, layers, folds, steps: layers * HELD
    first: int = 1


def _given(**values: str) -> Callable[[int], dict[str, str]]:
    return lambda steps: values


# The same share for all layers, and no entry leaves at the prompt's end.
_ALIKE = {"gen_floor": "1", "floor_rate": "1", "constant": "true"}

# Lists have `HELD` entries unless `held` is given. The other policies drop no entries in decode, or
# only at the first step, so their host work is that of `snapkv`.
SETTINGS = {
    "snapkv": Setting(_given(capacity="32", window="4")),
    "h2o": Setting(_given(heavy="16", window="16")),
    "tova": Setting(_given(capacity="32")),
    "streamingllm": Setting(_given(start="4", window="28")),
    "streamingllm-original": Setting(_given(start="4", window="28")),
    "vatp": Setting(
        _given(rate="0.25", start="4"),
        held=lambda prompt, layers, folds, steps: layers * 2 * (prompt // 4),
    ),
    "cake": Setting(_given(capacity="32", window="4")),
    "cam": Setting(_given(start="4", window="28", reach="4")),
    "cam-original": Setting(
        _given(start_rate="0.0625", recent_rate="0.4375", reach="4"),
        held=lambda prompt, layers, folds, steps: (
            layers * (int(prompt * 0.0625) + int(prompt * 0.4375))
        ),
    ),
    "d2o": Setting(
        _given(rate="0.01", start="4", least="0.5"),
        held=lambda prompt, layers, folds, steps: layers * (prompt // 2),
    ),
    "d2o-code": Setting(
        _given(rate="0.001", start="32"),
        held=lambda prompt, layers, folds, steps: (
            3 * (prompt + folds * steps) + (layers - 3) * HELD
        ),
    ),
    "roco": Setting(
        lambda steps: {"capacity": str(steps), "newest": "1", "safe_rate": "0"},
        held=lambda prompt, layers, folds, steps: layers * (prompt + steps),
        first=2,
    ),
    # The window of 4 is full at step 3; from then on 0.9 of every batch that leaves it stays.
    "pyramidinfer": Setting(
        lambda steps: {"batch": str(steps), "recent_rate": "0.05", **_ALIKE},
        held=lambda prompt, layers, folds, steps: layers * (prompt + 3 + folds * int(0.9 * steps)),
        first=2,
    ),
}
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


def observe(policy: str, requests: int, options: argparse.Namespace) -> dict:
    """Numbers of one policy and batch size: counts of the first interval, times of the others."""
    shape = ModelShape(options.layers, 2 * options.kv_heads, options.kv_heads, options.head_dim)
    prompts = [PROMPT + i % (options.lengths or 1) for i in range(requests)]
    setting, interval, rounds = SETTINGS[policy], options.interval, options.rounds
    case = Case(policy, setting.given(interval), prompts, shape, interval, options.seed)
    # Up to each request's first fold, and one interval more.
    before = setting.first + 1
    crowd = Crowd(case, (before + rounds) * interval)
    for _ in range(before * interval):
        crowd.step()
    steps, between, means, slowest = [], [], [], []
    for turn in range(rounds):
        seconds = []
        for _ in range(interval):
            folded = crowd.folds
            observed, spent = crowd.step(counting=turn == 0)
            seconds.append(spent)
            if turn == 0:
                steps.append((observed, crowd.folds - folded))
            elif crowd.folds == folded:
                between.append(spent)
        if turn:
            means.append(sum(seconds) / len(seconds))
            slowest.append(max(seconds))
    folds = before + rounds - setting.first + 1
    held = (setting.held(each, shape.layers, folds, interval) for each in prompts)
    crowd.check(shape.kv_heads * sum(held))
    if crowd.folds != (requests * folds if crowd.goes_on else 0):
        raise SystemExit(f"fold_host: {crowd.folds} folds of {requests} requests, not {folds} each")
    busiest, folding = max(steps, key=lambda each: each[0].operations)
    total = sum(each.operations + each.launches for each, _ in steps)
    return {
        "folds": folding,
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
