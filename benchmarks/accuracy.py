"""What a policy loses: retrieval questions through the HTTP server, kept share against full KV.

Every question is asked with every policy and with none, on one server; answers are compared token
by token. The same seeded questions for all, so differences are paired.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import report
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "train"))
import tasks
from kvpolicy.evaluation.asking.facts import held, lists_of
from kvpolicy.evaluation.reporting.statistics import wilson
from kvpolicy.evaluation.serving import Server, serve
from shipped import settings

TASKS = {"niah": "single needle", "mk": "multi-key needle", "mq": "multi-query, 3 of 24"}


def ask(server: Server, sample, policy: str, lists: int) -> tuple[bool, float]:
    """Whether the answer is exact, and the share of the entries held after it."""
    answer = server.generate(
        input_ids=sample.prompt_ids, policy=policy, max_new_tokens=len(sample.answer_ids)
    )
    right = list(answer["output_ids"])[: len(sample.answer_ids)] == list(sample.answer_ids)
    return right, held(answer, lists) if policy != "none" else 1.0


def run(server: Server, samples: list, policy: str, options) -> dict:
    """One task and policy over all samples."""
    lists = lists_of(options.model)
    with ThreadPoolExecutor(options.at_once) as pool:
        results = list(pool.map(lambda s: ask(server, s, policy, lists), samples))
    right, share = (np.array(column) for column in zip(*results, strict=True))
    return {"right": right.astype(int).tolist(), "held": float(share.mean())}


def interval(right: list[int]) -> str:
    """Accuracy in percent with its 95 % Wilson interval."""
    mean, low, high = wilson(sum(right) / len(right), len(right))
    return f"{100 * mean:.0f} ({100 * low:.0f}-{100 * high:.0f})"


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--length", type=int, default=512, help="prompt tokens")
    parser.add_argument("--kept", type=float, default=0.125, help="share of the prompt kept")
    parser.add_argument("--questions", type=int, default=100, help="per task")
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--policies", help="names, comma-separated; default all")
    options = parser.parse_args()
    questions = {
        task: [
            tasks.sample(task, options.length, np.random.default_rng([options.seed, i]))
            for i in range(options.questions)
        ]
        for task in TASKS
    }
    chosen = settings(options.kept, options.length)
    names = options.policies.split(",") if options.policies else list(chosen)
    files = [report.ROOT / "policies" / f"{name}.yaml" for name in names]
    given = [f"{name}.{each}" for name in names for each in chosen[name]]
    results: dict[str, dict[str, dict]] = {}
    with (
        serve(options.model, files, given, progress=True, skip_tokenizer_init=True) as server,
        tqdm(total=(len(names) + 1) * len(TASKS), desc="policies x tasks") as bar,
    ):
        for policy in ("none", *names):
            results[policy] = {}
            for task, samples in questions.items():
                results[policy][task] = run(server, samples, policy, options)
                bar.update()
    rows = []
    for policy, by_task in results.items():
        cells = [interval(by_task[task]["right"]) for task in TASKS]
        shares = {f"{100 * by_task[task]['held']:.1f}" for task in TASKS}
        label = "full KV" if policy == "none" else policy
        rows.append([label, " / ".join(sorted(shares)), *cells])
    text = (
        f"Exact answers in percent (95 % interval), {options.questions} questions per task, "
        f"{options.length}-token prompts, {100 * options.kept:g} % of the entries where a policy "
        "has a budget, observation window 8. Held: after the answer.\n\n"
        + report.table(["policy", "held, %", *TASKS.values()], rows)
    )
    report.publish("accuracy", "Accuracy at a fixed share kept", text, results, options.save)


if __name__ == "__main__":
    main()
