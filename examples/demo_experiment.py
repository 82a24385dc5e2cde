"""An experiment on the embedded model: a good arm is cleared, a bad one is rolled back by itself.

Starts a server with `--kv-experiment examples/experiments/demo.yaml` on a free loopback port and
sends it questions of many users, of several kinds and lengths, until both arms are decided. Then
writes the report, one page that needs nothing else.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
from kvpolicy.evaluation.cli import main as kvpolicy
from kvpolicy.evaluation.serving import Server, ServerFailed, serve
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent / "train"))
import tasks

ROOT = Path(__file__).parents[1]
POLICIES = [ROOT / "policies" / f"{name}.yaml" for name in ("lava", "sinks-recent")]
KINDS = ("distractors", "niah")
AT_ONCE = 4  # requests in flight
LOOK = 10  # requests sent between two readings of the experiment


def questions(users: int, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Endless pairs of a user and the body of a request."""
    rng = np.random.default_rng(seed)
    for number in itertools.count():
        length = int(rng.integers(160, 360))
        sampling = {"max_new_tokens": 12, "temperature": 0.7, "ignore_eos": True}
        text = tasks.sample(KINDS[number % len(KINDS)], length, rng).text
        body = {"text": text, "sampling_params": sampling}
        yield f"user-{rng.integers(users)}", body


def ask(server: Server, user: str, body: dict[str, Any]) -> None:
    """Send one request of a user."""
    headers = {"x-smg-routing-key": user}
    server.session.post(server.url + "/generate", json=body, headers=headers).raise_for_status()


def look(server: Server) -> dict[str, Any]:
    """The experiment's document, as the server reports it now."""
    response = server.session.get(server.url + "/kv_policy/experiment", timeout=60)
    response.raise_for_status()
    return response.json()


def drift(document: dict[str, Any], arm: str) -> dict[str, Any]:
    """The verdict on an arm's drift."""
    verdicts = document["verdicts"]
    return next(each for each in verdicts if (each["arm"], each["metric"]) == (arm, "drift"))


def decided(document: dict[str, Any]) -> bool:
    """Whether each arm but control is rolled back or cleared."""
    _, *arms = document["experiment"]["arms"]
    gone = document["rolled_back"]
    return all(arm in gone or drift(document, arm)["outcome"] == "cleared" for arm in arms)


def run(server: Server, most: int, seed: int) -> tuple[dict[str, Any], dict[str, int]]:
    """Send traffic until all arms are decided; the last document, and requests sent by arm."""
    needed: dict[str, int] = {}
    stream, sent = questions(users=300, seed=seed), 0
    document = look(server)
    bar = tqdm(total=most, desc="requests", unit="")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        pending: set[Any] = set()
        while not decided(document) and sent < most:
            while len(pending) < AT_ONCE:
                pending.add(pool.submit(ask, server, *next(stream)))
                sent += 1
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for each in done:
                each.result()
            bar.update(len(done))
            if sent % LOOK < len(done):
                document = look(server)
                _, *arms = document["experiment"]["arms"]
                for arm in arms:
                    outcome = drift(document, arm)["outcome"]
                    if outcome != "undecided" and arm not in needed:
                        needed[arm] = sent
                        bar.write(f"{sent:5} requests: {arm} is {outcome}")
        wait(pending)
    bar.close()
    return look(server), needed


def told(document: dict[str, Any], needed: dict[str, int]) -> list[str]:
    """The outcome in words, a line for each arm."""
    lines = []
    for arm, about in document["experiment"]["arms"].items():
        found = drift(document, arm)
        memory = document["analysis"]["arms"][arm]["tallies"]["kv_bytes_per_prompt_token"]
        held = f"{memory[1] / max(memory[0], 1) / 1024:.2f} KiB per prompt token"
        what = "control" if found["role"] == "info" else found["outcome"]
        after = f" after {needed[arm]} requests" if arm in needed else ""
        rolled = ", rolled back by itself" if arm in document["rolled_back"] else ""
        lines.append(
            f"{arm:8} {about['policy']:13} drift {found['mean']:.4f} nats per token in "
            f"{found['samples']:3} samples, {held}: {what}{after}{rolled}"
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--most", type=int, default=3000, help="requests at most")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "experiment.html")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    flags = {"kv_experiment": ROOT / "examples" / "experiments" / "demo.yaml"}
    model, settings = ROOT / "examples" / "model-small", ["lava.window=8"]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with serve(model, POLICIES, settings, progress=True, **flags) as server:
            document, needed = run(server, options.most, options.seed)
            words = ["experiment", "report", "--url", server.url, "--out", str(options.out)]
            status = kvpolicy(words)
    except ServerFailed as error:
        print(error, file=sys.stderr)
        return 1
    print("\n" + "\n".join(told(document, needed)))
    for warning in document["warnings"]:
        print(warning)
    print(f"\nthe report: {os.path.relpath(options.out)}")
    return status or int(not decided(document))


if __name__ == "__main__":
    sys.exit(main())
