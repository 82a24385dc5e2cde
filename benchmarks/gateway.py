"""Cache-aware routing beside policies: the hit rate of two replicas behind SGLang's gateway `smg`.

Conversations of which several begin with the same text are sent through the gateway, which knows
prompts but no policy: without a policy and with each, by cache-aware routing and in turns. The hit
rate is what replicas say they found in their radix caches, of all prompt tokens. Before anything is
printed it is checked that every answer is complete and ran under what it asked for, and that what
is sent in turns is sent to both replicas.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import report
import requests
from kvpolicy.evaluation.serving import Server, free_port, serve
from tqdm import tqdm

SETTINGS = {
    "snapkv": ["capacity=128", "window=16"],
    "h2o": ["heavy=64", "window=64"],
    "lava": ["capacity=128", "window=16"],
}
ROUTINGS = ("cache_aware", "round_robin")
HEADER = ("routing", "policy", "requests", "prompt tokens", "hit rate, %", "busiest replica, %",
          "seconds")  # fmt: skip
NEW = 4  # tokens of an answer
PATIENCE = 180  # seconds; a machine may be busy
WORKER = "x-smg-routed-worker-id"  # header of answers


@contextlib.contextmanager
def gateway(urls: Sequence[str], *words: str) -> Iterator[str]:
    """`smg` in front of servers; yields its address.

    Raises:
        SystemExit: it does not answer within PATIENCE.
    """
    port, prometheus = free_port(), free_port()
    command = [sys.executable, "-P", "-m", "smg", "launch", "--host=127.0.0.1", f"--port={port}"]
    command += ["--prometheus-host=127.0.0.1", f"--prometheus-port={prometheus}", *words]
    command += ["--disable-tokenizer-autoload", "--log-level=warn", "--worker-urls", *urls]
    address, end = f"http://127.0.0.1:{port}", time.monotonic() + PATIENCE
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            while True:
                with contextlib.suppress(requests.ConnectionError):
                    if requests.get(f"{address}/readiness", timeout=5).ok:
                        break
                if process.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    raise SystemExit(
                        f"gateway: smg does not answer:\n{log.read().decode()[-3000:]}"
                    )
                time.sleep(0.1)
            yield address
        finally:
            process.kill()
            process.wait()


def ask(url: str, text: str, policy: str | None, **headers: str) -> requests.Response:
    """One answer of /generate, under `policy`; None leaves the choice to the server."""
    sampling = {"max_new_tokens": NEW, "temperature": 0, "ignore_eos": True}
    if policy is not None:
        sampling["custom_params"] = {"kv_policy": policy}
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    body = {"text": text, "sampling_params": sampling}
    return requests.post(f"{url}/generate", json=body, headers=headers, timeout=300)


def conversations(options: argparse.Namespace, seed: str) -> list[str]:
    """Prompts in random order: those of a group share their beginning and differ in their end."""
    rng = random.Random(f"{options.seed} {seed}")
    vocabulary = json.loads((Path(options.model) / "tokenizer.json").read_text())["model"]["vocab"]
    known = [word for word in vocabulary if word.isalpha()]  # other words all become one token
    made = []
    for _ in range(options.groups):
        words = rng.choices(known, k=options.shared)
        for _ in range(options.turns):
            made.append(" ".join([*words, *rng.choices(known, k=options.own)]))
    rng.shuffle(made)
    return made


def hits(url: str, servers: Sequence[Server], policy: str, prompts: list[str]) -> dict:
    """Hit rate and load of the replicas for prompts sent through the gateway."""
    for server in servers:
        server.flush()
    started = time.perf_counter()
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda prompt: ask(url, prompt, policy), prompts))
    seconds = time.perf_counter() - started
    metas = []
    for answer in answers:
        answer.raise_for_status()
        metas.append(answer.json()["meta_info"])
        served = (metas[-1].get("kv_policy") or {}).get("policy")
        wanted = None if policy == "none" else policy
        if metas[-1]["completion_tokens"] != NEW or served != wanted:
            raise SystemExit(f"gateway: {policy} was asked for and this came: {metas[-1]}")
    workers = [answer.headers[WORKER] for answer in answers]
    tokens = sum(meta["prompt_tokens"] for meta in metas)
    return {
        "requests": len(prompts),
        "tokens": tokens,
        "hit_rate": sum(meta["cached_tokens"] for meta in metas) / tokens,
        "busiest": max(workers.count(each) for each in set(workers)) / len(workers),
        "seconds": seconds,
    }


def parse() -> argparse.Namespace:
    parser = report.arguments(__doc__)
    parser.add_argument("--policies", default=",".join(SETTINGS))
    parser.add_argument("--groups", type=int, default=16, help="of prompts that begin alike")
    parser.add_argument("--turns", type=int, default=6, help="prompts of a group")
    parser.add_argument("--shared", type=int, default=200, help="words that a group shares")
    parser.add_argument("--own", type=int, default=30, help="words that each prompt adds")
    return parser.parse_args()


def main() -> None:
    options = parse()
    names = options.policies.split(",")
    files = [report.ROOT / "policies" / f"{name}.yaml" for name in names]
    given = [f"{name}.{value}" for name in names for value in SETTINGS[name]]
    rows, data = [], {}
    with contextlib.ExitStack() as opened:
        servers = [
            opened.enter_context(serve(options.model, files, given, progress=True))
            for _ in range(2)
        ]
        urls = [server.url for server in servers]
        bar = opened.enter_context(tqdm(total=len(ROUTINGS) * (1 + len(names)), desc="runs"))
        for routing in ROUTINGS:
            with gateway(urls, f"--policy={routing}") as url:
                for policy in ("none", *names):
                    # The gateway remembers prompts, so each policy gets new ones of the same kind.
                    made = hits(url, servers, policy, conversations(options, policy))
                    if routing == "round_robin" and made["busiest"] > 0.6:
                        raise SystemExit(f"gateway: {made['busiest']:.0%} went to one replica")
                    data[f"{routing} {policy}"] = made
                    rows.append(
                        [routing, policy, made["requests"], f"{made['tokens']:,}",
                         f"{100 * made['hit_rate']:.1f}", f"{100 * made['busiest']:.0f}",
                         f"{made['seconds']:.1f}"]
                    )  # fmt: skip
                    bar.update()
    text = (
        f"Two replicas behind smg; {options.groups} groups of {options.turns} prompts that share "
        f"their first {options.shared} words and go on with {options.own} of their own, in a "
        "random order, two at a time. A prefix that is found ends before the policy's observation "
        "window; h2o adds up what every token of the prompt says, so that it finds none.\n\n"
        + report.table(HEADER, rows)
    )
    report.publish("gateway", "Cache-aware routing beside policies", text, data, options.save)


if __name__ == "__main__":
    main()
