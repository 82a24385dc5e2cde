"""Experiments in which nothing differs, on real requests: no drift, no breach, no mismatch.

`none` beside `none`, and `lava` beside itself, each with 2,000 requests at temperature 0.7, all of
which are scored again with full KV; then requests whose key a gateway has overwritten, which must
be noticed.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import report
import requests
from kvpolicy.evaluation.serving import Server, serve
from tqdm import tqdm

ROW = "one key for all"
HEADER = (
    "arms",
    "requests",
    "compared",
    "drift of control",
    "drift of the other",
    "breached",
    "p of the sample ratio",
    "warnings",
)


def experiment(policy: str, margin: float, sample: str = "100 %") -> dict[str, Any]:
    """An experiment with one policy in both arms; `sample` of the requests is scored again."""
    return {
        "experiment": "null",
        "targeting_key": ["header:x-smg-routing-key"],
        "coverage": "100 %",
        "arms": {"control": {"policy": policy}, "same": {"policy": policy}},
        "shadow": {"sample": sample, "tokens_per_second": 1_000_000},
        "metrics": [
            {"metric": "drift", "role": "guardrail", "margin": margin, "clip": 2},
            {"metric": "top1_disagreement", "role": "guardrail", "margin": 0.5},
            {"metric": "error_rate", "role": "guardrail", "margin": 0.01},
        ],
        "analysis": {"min_samples": 50},
    }


def ask(url: str, tokens: Sequence[int], key: str, new: int) -> None:
    """One request at temperature 0.7."""
    sampling = {"temperature": 0.7, "max_new_tokens": new, "ignore_eos": True}
    body = {"input_ids": list(tokens), "sampling_params": sampling}
    headers = {"x-smg-routing-key": key}
    response = requests.post(f"{url}/generate", json=body, headers=headers, timeout=300)
    response.raise_for_status()


def run(server: Server, document: dict[str, Any], keys: Sequence[str], options: Any) -> dict:
    """The server's report after a request per key, once all are finished and scored."""
    answer = server.session.put(f"{server.url}/kv_policy/experiment", json=document, timeout=60)
    answer.raise_for_status()
    rng = np.random.default_rng(options.seed)
    prompts = [rng.integers(20, 500, int(rng.integers(20, 250))).tolist() for _ in keys]
    with ThreadPoolExecutor(options.at_once) as pool:
        calls = pool.map(
            lambda i: ask(server.url, prompts[i], keys[i], options.new), range(len(keys))
        )
        for _ in tqdm(calls, total=len(keys), desc=document["arms"]["control"]["policy"]):
            pass
    while True:
        found = server.session.get(f"{server.url}/kv_policy/experiment", timeout=60).json()
        seen = sum(sum(each.values()) for each in found["shadow"].values())
        finished = sum(arm["finished"] for arm in found["analysis"]["arms"].values())
        wanted = finished * (document["shadow"]["sample"] == "100 %")
        if finished == len(keys) and seen >= wanted:
            return found
        time.sleep(0.2)


def row(label: str, requests_: int, found: dict[str, Any]) -> list[str]:
    """A line of the table."""
    arms = found["analysis"]["arms"]
    drift = [arms[arm]["tallies"]["drift"] for arm in ("control", "same")]
    breached = [each["metric"] for each in found["verdicts"] if each["outcome"] == "breached"]
    p = min(found["analysis"]["keys"]["p_values"].values())
    warnings = [warning.split(":")[0] for warning in found["warnings"]]
    means = [f"{total / count:.3g}" if count else "-" for count, total in drift]
    compared = str(sum(count for count, _ in drift))
    return [label, str(requests_), compared, *means, ", ".join(breached) or "-", f"{p:.2g}",
            ", ".join(warnings) or "-"]  # fmt: skip


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--new", type=int, default=10, help="tokens generated")
    parser.add_argument("--at-once", type=int, default=6)
    options = parser.parse_args()
    rows, data = [], {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "experiment.yaml")
        file.write_text(json.dumps(experiment("none", 0.05)))
        flags = {"skip_tokenizer_init": True, "kv_experiment": file, "admin_api_key": "secret"}
        policy, settings = report.ROOT / "policies" / "lava.yaml", ["rate=0.5", "window=8"]
        with serve(options.model, [policy], settings, progress=True, **flags) as server:
            server.session.headers["Authorization"] = "Bearer secret"
            keys = [f"user-{i}" for i in range(options.requests)]
            few = ["gateway"] * max(options.requests // 8, 210)
            # On random text any policy drifts far; both arms must drift alike.
            for label, document, sent in (
                ("none, none", experiment("none", 0.04), keys),
                ("lava, lava", experiment("lava", 1.5), keys),
                (ROW, experiment("none", 0.03, "1 %"), few),
            ):
                found = run(server, document, sent, options)
                data[label] = {name: found[name] for name in ("verdicts", "warnings", "state")}
                rows.append(row(label, len(sent), found))
    text = "Drift in nats per token.\n\n" + report.table(HEADER, rows)
    if data[ROW]["warnings"]:
        text += f"\n\nWith one key for all the server says: {data[ROW]['warnings'][0]}."
    report.publish("experiment_null", "Experiments of equal arms", text, data, options.save)
    wrong = [each for each in rows[:2] if each[5] != "-" or each[7] != "-"]
    sys.exit(bool(wrong or rows[0][3] != "0" or rows[0][4] != "0" or rows[2][7] == "-"))


if __name__ == "__main__":
    main()
