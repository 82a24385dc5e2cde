"""The main job on the embedded model: one long prompt, answered with a policy and without.

Starts `python -m sglang.launch_server --model-path ... --kv-policy policies/snapkv.yaml` on a free
loopback port, hides one fact in a long text, asks for it twice and prints what was kept.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import numpy as np
from kvpolicy.evaluation.serving import ServerFailed, serve

sys.path.insert(0, str(Path(__file__).parent / "train"))
import tasks

ROOT = Path(__file__).parents[1]


def ask(server, text: str, policy: str) -> dict:
    """The answer to a prompt, computed with an empty prefix cache so that times are comparable."""
    server.flush()
    return server.generate(text=text, policy=policy, max_new_tokens=8)


def rows(full: dict, kept: dict, expected: str, policy: str) -> list[tuple[str, str, str]]:
    """Rows of the table: name, value without a policy, value with it."""
    facts = kept["meta_info"]["kv_policy"]
    if "entries_before" not in facts:
        raise SystemExit(f"{policy} left this prompt as it is: {facts['uncompressed']}")
    ttft = [f"{1000 * a['meta_info']['first_token_latency']:.0f} ms" for a in (full, kept)]
    before, after = facts["entries_before"], facts["entries_kept"]
    kib = [f"{facts[f'kv_bytes_{moment}'] / 1024:.0f} KiB" for moment in ("before", "after")]
    return [
        ("", "no policy", policy),
        ("answer", full["text"].strip(), kept["text"].strip()),
        ("expected", expected, expected),
        ("prompt tokens", *[str(a["meta_info"]["prompt_tokens"]) for a in (full, kept)]),
        ("entries kept", str(before), f"{after} ({100 * after / before:.1f} %)"),
        ("KV bytes after prefill", *kib),
        ("slots freed", "0", f"{facts['slots_freed']} of {facts['prompt_tokens']}"),
        ("time to first token", *ttft),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--policy", default=str(ROOT / "policies" / "snapkv.yaml"))
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--tokens", type=int, default=512, help="length of the prompt")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    settings = options.set or ["capacity=64", "window=8"]
    sample = tasks.sample("distractors", options.tokens, np.random.default_rng(options.seed))
    model = ROOT / "examples" / "model-tiny"
    print(f"policy {os.path.relpath(options.policy)} with {', '.join(settings)}")
    try:
        with serve(model, [options.policy], settings, progress=True, enable_metrics=True) as server:
            name = Path(options.policy).stem
            ask(server, sample.text, "none")  # the first request of a server is slow
            answers = [ask(server, sample.text, policy) for policy in ("none", name)]
    except ServerFailed as error:
        print(error, file=sys.stderr)
        return 1
    print(f"\nprompt: ... {' '.join(sample.text.split()[-32:])}\n")
    lines = rows(*answers, sample.answer_text, name)
    widths = [max(len(line[i]) for line in lines) for i in range(3)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
