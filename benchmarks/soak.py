"""Thousands of random requests against one server: nothing leaks, every answer is right.

Lengths from 1 to 2,000 tokens, shared prefixes, several policies and none, aborts, forced
retraction, a pool too small for all. First every request is served alone (one at a time); then all
again, many at once. Each greedy answer must equal the one served alone; at the end no slot may be
in use. SGLang's strict memory checks run at every step and kill the server when a sum is off.
"""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import report
import requests
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from serving import Server, serve

CHECKS = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "2",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    "SGLANG_TEST_RETRACT": "1",
    "SGLANG_TEST_RETRACT_INTERVAL": "10",
}
POLICIES = ("snapkv", "adakv", "lava", "pyramidkv", "simlayerkv-prefill", "sinks-recent")
SETTINGS = (
    *(f"{p}.capacity=48" for p in ("snapkv", "adakv", "lava", "pyramidkv")),
    "simlayerkv-prefill.window=48",
    "simlayerkv-prefill.threshold=0.5",
    "sinks-recent.capacity=48",
)


@dataclass(frozen=True)
class Request:
    """One request of the soak."""

    prompt: tuple[int, ...]
    policy: str
    new_tokens: int
    abort_after: float | None  # seconds, or None


def draw(count: int, rng: np.random.Generator, longest: int) -> list[Request]:
    """Random requests; one in three starts with one of a few shared texts."""
    shared = [rng.integers(20, 500, longest // 2) for _ in range(4)]
    drawn = []
    for _ in range(count):
        length = int(np.exp(rng.uniform(0, np.log(longest))))
        prompt = rng.integers(20, 500, length)
        if rng.random() < 1 / 3:
            head = shared[rng.integers(len(shared))][: rng.integers(1, longest // 2)]
            prompt = np.concatenate([head, prompt])[:longest]
        drawn.append(
            Request(
                prompt=tuple(int(t) for t in prompt),
                policy=str(rng.choice([*POLICIES, "none"])),
                new_tokens=int(rng.integers(1, 25) if rng.random() < 0.7 else rng.integers(25, 80)),
                abort_after=float(rng.exponential(0.3)) if rng.random() < 0.08 else None,
            )
        )
    return drawn


@dataclass(frozen=True)
class Answer:
    """What came back for a request that was not aborted."""

    ids: list[int]
    compressed: bool
    retractions: int


def ask(server: Server, request: Request) -> Answer:
    """The whole answer."""
    options = {"max_new_tokens": request.new_tokens, "ignore_eos": True}
    answer = server.generate(input_ids=request.prompt, policy=request.policy, **options)
    meta = answer["meta_info"]
    compressed = "entries_kept" in meta.get("kv_policy", {})
    return Answer(answer["output_ids"], compressed, meta["num_retractions"])


def ask_and_abort(server: Server, request: Request, rid: str) -> None:
    """Send a request and abort it by its id after a while, wherever it is by then."""
    timer = threading.Timer(
        request.abort_after, lambda: server.post("/abort_request", {"rid": rid})
    )
    timer.start()
    body = {
        "input_ids": list(request.prompt),
        "rid": rid,
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": 200,
            "ignore_eos": True,
            "custom_params": {"kv_policy": request.policy},
        },
    }
    try:
        server.post("/generate", body)
    except requests.RequestException as error:
        raise SystemExit(f"soak: an aborted request broke its connection: {error}") from error
    finally:
        timer.join()


def storm(server: Server, drawn: list[Request], at_once: int) -> list[Answer | None]:
    """All requests, many at once; None for those that were aborted."""

    def one(item):
        number, request = item
        if request.abort_after is None:
            return ask(server, request)
        return ask_and_abort(server, request, f"soak-{number}")

    with ThreadPoolExecutor(at_once) as pool:
        return list(tqdm(pool.map(one, enumerate(drawn)), total=len(drawn), desc="all at once"))


def leaked(server: Server) -> dict[str, float]:
    """Slots still in use on an idle, flushed server; empty when there are none."""
    server.flush()
    time.sleep(1)
    watched = ("sglang:num_used_tokens", "sglang:kv_policy_private_slots")
    found = {k: v for k, v in server.metrics().items() if k.startswith(watched)}
    missing = [w for w in watched if not any(k.startswith(w) for k in found)]
    if missing:
        raise SystemExit(f"soak: the server has no metric {missing[0]}")
    return {k: v for k, v in found.items() if v}


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--longest", type=int, default=2000, help="prompt tokens")
    parser.add_argument("--at-once", type=int, default=24)
    parser.add_argument("--pool", type=int, default=8000, help="--max-total-tokens")
    options = parser.parse_args()
    drawn = draw(options.requests, np.random.default_rng(options.seed), options.longest)
    policies = [report.ROOT / "policies" / f"{p}.yaml" for p in POLICIES]
    flags = {
        "max_total_tokens": options.pool,
        "chunked_prefill_size": 256,
        "skip_tokenizer_init": True,
        "enable_metrics": True,
    }
    started = time.perf_counter()
    with serve(options.model, policies, SETTINGS, env=CHECKS, progress=True, **flags) as server:
        alone = [
            ask(server, r) if r.abort_after is None else None
            for r in tqdm(drawn, desc="one at a time")
        ]
        together = storm(server, drawn, options.at_once)
        leaks = leaked(server)
    pairs = [(i, a, b) for i, (a, b) in enumerate(zip(alone, together, strict=True)) if a and b]
    different = [i for i, a, b in pairs if a.ids != b.ids]
    for i in different[:10]:
        print(f"request {i} ({drawn[i].policy}, {len(drawn[i].prompt)} tokens):", file=sys.stderr)
        print(f"  alone    {alone[i]}\n  together {together[i]}", file=sys.stderr)
    counts = {
        "requests": len(drawn),
        "answers compared": len(pairs),
        "of these compressed": sum(b.compressed for _, _, b in pairs),
        "of these retracted": sum(b.retractions > 0 for _, _, b in pairs),
        "different": len(different),
        "aborted": len(drawn) - len(pairs),
        "slots leaked": int(sum(leaks.values())),
        "minutes": round((time.perf_counter() - started) / 60, 1),
    }
    text = report.table(list(counts), [list(counts.values())])
    data = {**counts, "which differ": different, "leaks": leaks}
    report.publish("soak", "Soak", text, data, options.save)
    sys.exit(bool(different or leaks))


if __name__ == "__main__":
    main()
