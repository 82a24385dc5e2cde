"""Thousands of random requests against one server: nothing leaks, every answer is right.

Lengths from 1 to 2,000 tokens, shared prefixes, several policies and none, aborts, forced
retraction, a pool too small for all. First every request is served alone (one at a time); then all
again, many at once. Each greedy answer must equal the one served alone; at the end no slot may be
in use. SGLang's strict memory checks run at every step and kill the server when a sum is off.

With `--tp` and `--pp` the model is divided over ranks and stages for the second part, and with
`--dp` there are several copies of it; for the first part there is one process. Each rank, stage
and copy is a scheduler of its own, with its own checks: what one leaked kills the server. With
stages only policies are asked for that they can decide apart; where there is no room for what
stays, or where one stage saves nothing, nothing leaves: such answers, which say so, are not
compared with one by which something left.
Ranks add up in another order than one process does, and where two entries score alike to the last
digits another one may leave. So an answer that differs is asked for once more, alone, of the ranks:
if it is the same again, no other request has changed it, and it counts apart: at most one answer of
200, and none if there are only copies.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import report
import requests
from kvpolicy.dsl.bind.bind import bind
from kvpolicy.dsl.bind.model_config import read_config
from kvpolicy.dsl.bind.stages import why_not_apart
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.syntax.library import shipped
from kvpolicy.evaluation.serving import Server, serve
from safetensors.torch import load_file, save_file
from tqdm import tqdm

CHECKS = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "2",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    "SGLANG_TEST_RETRACT": "1",
    "SGLANG_TEST_RETRACT_INTERVAL": "10",
}
# Small budgets, so that short prompts are compressed too and entries leave while decoding.
POLICIES = {
    "snapkv": ["capacity=48"],
    "adakv": ["capacity=48"],
    "lava": ["capacity=48"],
    "pyramidkv": ["capacity=48"],
    "simlayerkv-prefill": ["window=48", "threshold=0.5"],
    "sinks-recent": ["capacity=48"],
    "fastkv": ["kv_rate=0.2", "tsp_rate=0.4"],
    "asl": ["capacity=48", "window=8", "tau=0.9"],
    "gemfilter": ["capacity=48"],
    "pyramidinfer": ["floor_rate=0.3", "least=16"],
    "streamingllm": ["window=40"],
    "h2o": ["heavy=24", "window=24"],
    "vatp": ["rate=0.1"],
    "tova": ["capacity=48"],
    "roco": ["capacity=16", "newest=4"],
    "simlayerkv": ["window=40", "threshold=0.5"],
    "cake": ["capacity=48", "window=8"],
    "d2o": ["rate=0.2"],
    "d2o-code": ["rate=0.2"],
    "cam": ["window=40"],
    "minicache": ["start=0"],
    "asl-lava-d2o": ["capacity=48", "window=8", "tau=0.9"],
    "ada-pyramidkv": ["capacity=48"],
    "cam-original": ["recent_rate=0.1"],
    "chunkkv": ["capacity=48", "chunk=5"],
    "dynamickv": ["capacity=48"],
    "fastkv-adakv": ["kv_rate=0.2", "tsp_rate=0.4"],
    "keydiff": ["capacity=48"],
    "streamingllm-original": ["window=40"],
    "vatp-snapkv": ["capacity=48"],
}
# Deeper layers of these read a cached prefix as another request computed it, in full, so answers
# depend on the cache. Here each of their requests has a cache of its own (`extra_key`).
APART = ("fastkv", "fastkv-adakv", "asl", "pyramidinfer", "asl-lava-d2o")
IDLE = 40  # most seconds after the last answer; an idle SGLang reports every 30
ROUNDED = 1 / 200  # share of answers that may differ between numbers of ranks


@dataclass(frozen=True)
class Request:
    """One request of the soak."""

    prompt: tuple[int, ...]
    policy: str
    new_tokens: int
    abort_after: float | None  # seconds, or None


def draw(count: int, rng: np.random.Generator, longest: int, names: list[str]) -> list[Request]:
    """Random requests for these policies; one in three starts with one of a few shared texts."""
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
                policy=str(rng.choice([*names, "none"])),
                new_tokens=int(rng.integers(1, 25) if rng.random() < 0.7 else rng.integers(25, 80)),
                abort_after=float(rng.exponential(0.3)) if rng.random() < 0.08 else None,
            )
        )
    return drawn


@dataclass(frozen=True)
class Answer:
    """The answer to a request that was not aborted."""

    ids: list[int]
    compressed: bool
    retractions: int
    as_asked: bool  # False: entries stayed, for want of slots or as none would be saved


def body(request: Request, number: int, new_tokens: int) -> dict:
    """The body of a request to /generate."""
    sent = {
        "input_ids": list(request.prompt),
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": new_tokens,
            "ignore_eos": True,
            "custom_params": {"kv_policy": request.policy},
        },
    }
    return sent | ({"extra_key": f"soak-{number}"} if request.policy in APART else {})


def ask(server: Server, request: Request, number: int) -> Answer:
    """Send a request and wait for its answer."""
    response = server.post("/generate", body(request, number, request.new_tokens))
    response.raise_for_status()
    answer = response.json()
    meta = answer["meta_info"]
    facts = meta.get("kv_policy", {})
    compressed = "entries_kept" in facts or facts.get("folds", 0) > 0
    stayed = facts.get("uncompressed") in ("no_slots", "nothing_saved")
    stayed |= facts.get("skipped_folds", 0) > 0
    return Answer(answer["output_ids"], compressed, meta["num_retractions"], not stayed)


def ask_and_abort(server: Server, request: Request, number: int) -> None:
    """Send a request and abort it by its id after `abort_after` seconds, in any state."""
    rid = f"soak-{number}"
    timer = threading.Timer(
        request.abort_after, lambda: server.post("/abort_request", {"rid": rid})
    )
    timer.start()
    try:
        server.post("/generate", {**body(request, number, 200), "rid": rid})
    except requests.RequestException as error:
        raise SystemExit(f"soak: an aborted request broke its connection: {error}") from error
    finally:
        timer.join()


def names_for(model: str, stages: int) -> list[str]:
    """Shipped policies that `stages` pipeline stages serve."""
    if missing := {*shipped()} - {*POLICIES}:
        raise SystemExit(f"soak: `POLICIES` lacks {', '.join(sorted(missing))}")
    shape = read_config(model).shape
    return [
        name for name in POLICIES
        if stages == 1
        or why_not_apart(bind(load(name).require(), shape, settings_of(name))) is None
    ]  # fmt: skip


def untied(model: str, folder: Path) -> str:
    """The model with an untied output layer, which SGLang's last stage needs; its folder."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not config.get("tie_word_embeddings"):
        return model
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    report.write_json(folder / "config.json", config | {"tie_word_embeddings": False})
    return str(folder)


def settings_of(name: str) -> dict[str, str]:
    """Values of a policy's parameters, by name."""
    pairs = (each.split("=") for each in POLICIES[name])
    return dict(pairs)


def cores_of(ranks: int) -> dict[str, str]:
    """Environment that binds each rank to a core; ranks share cores if there are too few."""
    cores = [str(rank % (os.cpu_count() or 1)) for rank in range(ranks)]
    return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(cores)}


def one_at_a_time(server: Server, drawn: list[Request]) -> list[Answer | None]:
    """Answers to requests sent one at a time; None for those to be aborted, not sent."""
    return [
        ask(server, request, number) if request.abort_after is None else None
        for number, request in enumerate(tqdm(drawn, desc="one at a time"))
    ]


def storm(server: Server, drawn: list[Request], at_once: int) -> list[Answer | None]:
    """Answers to all requests, sent many at once; None for those aborted."""

    def one(item):
        number, request = item
        if request.abort_after is None:
            return ask(server, request, number)
        return ask_and_abort(server, request, number)

    with ThreadPoolExecutor(at_once) as pool:
        return list(tqdm(pool.map(one, enumerate(drawn)), total=len(drawn), desc="all at once"))


def answered(
    alone: list[Answer | None], together: list[Answer | None]
) -> list[tuple[int, Answer, Answer]]:
    """(Number, answer alone, answer together) of requests answered and compressed alike."""
    both = enumerate(zip(alone, together, strict=True))
    return [(i, a, b) for i, (a, b) in both if a and b and a.as_asked == b.as_asked]


def leaked(server: Server) -> dict[str, float]:
    """Slots still in use on an idle, flushed server, by metric; empty if there are none.

    Waits up to IDLE seconds, as SGLang's idle schedulers update their metrics only now and then.
    """
    watched = ("sglang:num_used_tokens", "sglang:kv_policy_private_slots")
    end = time.monotonic() + IDLE
    while True:
        server.flush()
        time.sleep(1)
        found = {k: v for k, v in server.metrics().items() if k.startswith(watched)}
        missing = [w for w in watched if not any(k.startswith(w) for k in found)]
        if missing:
            raise SystemExit(f"soak: the server has no metric {missing[0]}")
        left = {k: v for k, v in found.items() if v}
        if not left or time.monotonic() > end:
            return left


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--longest", type=int, default=2000, help="prompt tokens")
    parser.add_argument("--at-once", type=int, default=24)
    parser.add_argument("--tp", type=int, default=1, help="--tp-size; on a CPU a core for each")
    parser.add_argument("--pp", type=int, default=1, help="--pp-size, of so many ranks each")
    parser.add_argument("--dp", type=int, default=1, help="--dp-size, of so many stages each")
    parser.add_argument("--mixed", action="store_true", help="--enable-mixed-chunk")
    parser.add_argument("--pool", type=int, default=8000, help="--max-total-tokens")
    options = parser.parse_args()
    divided = {"dp": options.dp, "pp": options.pp, "tp": options.tp}
    names, parts = names_for(options.model, options.pp), math.prod(divided.values())
    drawn = draw(options.requests, np.random.default_rng(options.seed), options.longest, names)
    policies = [report.ROOT / "policies" / f"{name}.yaml" for name in names]
    settings = [f"{name}.{value}" for name in names for value in POLICIES[name]]
    flags = {
        "max_total_tokens": options.pool,
        "chunked_prefill_size": 256,
        "enable_mixed_chunk": options.mixed,
        "skip_tokenizer_init": True,
        "enable_metrics": True,
    }
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = options.model if options.pp == 1 else untied(options.model, Path(folder))
        start = partial(serve, model, policies, settings, progress=True, **flags)
        server = stack.enter_context(start(env=CHECKS))
        alone = one_at_a_time(server, drawn)
        if parts > 1:
            stack.close()
            sizes = {f"{part}_size": number for part, number in divided.items()}
            server = stack.enter_context(start(env=CHECKS | cores_of(parts), **sizes))
        together = storm(server, drawn, options.at_once)
        leaks = leaked(server)
        of_ranks = {}
        if parts > 1:
            differ = [i for i, a, b in answered(alone, together) if a.ids != b.ids]
            of_ranks = {i: ask(server, drawn[i], i) for i in differ}
    pairs = answered(alone, together)
    rounded = [i for i, again in of_ranks.items() if again.ids == together[i].ids]
    different = [i for i, a, b in pairs if a.ids != b.ids and i not in rounded]
    for i in different[:10]:
        print(f"request {i} ({drawn[i].policy}, {len(drawn[i].prompt)} tokens):", file=sys.stderr)
        print(f"  alone    {alone[i]}\n  together {together[i]}", file=sys.stderr)
    counts = {
        "requests": len(drawn),
        "answers compared": len(pairs),
        "of these compressed": sum(b.compressed for _, _, b in pairs),
        "of these retracted": sum(b.retractions > 0 for _, _, b in pairs),
        "different": len(different),
        "aborted": sum(x is None for x in together),
        "slots leaked": int(sum(leaks.values())),
        "minutes": round((time.perf_counter() - started) / 60, 1),
    }
    text = report.table(list(counts), [list(counts.values())])
    data = {**counts, "which differ": different, "leaks": leaks}
    if parts > 1:
        listed = [f"`{drawn[i].policy}`, {len(drawn[i].prompt)} tokens" for i in rounded]
        text += (
            f"\n\n{len(rounded)} answers differ from those of one process and are the same of "
            f"these {parts} one at a time: {'; '.join(listed) or 'none'}."
        )
        data["which differ of one rank"] = rounded
    several = {part: number for part, number in divided.items() if number > 1}
    name_parts = ["soak", *(f"{part}{number}" for part, number in several.items())]
    title_parts = ["Soak", *(f"--{part}-size {number}" for part, number in several.items())]
    if options.mixed:
        name_parts.append("mixed")
        title_parts.append("--enable-mixed-chunk")
    report.publish("_".join(name_parts), " ".join(title_parts), text, data, options.save)
    may_differ = 0 if parts == options.dp else ROUNDED * len(pairs)
    sys.exit(bool(different or leaks or len(rounded) > may_differ))


if __name__ == "__main__":
    main()
