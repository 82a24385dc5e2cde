"""End to end over sockets: stock SGLang, and policies at several shares, in one run on one machine.

    python benchmarks/serving.py                       Llama 3.1 8B's configuration, random weights
    python benchmarks/serving.py --toy                 the embedded model on a CPU
    python benchmarks/serving.py --draw FILE.json      the picture of an earlier run once more

Two servers run one after the other with the same options, except that the second has --kv-policy:
each policy once per share and, where its parameters need it, per length. Prompts of every length
are sent at a fixed concurrency that both serve at once; the shortest also as a crowd for which the
pool is too small. Cells for which --seconds leave no time are listed. On a GPU the results go to
docs/performance/, of some policies only under a name of their own.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import tempfile
import time
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
from kvpolicy.evaluation.serving import Server, has_gpu, serve
from serving_report import STOCK, text
from shipped import settings
from tqdm import tqdm

POLICIES = "snapkv,adakv,lava,streamingllm"
DECODE_BATCH = re.compile(r"Decode batch, #running-req: (\d+)")
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "torch_dtype": "bfloat16",
}


class Wrong(RuntimeError):
    """An answer is not what was asked for."""


@dataclass(frozen=True)
class Chosen:
    """A policy at one share for one length, under a name of its own.

    Attributes:
        name: by which requests choose it; None: none is chosen (stock).
        label: in the report.
        share: of the prompt, as asked for.
        tokens: the only length it is for; 0: any.
    """

    name: str | None
    label: str
    share: float = 1.0
    tokens: int = 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--toy", action="store_true", help="the embedded model; no GPU needed")
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
    parser.add_argument("--rounds", type=int, default=2, help="at equal batch; a crowd is one")
    parser.add_argument("--seconds", type=float, default=540, help="limit for the whole run")
    parser.add_argument("--server-args", default="", help="further options of both servers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for the results")
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
    # Some of the policies must not replace the figures of all of them.
    all_of_them = options.policies == POLICIES
    options.name = "serving" if all_of_them else f"serving-{options.policies.replace(',', '-')}"
    options.lengths = [int(n) for n in options.lengths.split(",")]
    options.shares = [float(share) for share in options.shares.split(",")]
    return options


def flags_of(text: str) -> dict[str, object]:
    """`--a b --c` -> {"a": "b", "c": True}."""
    made: dict[str, object] = {}
    name = None
    for word in shlex.split(text):
        if word.startswith("--"):
            name = word[2:].replace("-", "_")
            made[name] = True
        elif name is None:
            raise SystemExit(f"serving: --server-args: `{word}` follows no option")
        else:
            made[name] = word
    return made


def server_flags(options: argparse.Namespace) -> dict[str, object]:
    """Options of both servers: the defaults, the pool, and what counts time and requests."""
    longest = max(options.lengths) + options.new
    flags: dict[str, object] = {
        # Half a request more, so that as many are admitted in spite of rounding.
        "max_total_tokens": int((options.at_once + 0.5) * longest),
        "skip_tokenizer_init": True,
        "enable_metrics": True,
        "decode_log_interval": 1 if options.toy else 8,
    }
    if not options.toy:
        # Stock defaults instead of what the tests use on a GPU.
        flags |= {"attention_backend": None, "dtype": None, "disable_cuda_graph": None}
        flags["load_format"] = "dummy"
    return flags | flags_of(options.server_args)


def policies(options: argparse.Namespace, folder: Path) -> tuple[list[Path], list[str], list]:
    """Files, settings and choices: every policy at every share, under names of their own."""
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
    """Settings by prompt length; those for any length stand at 0."""
    made = {tokens: settings(share, tokens)[policy] for tokens in lengths}
    rates = [value for value in made[lengths[0]] if value.startswith("rate=")]
    if not rates and "rate" in load(policy).require().params:
        rates = [f"rate={share}"]
    return {0: rates} if rates else made


# One cell.


def crowd(server: Server, prompts: list, policy: str | None, new: int) -> tuple[list[dict], float]:
    """All prompts at once, each answered in full length; answers and seconds for all."""
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
    """That every request was served as asked; the share of the entries that each held."""
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


def cell(server: Server, chosen: Chosen, tokens: int, number: int, options, lists: int) -> dict:
    """Times of `number` requests sent at once, over the rounds; a crowd has one."""
    rng = np.random.default_rng([options.seed, tokens, number])
    highest = 500 if options.toy else 100_000
    made: dict = {"tokens": tokens, "requests": number, "server": chosen.label, "held": []}
    made |= {"ttft": [], "tpot": [], "seconds": [], "at_once": [], "retracted": 0}
    made["share"] = chosen.share
    for _ in range(options.rounds if number == options.at_once else 1):
        prompts = rng.integers(20, highest, (number, tokens)).tolist()
        before = len(server.log_text())
        answers, seconds = crowd(server, prompts, chosen.name, options.new)
        made["held"] += check(answers, chosen, lists)
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
    """Requests of a crowd: some times what the pool holds without a policy."""
    return max(options.at_once + 1, int(options.crowd * pool / (tokens + options.new)))


def serve_cells(server: Server, asked: list[tuple], options, facts: dict, until: float) -> None:
    """Fills in the cells for which there is time."""
    warm: set[str | None] = set()
    for chosen, tokens, number in (bar := tqdm(asked, desc="cells", mininterval=1)):
        bar.set_postfix_str(f"{chosen.label}, {number} x {tokens}")
        if time.monotonic() > until:
            facts["left_out"].append(f"{chosen.label}, {number} x {tokens}")
            continue
        try:
            if chosen.name not in warm:  # what is compiled for a policy, is compiled now
                warm.add(chosen.name)
                crowd(server, [[20 + n % 400 for n in range(tokens)]], chosen.name, 2)
            made = cell(server, chosen, tokens, number, options, facts["lists"])
        except (Wrong, requests.RequestException) as error:  # the others' figures stand
            facts["failed"].append(f"{chosen.label}, {number} x {tokens}: {error}")
            if server.process.poll() is not None:
                facts["failed"].append(f"the server stopped: {server.log_text()[-2000:]}")
                return
        else:
            facts["cells"].append(made)
        if options.out:
            report.write_json(options.out / f"{options.name}.json", facts)


def run(options: argparse.Namespace, folder: Path) -> dict:
    """Both servers, one after the other."""
    model = report.ROOT / "examples" / "model-tiny" if options.toy else folder / "model"
    if not options.toy:
        model.mkdir()
        (model / "config.json").write_text(json.dumps(LLAMA))
    files, given, chosen = policies(options, folder)
    flags, started = server_flags(options), time.monotonic()
    pool = flags["max_total_tokens"]
    facts = {
        "command": report.command(),
        "machine": report.machine("sglang", "torch", "triton", "flashinfer-python"),
        "flags": {name: value for name, value in flags.items() if value is not None},
        "new": options.new,
        "at_once": options.at_once,
        "lists": lists_of(str(model)),
        "starts": {},
        "cells": [],
        "failed": [],
        "left_out": [],
    }
    shortest = min(options.lengths)
    equal = [(tokens, options.at_once) for tokens in options.lengths]
    sizes = [equal[0], (shortest, crowded(options, shortest, int(pool))), *equal[1:]]
    none = Chosen("none", "with the package, no policy")
    stock = [(Chosen(None, STOCK), *size) for size in sizes]
    ours = [
        (each, *size) for size in sizes for each in (none, *chosen) if each.tokens in (0, size[0])
    ]
    until = started + options.seconds
    # Stock has fewer cells; what it leaves of its half of the time the other server has.
    for label, words, asked, share in (
        (STOCK, ([], []), stock, 0.4), ("policies", (files, given), ours, 1.0)
    ):  # fmt: skip
        begun = time.monotonic()
        end = begun + share * (until - begun)
        print(f"{label}: {shlex.join(f'{k}={v}' for k, v in facts['flags'].items())}",
              file=sys.stderr)  # fmt: skip
        with serve(model, *words, progress=True, start_timeout=600, **flags) as server:
            facts["starts"][label] = time.monotonic() - begun
            print(f"{label}: log in {server.log}", file=sys.stderr)
            serve_cells(server, asked, options, facts, end)
    facts["seconds"] = time.monotonic() - started
    return facts


def main() -> None:
    options = parse()
    if options.draw:
        facts = json.loads(options.draw.read_text(encoding="utf-8"))
        pictures.serving(facts, options.draw.with_suffix(".png"))
        return
    with tempfile.TemporaryDirectory() as folder:
        facts = run(options, Path(folder))
    report.show(options.name, "Serving", text(facts, options.toy), facts, options.out)
    if options.out:
        pictures.serving(facts, options.out / f"{options.name}.png")
    if facts["failed"]:
        raise SystemExit(f"serving: {len(facts['failed'])} cells failed")


if __name__ == "__main__":
    main()
