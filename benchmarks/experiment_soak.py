"""Thousands of requests of an experiment while operators and clients do everything that they may.

Random keys, streams and whole answers, requests aborted and connections dropped; meanwhile the
file's coverage changes, an arm is rolled back, policies are switched off and on, a policy is added,
replaced and withdrawn. Each greedy answer must be that of its policy served alone, a key must have
one arm, shares must be as the weights say, and at the end no slot may be in use. SGLang's strict
memory checks run at every step and kill the server when a sum is off. With `--pp` stages have the
model's layers.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import report
import requests
from kvpolicy.evaluation.serving import Server, serve
from kvpolicy.experiments.definition import reading
from kvpolicy.experiments.replica.assignment import assign
from soak import CHECKS, cores_of, leaked, untied
from tqdm import tqdm

ADMIN = "secret"
POLICIES = ("cake", "h2o", "sinks-recent", "snapkv")
EXPERIMENT = {
    "experiment": "soak",
    "targeting_key": ["header:x-smg-routing-key"],
    "coverage": "100 %",
    "default": "snapkv",
    "arms": {
        "control": {"policy": "none", "weight": 2},
        "cake": {"policy": "cake", "weight": 2, "set": {"capacity": 40, "window": 8}},
        "h2o": {"policy": "h2o", "weight": 1, "set": {"heavy": 20, "window": 20}},
        "tight": {"policy": "sinks-recent", "weight": 1, "set": {"capacity": 12}},
    },
    "shadow": {"sample": "10 %", "tokens_per_second": 100_000},
    "metrics": [{"metric": "drift", "role": "guardrail", "margin": 0.1, "clip": 2}],
    "analysis": {"on_fail": "alert"},
}
GIVEN_UP = "tight"  # arm that is rolled back after a third of the requests
UNCOMPARED = ("aborted", "dropped")
ADDED = "added"  # policy that is added, replaced and withdrawn


@dataclass
class Seen:
    """Results of all requests so far.

    Attributes:
        arms: key -> arms that its answers named.
        wrong: sentences on wrong answers and refused operations.
        counts: number of answers by arm or outcome, and of operations.
    """

    arms: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    wrong: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Soak:
    """One server, and the requests and operations sent to it."""

    def __init__(self, server: Server, file: Path, count: int, at_once: int, seed: int) -> None:
        self.server, self.file, self.count, self.at_once = server, file, count, at_once
        rng = np.random.default_rng(seed)
        lengths = np.exp(rng.uniform(0, np.log(400), min(count // 20, 30))).astype(int)
        self.prompts = [rng.integers(20, 500, length).tolist() for length in lengths]
        self.random = random.Random(seed)
        self.seen = Seen()
        self.alone: dict[tuple[int, str], list[int]] = {}
        self.done = 0

    def learn(self) -> None:
        """Notes the answer of every policy to every prompt, asked alone."""
        names = ["none", *POLICIES[:1], "snapkv"]
        names += [f"{arm['policy']}@{name}" for name, arm in EXPERIMENT["arms"].items()
                  if "set" in arm]  # fmt: skip
        pairs = [(i, name) for i in range(len(self.prompts)) for name in names]
        for place, name in tqdm(pairs, desc="one at a time"):
            answer = self.post(place, {"x-kv-policy": name})
            self.alone[place, name] = answer["output_ids"]

    def post(self, place: int, headers: dict[str, str], **more: Any) -> dict[str, Any]:
        """The answer to a prompt."""
        response = requests.post(
            self.server.url + "/generate", json=self.body(place, **more), headers=headers,
            timeout=300,
        )  # fmt: skip
        response.raise_for_status()
        return response.json()

    def body(self, place: int, **more: Any) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": 2 + place % 11, "ignore_eos": True}
        return {"input_ids": self.prompts[place], "sampling_params": sampling, **more}

    def one(self, number: int) -> None:
        """Sends one request: whole, streamed, aborted or dropped, at random."""
        with self.seen.lock:
            place, way = self.random.randrange(len(self.prompts)), self.random.random()
            key = f"user-{self.random.randrange(self.count // 3)}"
        headers = {"x-smg-routing-key": key}
        if way < 0.04:
            self.dropped(place, headers)
        elif way < 0.08:
            self.aborted(place, headers, f"soak-{number}")
        elif way < 0.3:
            self.check(place, key, self.streamed(place, headers))
        else:
            self.check(place, key, self.post(place, headers))
        with self.seen.lock:
            self.done += 1

    def dropped(self, place: int, headers: dict[str, str]) -> None:
        """Sends a request whose client hangs up."""
        body = self.body(place)
        body["sampling_params"]["max_new_tokens"] = 200
        try:
            requests.post(self.server.url + "/generate", json=body, headers=headers, timeout=0.05)
        except requests.RequestException:
            self.count_one("dropped")

    def aborted(self, place: int, headers: dict[str, str], rid: str) -> None:
        """Sends a request and aborts it by id."""
        abort = threading.Timer(
            0.05, lambda: self.server.post("/abort_request", {"rid": rid}, timeout=60)
        )
        abort.start()
        body = self.body(place, rid=rid)
        body["sampling_params"]["max_new_tokens"] = 200
        requests.post(self.server.url + "/generate", json=body, headers=headers, timeout=300)
        abort.join()
        self.count_one("aborted")

    def streamed(self, place: int, headers: dict[str, str]) -> dict[str, Any]:
        """The answer to a streamed request; its last chunk holds all of it."""
        with requests.post(
            self.server.url + "/generate", json=self.body(place, stream=True), headers=headers,
            stream=True, timeout=300,
        ) as response:  # fmt: skip
            lines = [line for line in response.iter_lines() if line.startswith(b"data: {")]
        return json.loads(lines[-1][len(b"data: ") :])

    def count_one(self, what: str) -> None:
        with self.seen.lock:
            self.seen.counts[what] += 1

    def check(self, place: int, key: str, answer: dict[str, Any]) -> None:
        """Compares the answer with its policy's when asked alone, and notes the arm of the key."""
        facts = answer["meta_info"].get("kv_policy", {"policy": "none"})
        policy, arm = facts["policy"], facts.get("arm")
        right = answer["output_ids"] == self.alone[place, policy]
        with self.seen.lock:
            if arm is not None:
                self.seen.arms[key].add(arm)
            self.seen.counts[arm or ("off" if policy == "none" else "default")] += 1
            if not right:
                self.seen.wrong.append(f"prompt {place}, {policy}: {answer['output_ids']}")

    def run(self) -> None:
        """Sends all requests while operators act."""
        stop = threading.Event()
        operator = threading.Thread(target=self.operate, args=(stop,))
        operator.start()
        with ThreadPoolExecutor(self.at_once) as pool:
            for _ in tqdm(pool.map(self.one, range(self.count)), total=self.count, desc="all"):
                pass
        stop.set()
        operator.join()

    def operate(self, stop: threading.Event) -> None:
        """Carries out the operators' actions until `stop` is set."""
        actions = self.actions()
        while not stop.wait(max(self.count / 10_000, 0.1)):
            next(actions)()

    def actions(self) -> Iterator[Any]:
        """The operators' actions, in turn; the rollback once, after a third of the requests."""
        policy = (report.ROOT / "policies" / "snapkv.yaml").read_text()
        rolled_back = False
        for turn in range(10**9):
            if self.done > self.count / 3 and not rolled_back:
                rolled_back = True
                yield lambda: self.ask("POST", "experiment/abort", {"arm": GIVEN_UP})
            coverage = ("100 %", "60 %", "80 %")[turn % 3]
            yield lambda c=coverage: self.file.write_text(json.dumps({**EXPERIMENT, "coverage": c}))
            yield lambda c=coverage: self.ask("PUT", "experiment", {**EXPERIMENT, "coverage": c})
            size = 10 + turn % 20
            yield lambda s=size: self.ask(
                "PUT", f"policies/{ADDED}", {"policy": policy, "set": {"capacity": s, "window": 4}}
            )
            yield lambda: self.ask("POST", "disable", {})
            yield lambda: self.ask("POST", "enable", {})
            yield lambda: self.file.write_text("experiment: [")  # invalid: nothing changes
            yield lambda: self.ask("DELETE", f"policies/{ADDED}", {})

    def ask(self, method: str, path: str, body: Any) -> None:
        response = requests.request(
            method, f"{self.server.url}/kv_policy/{path}", json=body, timeout=300,
            headers={"Authorization": f"Bearer {ADMIN}"},
        )  # fmt: skip
        self.count_one(f"operator: {method} {path}")
        if response.status_code != 200:
            with self.seen.lock:
                self.seen.wrong.append(f"{method} {path}: {response.text[:300]}")


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--at-once", type=int, default=12)
    parser.add_argument("--pp", type=int, default=1, help="--pp-size; on a CPU a core for each")
    options = parser.parse_args()
    flags = {"skip_tokenizer_init": True, "enable_metrics": True, "admin_api_key": ADMIN}
    files = [report.ROOT / "policies" / f"{name}.yaml" for name in POLICIES]
    settings = ["snapkv.capacity=30", "snapkv.window=6"]
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "experiment.yaml")
        file.write_text(json.dumps(EXPERIMENT))
        flags |= {"kv_experiment": file, "kv_experiment_state": Path(folder, "state.json")}
        model, env = options.model, CHECKS
        if options.pp > 1:
            model, env = untied(model, Path(folder, "model")), env | cores_of(options.pp)
            flags["pp_size"] = options.pp
        with serve(model, files, settings, env=env, progress=True, **flags) as server:
            server.session.headers["Authorization"] = f"Bearer {ADMIN}"
            soak = Soak(server, file, options.requests, options.at_once, options.seed)
            soak.learn()
            soak.run()
            time.sleep(2)
            document = server.session.get(server.url + "/kv_policy/experiment", timeout=60).json()
            leaks = leaked(server)
    publish(options, soak, document, leaks, time.perf_counter() - started)


def publish(options: Any, soak: Soak, document: dict, leaks: dict, seconds: float) -> None:
    """Prints and saves the results; exits with 1 if anything was wrong."""
    seen, experiment = soak.seen, reading.read(json.dumps(EXPERIMENT), "soak").require()
    moved = [key for key, arms in seen.arms.items() if len(arms) > 1]
    foreign = [
        key for key, arms in seen.arms.items()
        if arms != {assign(experiment, key, coverage=1.0, seconds=0).arm}
    ]  # fmt: skip
    p_values = document["analysis"]["keys"]["p_values"]
    counts = {
        "requests": soak.count,
        "answers compared": sum(
            n for what, n in seen.counts.items() if what not in UNCOMPARED and ":" not in what
        ),
        "not as alone": len(seen.wrong),
        "keys": len(seen.arms),
        "keys with two arms": len(moved),
        "keys with another arm than their hash's": len(foreign),
        "smallest p of the sample ratio": f"{min(p_values.values()):.2g}",
        "rolled back": ", ".join(document["rolled_back"]) or "-",
        "slots leaked": int(sum(leaks.values())),
        "minutes": round(seconds / 60, 1),
    }
    for problem in seen.wrong[:10]:
        print(problem, file=sys.stderr)
    shares = report.table(["requests", "count"], sorted(seen.counts.items()))
    text = report.table(list(counts), [list(counts.values())]) + f"\n\n{shares}"
    data = {
        **counts,
        "counts": dict(seen.counts),
        "keys_by_arm": document["analysis"]["keys"]["counts"],
        "log": [each["what"] for each in document["log"][-20:]],
    }
    name, title = "experiment_soak", "An experiment under load"
    if options.pp > 1:
        name, title = f"{name}_pp{options.pp}", f"{title}, {options.pp} stages"
    report.publish(name, title, text, data, options.save)
    wrong = seen.wrong or moved or foreign or leaks or min(p_values.values()) < 0.001
    sys.exit(bool(wrong or list(document["rolled_back"]) != [GIVEN_UP]))


if __name__ == "__main__":
    main()
