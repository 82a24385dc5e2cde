"""Whether servers answer rightly on this machine: without the plugin, with it off, with policies.

    python benchmarks/gpu_server.py --out FOLDER         two layers of Llama 3.1 8B, random weights
    python benchmarks/gpu_server.py --toy --out FOLDER   the embedded model on a CPU

Greedy answers to the same prompts, one at a time: by stock SGLang twice, with the package installed
and no policy named, and by requests without a policy on a server that has some. Then a batch in
which requests without a policy and of all policies decode together: each is complete and ran under
what it asked for; tokens are compared with the same requests' alone, which another batch may round
otherwise. At the end no slot is in use.
"""

from __future__ import annotations

import argparse
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import checkout  # noqa: F401
import numpy as np
import report
from gpu_checks import compiled
from kvpolicy.evaluation.serving import Server, serve, started, together
from serving_report import PLUGIN_OFF, STOCK
from serving_setup import EMBEDDED, NO_PLUGIN, Model, flags_of, gpu_flags, model_of
from soak import leaked

POLICIES = {"snapkv": ["capacity=48", "window=8"], "h2o": ["heavy=32", "window=16"]}


class Wrong(SystemExit):
    """A server did not do as the request asked."""


def ask(server: Server, prompt: list[int], policy: str | None, new: int) -> dict:
    """One answer, checked to be complete and served under `policy`.

    Raises:
        Wrong: the answer is incomplete or was served under another policy.
    """
    answer = server.generate(input_ids=prompt, policy=policy, max_new_tokens=new, ignore_eos=True)
    facts = answer["meta_info"].get("kv_policy") or {}
    if len(answer["output_ids"]) != new:
        raise Wrong(f"gpu_server: {len(answer['output_ids'])} of {new} tokens of {policy}")
    if (policy in POLICIES) != (facts.get("policy") in POLICIES) or "uncompressed" in facts:
        raise Wrong(f"gpu_server: {policy} was asked for and this came: {facts}")
    return answer


def alone(server: Server, prompts: list, policy: str | None, new: int) -> list[list[int]]:
    """Tokens of each prompt's answer, without a prefix in the cache."""
    made = []
    for prompt in prompts:
        server.flush()
        made.append(ask(server, prompt, policy, new)["output_ids"])
    return made


def at_once(server: Server, prompts: list, new: int) -> dict[str, list[list[int]]]:
    """Tokens of each prompt's answer by policy, with and without policies, all asked at once."""
    server.flush()
    asked = [(policy, prompt) for prompt in prompts for policy in ("none", *POLICIES)]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda each: ask(server, each[1], each[0], new), asked))
    made: dict[str, list[list[int]]] = {}
    for (policy, _), answer in zip(asked, answers, strict=True):
        made.setdefault(policy, []).append(answer["output_ids"])
    return made


def agreement(found: list[list[int]], wanted: list[list[int]]) -> float:
    """Share of tokens before the first difference of each answer."""
    equal = sum(
        next((at for at, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), len(pair[0]))
        for pair in zip(found, wanted, strict=True)
    )
    return equal / sum(map(len, wanted))


def run(options: argparse.Namespace, model: Model) -> dict:
    """Starts the three servers and compares their answers."""
    rng = np.random.default_rng(0)
    lengths = [int(n) for n in options.lengths.split(",")]
    prompts = [rng.integers(20, model.highest, n).tolist() for n in lengths]
    flags: dict[str, object] = {
        "skip_tokenizer_init": True,
        "enable_metrics": True,
        "decode_log_interval": 1,
        "max_total_tokens": 16384,
    }
    if not options.toy:
        flags |= gpu_flags(16)
    flags |= model.flags | flags_of(options.server_args)
    facts: dict = {
        "command": report.command(),
        "machine": report.machine("sglang", "torch", "triton", "flashinfer-python"),
        "model": model.words, "answers": len(prompts), "equal": {}, "agreement": {},
    }  # fmt: skip

    def equal(label: str, found: list[list[int]]) -> None:
        facts["equal"][label] = sum(a == b for a, b in zip(found, wanted, strict=True))
        report.write_json(options.out / "server.json", facts)

    given = [f"{name}.{value}" for name, values in POLICIES.items() for value in values]
    files = [report.ROOT / "policies" / f"{name}.yaml" for name in POLICIES]
    starting = {
        STOCK: serve(model.folder, env=NO_PLUGIN, **flags),
        PLUGIN_OFF: serve(model.folder, **flags),
        "policies": serve(model.folder, files, given, **flags),
    }
    with together(starting) as servers:
        stock, plugin_off, server = map(started, servers.values())
        wanted = alone(stock, prompts, None, options.new)
        equal(f"{STOCK}, once more", alone(stock, prompts, None, options.new))
        equal(PLUGIN_OFF, alone(plugin_off, prompts, None, options.new))
        before = compiled()
        equal("with policies, none asked for", alone(server, prompts, "none", options.new))
        singly = {name: alone(server, prompts, name, options.new) for name in POLICIES}
        mixed = at_once(server, prompts, options.new)
        for policy, found in mixed.items():
            facts["agreement"][policy] = agreement(found, singly.get(policy, wanted))
        facts["compiled_after_ready"] = len(compiled() - before)
        steps = [line for line in server.log_text().splitlines() if "Decode batch" in line]
        facts["steps"], facts["steps_in_graphs"] = (
            len(steps),
            sum("graph: True" in x for x in steps),
        )
        facts["leaked"] = int(sum(leaked(server).values()))
    report.write_json(options.out / "server.json", facts)
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--toy", action="store_true", help="the embedded model; no GPU needed")
    parser.add_argument("--model", help="as of serving.py")
    parser.add_argument("--lengths", default="100,67,513,300,2000,91", help="prompt tokens")
    parser.add_argument("--new", type=int, default=24, help="tokens generated")
    parser.add_argument("--server-args", default="", help="further options of all servers")
    parser.add_argument("--out", type=Path, required=True, help="folder for server.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        name = options.model or (EMBEDDED if options.toy else "llama-3.1-8b@2")
        facts = run(options, model_of(name, Path(folder)))
    if facts["leaked"]:
        raise Wrong(f"gpu_server: {facts['leaked']} slots are in use at the end")


if __name__ == "__main__":
    main()
