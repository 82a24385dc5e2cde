"""End to end over sockets: stock SGLang, and policies at several shares, in one run on one machine.

    python benchmarks/serving.py                       Llama 3.1 8B's configuration, random weights
    python benchmarks/serving.py --model FOLDER        a checkpoint
    python benchmarks/serving.py --toy                 the embedded model on a CPU
    python benchmarks/serving.py --draw FILE.json      the picture of an earlier run once more

Servers run one after the other with the same options, except that the first does not load the
plugin and the last has --kv-policy: each policy once per share and, where its parameters need it,
per length. With --together all of them start at once, which a GPU has to hold, and are asked one
at a time, of each size before the next. Prompts of every length are sent at a fixed concurrency
that all serve at once; the shortest also as a crowd for which the pool is too small. Cells for
which --seconds leave no time, starts of servers included, are listed. On a GPU the results go to
docs/performance/, of some policies only under a name of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import checkout  # noqa: F401
import numpy as np
import pictures
import report
import requests
from kvpolicy.dsl.check.policy import load
from kvpolicy.dsl.syntax.library import read_source
from kvpolicy.evaluation.asking.facts import held, lists_of
from kvpolicy.evaluation.serving import Server, ServerFailed, has_gpu, serve, together
from serving_report import PLUGIN_OFF, STOCK, text
from serving_setup import EMBEDDED, NO_PLUGIN, Model, flags_of, gpu_flags, model_of
from shipped import settings
from tqdm import tqdm

POLICIES = "snapkv,adakv,lava,streamingllm"
DECODE_BATCH = re.compile(r"Decode batch, #running-req: (\d+)")


class Wrong(RuntimeError):
    """An answer is not as the request asked."""


@dataclass(frozen=True)
class Chosen:
    """A policy at one share, for one length or all.

    Attributes:
        name: name by which requests choose it; None if they choose none (stock).
        label: name in the report.
        share: share of the prompt to keep.
        tokens: the prompt length it is for; 0 for any.
    """

    name: str | None
    label: str
    share: float = 1.0
    tokens: int = 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--toy", action="store_true", help="the embedded model; no GPU needed")
    parser.add_argument(
        "--model", help="llama-3.1-8b (the default), qwen3-8b, or a checkpoint's folder"
    )
    parser.add_argument("--policies", default=POLICIES)
    parser.add_argument("--shares", default="0.5,0.25,0.1", help="of the prompt kept")
    parser.add_argument(
        "--lengths", default="32768,8192,65536", help="prompt tokens, most wanted first"
    )
    parser.add_argument("--new", type=int, default=128, help="tokens generated")
    parser.add_argument("--at-once", type=int, default=4, help="requests at equal batch")
    parser.add_argument(
        "--crowd", type=float, default=2.5, help="shortest prompts, times what the pool holds"
    )
    parser.add_argument("--cells", default="equal,crowd", help="equal, crowd, or both")
    parser.add_argument(
        "--pool", type=float, help="longest prompts that it holds; default: half a one to spare"
    )
    parser.add_argument("--most", type=int, default=64, help="requests that a server runs at once")
    parser.add_argument("--plugin-off", action="store_true", help="also without --kv-policy")
    parser.add_argument("--together", action="store_true", help="all servers start at once")
    parser.add_argument("--rounds", type=int, default=2, help="at equal batch; a crowd is one")
    parser.add_argument("--seconds", type=float, default=540, help="limit for the whole run")
    parser.add_argument("--server-args", default="", help="further options of both servers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for the results")
    parser.add_argument("--name", help="of the results; default: of the policies")
    parser.add_argument("--draw", type=Path, metavar="JSON", help="only the picture, beside it")
    options = parser.parse_args()
    if options.draw:
        return options
    gpu = has_gpu()
    if not gpu and not options.toy:
        parser.error("there is no GPU; --toy serves the embedded model without one")
    if gpu and not options.toy and options.out is None:
        options.out = report.PERFORMANCE
    if options.toy and options.out and options.out.resolve() == report.PERFORMANCE:
        parser.error("docs/performance/ holds figures of a GPU at full size, not of --toy")
    # A run of some policies must not replace the figures of all.
    all_of_them = options.policies == POLICIES
    of_some = f"serving-{options.policies.replace(',', '-')}"
    options.name = options.name or ("serving" if all_of_them else of_some)
    options.model = options.model or (EMBEDDED if options.toy else "llama-3.1-8b")
    options.lengths = [int(n) for n in options.lengths.split(",")]
    options.shares = [float(share) for share in options.shares.split(",")]
    return options


def server_flags(options: argparse.Namespace, model: Model) -> dict[str, object]:
    """Options of all servers: the pool, and what the measurement needs."""
    longest = max(options.lengths) + options.new
    # Half a request of slack, so that all are admitted in spite of rounding.
    held = options.pool or options.at_once + 0.5
    flags: dict[str, object] = {
        "max_total_tokens": int(held * longest),
        "skip_tokenizer_init": True,
        "enable_metrics": True,
        "decode_log_interval": 1 if options.toy else 8,
    }
    if not options.toy:
        flags |= gpu_flags(options.most)
    return flags | model.flags | flags_of(options.server_args)


def policies(options: argparse.Namespace, folder: Path) -> tuple[list[Path], list[str], list]:
    """Files, settings and choices of every policy at every share, each under its own name."""
    files, given, chosen = [], [], []
    for policy in options.policies.split(","):
        text = read_source(policy).text
        for share in options.shares:
            for tokens, values in by_length(policy, share, options.lengths).items():
                name = f"{policy}-{round(100 * share)}" + (f"-{tokens}" if tokens else "")
                file = folder / f"{name}.yaml"
                renamed = re.sub(r"(?m)^policy: .*$", f"policy: {name}", text, count=1)
                file.write_text(renamed, encoding="utf-8")
                files.append(file)
                given += [f"{name}.{value}" for value in values]
                chosen.append(Chosen(name, f"{policy} {share:.0%}", share, tokens))
    return files, given, chosen


def by_length(policy: str, share: float, lengths: list[int]) -> dict[int, list[str]]:
    """Settings by prompt length; key 0 if they hold for any length."""
    made = {tokens: settings(share, tokens)[policy] for tokens in lengths}
    first = made[lengths[0]]
    rates = [value for value in first if value.startswith("rate=")]
    if not rates and "rate" in load(policy).require().params:
        rates = [f"rate={share}"]
    alike = rates or (first if all(values == first for values in made.values()) else None)
    return {0: alike} if alike else made


# One cell.


def crowd(server: Server, prompts: list, policy: str | None, new: int) -> tuple[list[dict], float]:
    """Answers to all prompts, sent at once and checked to be complete, and seconds for all."""
    server.flush()

    def ask(prompt):
        extra = {"policy": policy} if policy else {}
        return server.generate(input_ids=prompt, max_new_tokens=new, ignore_eos=True, **extra)

    started = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(ask, prompts))
    seconds = time.perf_counter() - started
    if any(answer["meta_info"]["completion_tokens"] != new for answer in answers):
        raise Wrong("an answer is incomplete")
    return answers, seconds


def check(answers: list[dict], chosen: Chosen, lists: int) -> list[float]:
    """Checks that every request was served as asked; returns the share of entries each held."""
    shares = []
    for answer in answers:
        facts, meta = answer["meta_info"].get("kv_policy"), answer["meta_info"]
        if chosen.name is None or chosen.name == "none":
            if facts and facts.get("entries_kept") is not None:
                raise Wrong(f"{chosen.label} answered under a policy: {facts}")
            shares.append(1.0)
            continue
        if not facts or facts["policy"] != chosen.name or "uncompressed" in facts:
            raise Wrong(f"{chosen.label} was not applied: {facts}")
        total = meta["prompt_tokens"] + meta["completion_tokens"] - 1
        fewest = chosen.share * meta["prompt_tokens"] / total
        most = (chosen.share * meta["prompt_tokens"] + meta["completion_tokens"]) / total
        share = held(answer, lists)
        if not fewest - 0.05 < share < most + 0.05:
            raise Wrong(f"{chosen.label} held {share:.3f} of the entries")
        shares.append(share)
    return shares


def cell(server: Server, chosen: Chosen, tokens: int, number: int, options, facts: dict) -> dict:
    """Figures of `number` requests sent at once, over all rounds; a crowd has one round."""
    rng = np.random.default_rng([options.seed, tokens, number])
    made: dict = {"tokens": tokens, "requests": number, "server": chosen.label, "held": []}
    made |= {"ttft": [], "tpot": [], "seconds": [], "at_once": [], "retracted": 0}
    made["share"] = chosen.share
    for _ in range(options.rounds if number == options.at_once else 1):
        prompts = rng.integers(20, facts["highest_token"], (number, tokens)).tolist()
        before = len(server.log_text())
        answers, seconds = crowd(server, prompts, chosen.name, options.new)
        made["held"] += check(answers, chosen, facts["lists"])
        made["seconds"].append(seconds)
        found = [int(n) for n in DECODE_BATCH.findall(server.log_text()[before:])]
        made["at_once"].append(max(found, default=1))
        for meta in (answer["meta_info"] for answer in answers):
            first = meta["first_token_latency"]
            made["ttft"].append(first)
            made["tpot"].append((meta["e2e_latency"] - first) / (options.new - 1))
            made["retracted"] += meta.get("num_retractions") or 0
    made["throughput"] = [number * options.new / seconds for seconds in made["seconds"]]
    return made


def crowded(options: argparse.Namespace, tokens: int, pool: int) -> int:
    """Number of requests of a crowd: `--crowd` times what the pool holds without a policy."""
    return max(options.at_once + 1, int(options.crowd * pool / (tokens + options.new)))


def serve_cells(
    asked: list[tuple[Server, tuple]], options: argparse.Namespace, facts: dict, until: float
) -> None:
    """Measures cells into `facts`, one after the other, while there is time."""
    warm: set[tuple[str, str | None]] = set()
    for server, (chosen, tokens, number) in (bar := tqdm(asked, desc="cells", mininterval=1)):
        what = f"{chosen.label}, {number} x {tokens}"
        bar.set_postfix_str(what)
        if server.process.poll() is not None:
            facts["failed"].append(f"{what}: its server has stopped")
            continue
        if time.monotonic() > until:
            facts["left_out"].append(what)
            continue
        try:
            if (server.url, chosen.name) not in warm:  # compiles the policy's kernels
                warm.add((server.url, chosen.name))
                crowd(server, [[20 + n % 400 for n in range(tokens)]], chosen.name, 2)
            made = cell(server, chosen, tokens, number, options, facts)
        except (Wrong, requests.RequestException) as error:  # the others' figures stand
            facts["failed"].append(f"{what}: {error}")
            if server.process.poll() is not None:
                facts["failed"].append(f"the server stopped: {server.log_text()[-2000:]}")
        else:
            facts["cells"].append(made)
        save(options, facts)


def save(options: argparse.Namespace, facts: dict) -> None:
    """Writes the facts so far."""
    if options.out:
        report.write_json(options.out / f"{options.name}.json", facts)


def asked_of(options: argparse.Namespace, chosen: list, pool: int) -> dict[str, list[tuple]]:
    """Cells of each server, most wanted first: (choice, tokens, requests)."""
    shortest = min(options.lengths)
    equal = [(tokens, options.at_once) for tokens in options.lengths]
    tight = [(shortest, crowded(options, shortest, pool))]
    equal, tight = (
        cells if kind in options.cells.split(",") else []
        for kind, cells in (("equal", equal), ("crowd", tight))
    )
    sizes = [*equal[:1], *tight, *equal[1:]]
    none = Chosen("none", "with the package, no policy")
    made = {STOCK: [(Chosen(None, STOCK), *size) for size in sizes]}
    if options.plugin_off:
        made[PLUGIN_OFF] = [(Chosen(None, PLUGIN_OFF), *size) for size in equal]
    made["policies"] = [
        (each, *size) for size in sizes for each in (*chosen, none) if each.tokens in (0, size[0])
    ]
    return made


def run(options: argparse.Namespace, folder: Path) -> dict:
    """Facts of all servers, run one after the other or, with --together, at once."""
    model = model_of(options.model, folder)
    files, given, chosen = policies(options, folder)
    flags, started = server_flags(options, model), time.monotonic()
    pool = int(flags["max_total_tokens"])
    facts = {
        "command": report.command(),
        "machine": report.machine("sglang", "torch", "triton", "flashinfer-python"),
        "model": model.words,
        "flags": {name: value for name, value in flags.items() if value is not None},
        "highest_token": model.highest,
        "new": options.new,
        "at_once": options.at_once,
        "lists": lists_of(str(model.folder)),
        "starts": {},
        "cells": [],
        "failed": [],
        "left_out": [],
    }
    servers = asked_of(options, chosen, pool)
    until = started + options.seconds
    print(f"all servers: {shlex.join(f'{k}={v}' for k, v in facts['flags'].items())}",
          file=sys.stderr)  # fmt: skip

    @contextlib.contextmanager
    def started_server(label: str) -> Iterator[Server]:
        begun = time.monotonic()
        words = (files, given) if label == "policies" else ((), ())
        env = NO_PLUGIN if label == STOCK else {}
        patience = min(600, max(until - begun, 1))
        asking = {"env": env, "progress": True, "start_timeout": patience, **flags}
        with serve(model.folder, *words, **asking) as server:
            facts["starts"][label] = time.monotonic() - begun
            print(f"{label}: log in {server.log}", file=sys.stderr)
            yield server

    if options.together:
        ask_together(servers, started_server, options, facts, until)
    else:
        ask_in_turn(servers, started_server, options, facts, until)
    facts["seconds"] = time.monotonic() - started
    return facts


Start = Callable[[str], contextlib.AbstractContextManager[Server]]


def ask_in_turn(
    servers: dict[str, list[tuple]], start: Start, options, facts: dict, until: float
) -> None:
    """Runs one server at a time."""
    for label, asked in servers.items():
        begun = time.monotonic()
        # Stock has fewer cells; time that a server leaves over goes to the next ones.
        part = 1.0 if label == "policies" else 0.4 if label == STOCK else 0.25
        end = begun + part * (until - begun)
        try:
            with start(label) as server:
                serve_cells([(server, each) for each in asked], options, facts, end)
        except ServerFailed as error:
            facts["failed"].append(f"{label}: {error}")
        save(options, facts)


def ask_together(
    servers: dict[str, list[tuple]], start: Start, options, facts: dict, until: float
) -> None:
    """Runs all servers; every server is asked one size before any is asked the next."""
    with together({label: start(label) for label in servers}) as running:
        cells = []
        for label, server in running.items():
            if isinstance(server, ServerFailed):
                facts["failed"].append(f"{label}: {server}")
            else:
                cells += [(server, each) for each in servers[label]]
        sizes = list(dict.fromkeys(each[1:] for asked in servers.values() for each in asked))
        cells.sort(key=lambda cell: sizes.index(cell[1][1:]))
        serve_cells(cells, options, facts, until)


def main() -> None:
    options = parse()
    if options.draw:
        facts = json.loads(options.draw.read_text(encoding="utf-8"))
        pictures.serving(facts, options.draw.with_suffix(".png"))
        return
    with tempfile.TemporaryDirectory() as folder:
        facts = run(options, Path(folder))
    report.show(options.name, "Serving", text(facts), facts, options.out)
    if options.out:
        pictures.serving(facts, options.out / f"{options.name}.png")
    if facts["failed"]:
        raise SystemExit(f"serving: {len(facts['failed'])} cells failed")


if __name__ == "__main__":
    main()
