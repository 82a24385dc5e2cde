"""What a policy loses: retrieval questions through the HTTP server, kept share against full KV.

Every question is asked with every policy and with none, on one server; answers are compared token
by token. The same seeded questions for all, so differences are paired.
"""

from __future__ import annotations

import math
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import report
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "train"))
import tasks
from serving import Server, serve

POLICIES = ("snapkv", "adakv", "pyramidkv", "ada-pyramidkv", "lava", "dynamickv", "sinks-recent")
TASKS = {"niah": "single needle", "mk": "multi-key needle", "mq": "multi-query, 3 of 24"}


def ask(server: Server, sample, policy: str) -> tuple[bool, int, int]:
    """Whether the answer is exact, and entries kept and entries in full over layers and heads."""
    answer = server.generate(
        input_ids=sample.prompt_ids, policy=policy, max_new_tokens=len(sample.answer_ids)
    )
    facts = answer["meta_info"].get("kv_policy") or {}
    right = list(answer["output_ids"])[: len(sample.answer_ids)] == list(sample.answer_ids)
    return right, facts.get("entries_kept", 0), facts.get("entries_before", 0)


def run(server: Server, samples: list, policy: str, at_once: int) -> dict:
    """One task and policy over all samples."""
    with ThreadPoolExecutor(at_once) as pool:
        results = list(pool.map(lambda s: ask(server, s, policy), samples))
    right, kept, before = (np.array(column) for column in zip(*results, strict=True))
    share = kept.sum() / before.sum() if before.sum() else 1.0
    return {"right": right.astype(int).tolist(), "kept_share": float(share)}


def interval(right: list[int]) -> str:
    """Accuracy in percent with its 95 % Wilson interval."""
    n, p, z = len(right), float(np.mean(right)), 1.96
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return f"{100 * p:.0f} ({100 * max(0, centre - half):.0f}-{100 * min(1, centre + half):.0f})"


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--length", type=int, default=512, help="prompt tokens")
    parser.add_argument("--kept", type=float, default=0.125, help="share of the prompt kept")
    parser.add_argument("--questions", type=int, default=100, help="per task")
    parser.add_argument("--at-once", type=int, default=4)
    options = parser.parse_args()
    capacity = int(options.kept * options.length)
    questions = {
        task: [
            tasks.sample(task, options.length, np.random.default_rng([options.seed, i]))
            for i in range(options.questions)
        ]
        for task in TASKS
    }
    files = [report.ROOT / "policies" / f"{name}.yaml" for name in POLICIES]
    settings = [f"{name}.capacity={capacity}" for name in POLICIES]
    settings += [f"{n}.window=8" for n in POLICIES if n != "sinks-recent"]
    results: dict[str, dict[str, dict]] = {}
    with (
        serve(options.model, files, settings, progress=True, skip_tokenizer_init=True) as server,
        tqdm(total=(len(POLICIES) + 1) * len(TASKS), desc="policies x tasks") as bar,
    ):
        for policy in ("none", *POLICIES):
            results[policy] = {}
            for task, samples in questions.items():
                results[policy][task] = run(server, samples, policy, options.at_once)
                bar.update()
    rows = []
    for policy, by_task in results.items():
        cells = [interval(by_task[task]["right"]) for task in TASKS]
        shares = {f"{100 * by_task[task]['kept_share']:.1f}" for task in TASKS}
        label = "full KV" if policy == "none" else policy
        rows.append([label, " / ".join(sorted(shares)), *cells])
    text = (
        f"Exact answers in percent (95 % interval), {options.questions} questions per task, "
        f"{options.length}-token prompts, capacity {capacity} entries per layer and KV head, "
        "observation window 8.\n\n"
        + report.table(["policy", "entries kept, %", *TASKS.values()], rows)
    )
    report.publish("accuracy", "Accuracy at a fixed share kept", text, results, options.save)


if __name__ == "__main__":
    main()
