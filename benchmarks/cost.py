"""What compression costs and what it saves: share of prefill, and the decode step beside stock.

Stock SGLang and a server with the policies run side by side in this run and take turns, request by
request. Scoring and compaction time is the server's own metric; prefill time is SGLang's, from the
start of the first forward to the first token.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import report
from kvpolicy.evaluation.serving import Server, serve
from shipped import settings
from tqdm import tqdm

POLICIES = ("snapkv", "adakv", "pyramidkv", "lava", "dynamickv", "simlayerkv-prefill")
HEADER = (
    "policy",
    "prompt tokens",
    "kept, %",
    "scoring + compaction, % of prefill",
    "stock TPOT, ms",
    "policy TPOT, ms",
    "policy / stock",
)
SECONDS = "sglang:kv_policy_compression_seconds_sum"


def compression_seconds(server: Server) -> float:
    """Seconds that the server has spent on scoring and compaction so far, all policies."""
    return sum(v for k, v in server.metrics().items() if k.startswith(SECONDS))


def times(answer: dict) -> tuple[float, float]:
    """Seconds of prefill, and milliseconds per output token, of one answer."""
    meta = answer["meta_info"]
    prefill = meta["prefill_finished_time"] - meta["forward_entry_time"]
    steps = meta["completion_tokens"] - 1
    return prefill, 1000 * (meta["e2e_latency"] - meta["first_token_latency"]) / steps


def batch(server: Server, prompts: list[list[int]], policy: str | None, new: int) -> list[dict]:
    """Answers to all prompts, asked at once; each has `new` tokens."""

    def ask(prompt):
        options = {"max_new_tokens": new, "ignore_eos": True}
        return server.generate(input_ids=prompt, policy=policy, **options)

    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(ask, prompts))
    if any(a["meta_info"]["completion_tokens"] != new for a in answers):
        raise SystemExit("cost: an answer is incomplete")
    return answers


def compare(stock: Server, ours: Server, policy: str, length: int, options) -> dict:
    """Times of each server, asked in turn, the share of prefill and the share kept."""
    rng = np.random.default_rng([options.seed, length])
    result = {"share": [], "stock_ms": [], "policy_ms": [], "kept": []}
    for turn in range(options.rounds + 1):
        prompts = rng.integers(20, 500, (options.batch, length)).tolist()
        plain = batch(stock, prompts, None, options.new)
        # Share of prefill from one request alone: in a batch, compression overlaps with prefills.
        before = compression_seconds(ours)
        single = batch(ours, [rng.integers(20, 500, length).tolist()], policy, 2)
        seconds = compression_seconds(ours) - before
        policed = batch(ours, prompts, policy, options.new)
        facts = [a["meta_info"]["kv_policy"] for a in policed]
        if not seconds or any(f["entries_kept"] >= f["entries_before"] for f in facts):
            raise SystemExit(f"cost: {policy} compressed nothing at {length} tokens")
        if turn == 0:
            continue  # warm-up
        result["share"].append(seconds / times(single[0])[0])
        result["stock_ms"].append(float(np.median([times(a)[1] for a in plain])))
        result["policy_ms"].append(float(np.median([times(a)[1] for a in policed])))
        result["kept"] += [f["entries_kept"] / f["entries_before"] for f in facts]
    return result


def row(name: str, length: int, result: dict) -> list[str]:
    """A line of the table."""
    ratio = [p / s for p, s in zip(result["policy_ms"], result["stock_ms"], strict=True)]
    return [
        name,
        str(length),
        f"{100 * np.mean(result['kept']):.1f}",
        report.spread(result["share"], 0, 100),
        report.spread(result["stock_ms"]),
        report.spread(result["policy_ms"]),
        report.spread(ratio),
    ]


def parse() -> argparse.Namespace:
    parser = report.arguments(__doc__)
    parser.add_argument("--lengths", default="512,1024,2048", help="prompt tokens")
    parser.add_argument("--kept", type=float, default=0.125, help="share of the prompt kept")
    parser.add_argument("--batch", type=int, default=4, help="requests decoded together")
    parser.add_argument("--new", type=int, default=48, help="tokens generated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--policies", default=",".join(POLICIES))
    return parser.parse_args()


def main() -> None:
    options = parse()
    lengths = [int(n) for n in options.lengths.split(",")]
    names = options.policies.split(",")
    files = [report.ROOT / "policies" / f"{name}.yaml" for name in names]
    flags = {"skip_tokenizer_init": True, "enable_metrics": True}
    rows, data = [], {}
    bar = tqdm(total=len(lengths) * len(names), desc="lengths x policies")
    with serve(options.model, progress=True, **flags) as stock:
        for length in lengths:
            chosen = settings(options.kept, length)
            given = [f"{name}.{each}" for name in names for each in chosen[name]]
            with serve(options.model, files, given, **flags) as ours:
                for name in names:
                    result = compare(stock, ours, name, length, options)
                    data[f"{name}@{length}"] = result
                    rows.append(row(name, length, result))
                    bar.update()
    bar.close()
    text = (
        f"Median (min-max) of {options.rounds} rounds; decode: {options.batch} requests together, "
        f"{options.new} tokens each.\n\n" + report.table(HEADER, rows)
    )
    report.publish("cost", "Compression cost and decode step", text, data, options.save)


if __name__ == "__main__":
    main()
