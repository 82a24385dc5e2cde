"""Time of a decode step against the fold interval, and the memory that the interval costs.

A server per interval, one after the other, and stock SGLang beside each, taking turns with it
request by request. Before anything is printed the result is checked: every answer complete, as many
folds as the interval says, and as many entries dropped as came in beyond the budget.
"""

from __future__ import annotations

import argparse

import numpy as np
import report
from cost import batch, times
from kvpolicy.evaluation.serving import Server, serve
from tqdm import tqdm

# Parameters with which each policy keeps `budget` entries per layer and KV head.
SETTINGS = {
    "h2o": lambda budget: {"heavy": budget - budget // 2, "window": budget // 2},
    "tova": lambda budget: {"capacity": budget},
    "streamingllm": lambda budget: {"start": 4, "window": budget - 4},
}
HEADER = (
    "policy",
    "interval",
    "folds per answer",
    "stock TPOT, ms",
    "policy TPOT, ms",
    "policy / stock",
    "ms per fold",
    "slots between folds",
)
SECONDS = "sglang:kv_policy_fold_seconds_sum"


def fold_seconds(server: Server) -> float:
    """Seconds that the server has spent on folds so far, all policies."""
    return sum(v for k, v in server.metrics().items() if k.startswith(SECONDS))


def check(facts: dict, interval: int, options: argparse.Namespace) -> None:
    """Exit unless the expected number of entries left, in the expected number of folds."""
    folds = (options.new - 1) // interval
    lists = facts["entries_before"] // facts["prompt_tokens"]
    if facts["folds"] != folds or facts["entries_dropped_in_decode"] != folds * interval * lists:
        raise SystemExit(f"fold_interval: {facts} after {options.new} tokens, every {interval}")


def compare(stock: Server, ours: Server, policy: str, interval: int, options) -> dict:
    """Times of each server; they take turns."""
    rng = np.random.default_rng([options.seed, interval])
    result = {"stock_ms": [], "policy_ms": [], "fold_ms": []}
    for turn in range(options.rounds + 1):
        prompts = rng.integers(20, 500, (options.batch, options.prompt)).tolist()
        plain = batch(stock, prompts, None, options.new)
        before = fold_seconds(ours)
        policed = batch(ours, prompts, policy, options.new)
        seconds = fold_seconds(ours) - before
        for answer in policed:
            check(answer["meta_info"]["kv_policy"], interval, options)
        if turn == 0:
            continue  # warm-up
        folds = sum(a["meta_info"]["kv_policy"]["folds"] for a in policed)
        result["stock_ms"].append(float(np.median([times(a)[1] for a in plain])))
        result["policy_ms"].append(float(np.median([times(a)[1] for a in policed])))
        result["fold_ms"].append(1000 * seconds / max(folds, 1))
    return result


def row(policy: str, interval: int, result: dict, options: argparse.Namespace) -> list[str]:
    """A line of the table."""
    ratio = [p / s for p, s in zip(result["policy_ms"], result["stock_ms"], strict=True)]
    folds = (options.new - 1) // interval
    return [
        policy,
        str(interval),
        str(folds),
        report.spread(result["stock_ms"]),
        report.spread(result["policy_ms"]),
        report.spread(ratio),
        report.spread(result["fold_ms"]) if folds else "-",
        f"{options.budget} to {options.budget + interval - 1}",
    ]


def parse() -> argparse.Namespace:
    parser = report.arguments(__doc__)
    parser.add_argument("--intervals", default="1,4,16,64", help="decode steps between folds")
    parser.add_argument("--prompt", type=int, default=1024, help="prompt tokens")
    parser.add_argument("--budget", type=int, default=256, help="entries per layer and KV head")
    parser.add_argument("--batch", type=int, default=4, help="requests decoded together")
    parser.add_argument("--new", type=int, default=129, help="tokens generated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--policies", default=",".join(SETTINGS))
    return parser.parse_args()


def main() -> None:
    options = parse()
    intervals = [int(n) for n in options.intervals.split(",")]
    names = options.policies.split(",")
    files = [report.ROOT / "policies" / f"{name}.yaml" for name in names]
    own = {name: SETTINGS[name](options.budget) for name in names}
    settings = [f"{name}.{k}={v}" for name in names for k, v in own[name].items()]
    flags = {"skip_tokenizer_init": True, "enable_metrics": True}
    lines, data = {}, {}
    bar = tqdm(total=len(intervals) * len(names), desc="intervals x policies")
    with serve(options.model, progress=True, **flags) as stock:
        for interval in intervals:
            spacing = {"kv_policy_fold_interval": interval}
            with serve(options.model, files, settings, **flags, **spacing) as ours:
                for name in names:
                    result = compare(stock, ours, name, interval, options)
                    data[f"{name}@{interval}"] = result
                    lines[name, interval] = row(name, interval, result, options)
                    bar.update()
    bar.close()
    rows = [lines[name, interval] for name in names for interval in intervals]
    text = (
        f"Median (min-max) of {options.rounds} rounds; {options.batch} requests together, prompts "
        f"of {options.prompt} tokens, {options.new} tokens generated. A fold is one request's.\n\n"
        + report.table(HEADER, rows)
    )
    report.publish("fold_interval", "Decode step by fold interval", text, data, options.save)


if __name__ == "__main__":
    main()
