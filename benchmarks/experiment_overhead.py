"""What an experiment costs: microseconds per request to assign it, and throughput with shadows.

Two servers with the same policy take turns, round by round, with the same requests many at once:
one without an experiment, and one with two equal arms of which a share is scored again with full
KV. Every answer is checked to have been given in full, and no sampled request to have been left
out. Throughput scatters on a shared machine; seconds of a core per request, of all processes of a
server and until its shadows have run, scatter less and leave no cost out.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import report
import requests
from kvpolicy.evaluation.serving import Server, serve
from kvpolicy.experiments.definition import reading
from kvpolicy.sglang_ext.clients.traffic import Traffic
from kvpolicy.sglang_ext.experiment.live import LABELS, Live
from scipy.stats import t
from tqdm import tqdm

HEADER = (
    "server",
    "requests per second",
    "of the one without, %",
    "ms of a core per request",
    "of the one without, %",
)
PAUSE = 1.0  # seconds after a round, in which shadows end


def experiment(sample: float) -> str:
    """Text of an experiment with two equal arms."""
    return json.dumps({
        "experiment": "overhead",
        "targeting_key": ["header:x-smg-routing-key", "body:user", "rid"],
        "coverage": "100 %",
        "arms": {"control": {"policy": "lava"}, "same": {"policy": "lava"}},
        "shadow": {"sample": f"{100 * sample:g} %", "top": 64, "tokens_per_second": 2000},
        "metrics": [{"metric": "drift", "role": "guardrail", "margin": 1.9, "clip": 2}],
        "analysis": {"on_fail": "alert"},
    })  # fmt: skip


def assignment(count: int) -> list[float]:
    """Microseconds to assign each of `count` requests, by the front end's code."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "experiment.yaml")
        file.write_text(experiment(0.02))
        live = Live(reading.load(file).require(), file, {"lava": {}})
        traffic = Traffic({"lava": None}, live=live, labels=LABELS)
        manager = SimpleNamespace(enable_lora=False, preferred_sampling_params=None)

        async def body() -> dict[str, Any]:
            return {"user": "somebody"}

        async def assign(key: str) -> float:
            request = SimpleNamespace(headers={"x-smg-routing-key": key}, json=body)
            obj = SimpleNamespace(
                sampling_params={"temperature": 0.7}, lora_path=None, custom_labels=None, rid=None
            )
            begun = time.perf_counter()
            if await traffic.choose(manager, obj, request):
                await traffic.draw(live, manager, obj, request)
            seconds = time.perf_counter() - begun
            if "arm" not in obj.sampling_params["custom_params"]["kv_policy_assigned"]:
                raise SystemExit("experiment_overhead: a request got no arm")
            return 1e6 * seconds

        async def all_of_them() -> list[float]:
            return [await assign(f"user-{i}") for i in range(count)]

        return asyncio.run(all_of_them())


def round_of(
    server: Server, prompts: list[list[int]], turn: int, options: Any
) -> tuple[float, float]:
    """Requests per second of one round, and milliseconds of a core per request."""

    def ask(i: int) -> None:
        sampling = {"temperature": 0.7, "max_new_tokens": options.new, "ignore_eos": True}
        body = {"input_ids": prompts[i], "sampling_params": sampling}
        headers = {"x-smg-routing-key": f"{turn}-{i}"}
        url = f"{server.url}/generate"
        response = requests.post(url, json=body, headers=headers, timeout=300)
        response.raise_for_status()
        if len(response.json()["output_ids"]) != options.new:
            raise SystemExit("experiment_overhead: an answer is incomplete")

    used, begun = core_seconds(server), time.perf_counter()
    with ThreadPoolExecutor(options.at_once) as pool:
        list(pool.map(ask, range(len(prompts))))
    rate = len(prompts) / (time.perf_counter() - begun)
    time.sleep(PAUSE)
    return rate, 1000 * (core_seconds(server) - used) / len(prompts)


def core_seconds(server: Server) -> float:
    """Seconds of a core that all processes of the server have used."""
    first = psutil.Process(server.process.pid)
    times = [each.cpu_times() for each in (first, *first.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def interval(ratios: list[float]) -> str:
    """The geometric mean of ratios and its 95 % confidence interval, in percent."""
    logs = np.log(ratios)
    if len(logs) < 2:
        return f"{100 * np.exp(logs[0]):.1f}"
    error = np.std(logs, ddof=1) / np.sqrt(len(logs))
    half = error * t.ppf(0.975, len(logs) - 1)
    mean, low, high = (100 * np.exp(np.mean(logs) + x) for x in (0, -half, half))
    return f"{mean:.1f} ({low:.1f} to {high:.1f})"


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--requests", type=int, default=200, help="of a round")
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--new", type=int, default=16, help="tokens generated")
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--sample", type=float, default=0.02, help="share that is scored again")
    options = parser.parse_args()
    micros = assignment(20_000)
    policy, settings = report.ROOT / "policies" / "lava.yaml", ["rate=0.5", "window=8"]
    labels = ("without an experiment", "with it")
    rates: dict[str, list[float]] = {label: [] for label in labels}
    cores: dict[str, list[float]] = {label: [] for label in labels}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "experiment.yaml")
        file.write_text(experiment(options.sample))
        flags = {"skip_tokenizer_init": True}
        with (
            serve(options.model, [policy], settings, progress=True, **flags) as plain,
            serve(options.model, [policy], settings, kv_experiment=file, **flags) as ours,
        ):
            servers = list(zip(labels, (plain, ours), strict=True))
            for turn in tqdm(range(options.rounds + 1), desc="rounds"):
                rng = np.random.default_rng(options.seed + turn)
                prompts = rng.integers(20, 500, (options.requests, options.prompt)).tolist()
                for label, server in servers if turn % 2 else reversed(servers):
                    server.flush()
                    rate, core = round_of(server, prompts, turn, options)
                    if turn:  # the first one warms up
                        rates[label].append(rate)
                        cores[label].append(core)
            found = ours.session.get(f"{ours.url}/kv_policy/experiment", timeout=60).json()
    shadows = {arm: {k: n for k, n in each.items() if n} for arm, each in found["shadow"].items()}
    compared = sum(each.get("compared", 0) for each in shadows.values())
    if any(set(each) - {"compared"} for each in shadows.values()):
        raise SystemExit(f"experiment_overhead: not all that was sampled was compared: {shadows}")
    ratios = {
        name: [b / a for a, b in zip(*measured.values(), strict=True)]
        for name, measured in (("rates", rates), ("cores", cores))
    }
    rows = [
        [
            label,
            report.spread(rates[label], 1),
            "100" if label == labels[0] else interval(ratios["rates"]),
            report.spread(cores[label], 1),
            "100" if label == labels[0] else interval(ratios["cores"]),
        ]
        for label in labels
    ]
    low, high = np.percentile(micros, [5, 95])
    text = (
        f"Assignment: {statistics.median(micros):.0f} us per request in the median, 5 % to 95 %: "
        f"{low:.0f} to {high:.0f} us, of {len(micros):,}.\n\n"
        f"{options.requests} requests of {options.prompt} tokens a round, {options.new} generated, "
        f"{options.at_once} at once; median (min-max) of {options.rounds} rounds; percentages are "
        "geometric means of ratios with their 95 % confidence intervals. Scored again: "
        f"{100 * options.sample:g} % of the requests, {compared} in all.\n\n"
        f"{report.table(HEADER, rows)}"
    )
    data = {"assignment_us": statistics.median(micros), "rates": rates, "core_ms": cores,
            "ratios": ratios, "shadow": shadows}  # fmt: skip
    report.publish("experiment_overhead", "Cost of an experiment", text, data, options.save)


if __name__ == "__main__":
    main()
