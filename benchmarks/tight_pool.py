"""A pool that holds two prompts: the time of the same requests with policies and in stock SGLang.

Three servers, stock, one with all policies, and stock with room for all requests at once, run in
this run and take turns. The last says how much running all at once gains on the machine. The model
has random weights and is large enough that arithmetic, not Python, takes the time. Here a copy of a
prompt competes for slots with the prompts of the requests that wait.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import report
from capacity import measure
from kvpolicy.evaluation.serving import serve
from propagation import Size
from shipped import settings
from tqdm import tqdm

STOCK = "stock SGLang"
AMPLE = "stock SGLang, room for all"


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--policies", default="snapkv,lava,h2o,fastkv")
    parser.add_argument("--shares", default="0.5,0.25,0.125", help="of the prompt kept")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=1024, help="prompt tokens")
    parser.add_argument("--new", type=int, default=128, help="tokens generated")
    parser.add_argument("--pool", type=int, default=2700, help="tokens")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    cases = [
        (name, float(share))
        for name in options.policies.split(",")
        for share in options.shares.split(",")
    ]
    paths, chosen = [], []
    for name, share in cases:
        alias = f"{name}@{share}"
        paths.append(f"{alias}={report.ROOT / 'policies' / f'{name}.yaml'}")
        chosen += [f"{alias}.{each}" for each in settings(share, options.prompt)[name]]
    flags = {
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "max_total_tokens": options.pool,
        "decode_log_interval": 1,
    }
    room = options.requests * (options.prompt + options.new + 1)
    asked = [STOCK, AMPLE, *(f"{name}@{share}" for name, share in cases)]
    results: dict[str, list[dict]] = {name: [] for name in asked}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(Size(layers=options.layers).config()))
        with (
            serve(folder, **flags) as stock,
            serve(folder, **flags | {"max_total_tokens": room}) as ample,
            serve(folder, paths, chosen, **flags) as ours,
        ):
            for turn in tqdm(range(options.rounds), desc="rounds"):
                rng = np.random.default_rng(options.seed + turn)
                prompts = rng.integers(20, 500, (options.requests, options.prompt)).tolist()
                for name in asked[turn % len(asked) :] + asked[: turn % len(asked)]:
                    server = {STOCK: stock, AMPLE: ample}.get(name, ours)
                    server.flush()
                    policy = name if server is ours else None
                    results[name].append(measure(server, prompts, options.new, policy))
    publish(options, results)


def publish(options, results: dict[str, list[dict]]) -> None:
    """Print and save the table and its data."""
    rows = []
    for name, rounds in results.items():
        seconds = [each["seconds"] for each in rounds]
        speed = [
            stock["seconds"] / each["seconds"]
            for stock, each in zip(results[STOCK], rounds, strict=True)
        ]
        outcomes = sum((Counter(each["outcomes"]) for each in rounds), Counter())
        rows.append(
            [
                name,
                report.spread(seconds, 1),
                report.spread(speed),
                max(each["peak"] for each in rounds),
                f"{np.mean([each['mean'] for each in rounds]):.1f}",
                sum(each["retractions"] for each in rounds),
                ", ".join(f"{count} {what}" for what, count in sorted(outcomes.items())),
            ]
        )
    header = ["policy@kept", "seconds for all", "throughput / stock's", "most at once"]
    header += ["mean at once", "retractions", "requests"]
    text = (
        f"{options.requests} requests of {options.prompt} tokens, {options.new} generated, pool of "
        f"{options.pool} tokens, {options.layers} layers of {Size().channels} channels, random "
        f"weights; median (min-max) of {options.rounds} rounds.\n\n{report.table(header, rows)}"
    )
    report.publish("tight_pool", "Throughput in a tight pool", text, results, options.save)


if __name__ == "__main__":
    main()
