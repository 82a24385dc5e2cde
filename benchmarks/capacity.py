"""How many long requests are decoded at once: stock SGLang against a policy, in one tight pool.

Each of them with entries of 16 bits (bfloat16) and of 8 (`--kv-cache-dtype fp8_e4m3`). All servers
get pools of the same bytes, twice the tokens where these have 8 bits, and the same requests, one
server after the other in this run. The number at once is what SGLang itself prints for its decode
batches.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import report
from kvpolicy.evaluation.serving import serve

DECODE_BATCH = re.compile(r"Decode batch, #running-req: (\d+)")


def measure(
    server, prompts: list[list[int]], new_tokens: int, policy: str | None = None
) -> dict[str, Any]:
    """Send all prompts in one request; return peak and mean decode batch, seconds, outcomes.

    With one request per prompt, the machine's load would decide how many arrive before the first
    ends.
    """
    server.generate(input_ids=prompts[0][:8], max_new_tokens=2)
    before = len(server.log_text())
    started = time.perf_counter()
    answers = server.generate_batch(
        prompts, policy=policy, max_new_tokens=new_tokens, ignore_eos=True
    )
    seconds = time.perf_counter() - started
    batches = [int(n) for n in DECODE_BATCH.findall(server.log_text()[before:])]
    bad = [a for a in answers if a["meta_info"]["completion_tokens"] != new_tokens]
    if bad or not batches:
        raise SystemExit(f"capacity: {len(bad)} of {len(answers)} answers are incomplete")
    return {
        "peak": max(batches),
        "mean": float(np.mean(batches)),
        "seconds": seconds,
        "retractions": sum(a["meta_info"]["num_retractions"] for a in answers),
        "outcomes": Counter(_outcome(a["meta_info"].get("kv_policy")) for a in answers),
    }


def _outcome(facts: dict | None) -> str:
    return "in full" if facts is None else facts.get("uncompressed", "compressed")


def row(label: str, bits: int, result: dict, stock: dict) -> list[object]:
    """A line of the table."""
    mean, seconds = f"{result['mean']:.1f}", f"{result['seconds']:.1f}"
    times = f"{result['peak'] / stock['peak']:.1f}"
    return [label, bits, result["peak"], times, mean, seconds, result["retractions"]]


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--policy", default=str(report.ROOT / "policies" / "snapkv.yaml"))
    parser.add_argument("--prompt", type=int, default=512, help="prompt tokens")
    parser.add_argument("--kept", type=float, default=0.125, help="share of the prompt kept")
    parser.add_argument("--new", type=int, default=32, help="tokens generated")
    parser.add_argument(
        "--at-once", type=int, default=8, help="R: what the pool holds without, of 16 bits"
    )
    parser.add_argument("--requests", type=int, default=160)
    options = parser.parse_args()

    rng = np.random.default_rng(options.seed)
    prompts = rng.integers(20, 500, (options.requests, options.prompt)).tolist()
    # Half a request of slack, so that R requests are admitted in spite of rounding.
    tokens = int((options.at_once + 0.5) * (options.prompt + options.new))
    capacity, name = int(options.kept * options.prompt), Path(options.policy).stem
    policies = {"stock SGLang": ([], []), name: ([options.policy], [f"capacity={capacity}"])}
    caches = {16: "auto", 8: "fp8_e4m3"}
    found: dict[str, dict[str, Any]] = {}
    for bits, cache in caches.items():
        flags = {
            "max_total_tokens": tokens * 16 // bits,
            "dtype": "bfloat16",
            "kv_cache_dtype": cache,
            "skip_tokenizer_init": True,
            "decode_log_interval": 1,
        }
        for label, given in policies.items():
            with serve(options.model, *given, progress=True, **flags) as server:
                found[f"{label}, {bits} bits"] = measure(server, prompts, options.new)

    stock = found["stock SGLang, 16 bits"]
    lines = []
    for label, shown in (("stock SGLang", "stock SGLang"), (name, f"{name}, {capacity} entries")):
        for bits in caches:
            lines.append(row(shown, bits, found[f"{label}, {bits} bits"], stock))
    header = ["server", "bits", "peak at once", "times", "mean at once"]
    text = (
        f"{options.requests} requests of {options.prompt} tokens, {options.new} generated, pool of "
        f"{tokens} tokens of 16 bits or {2 * tokens} of 8.\n\n"
        + report.table([*header, "seconds for all", "retractions"], lines)
    )
    report.publish("capacity", "Requests decoded at once", text, found, options.save)


if __name__ == "__main__":
    main()
