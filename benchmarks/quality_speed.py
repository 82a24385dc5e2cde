"""Seconds that `kvpolicy eval` takes for 1,000 samples of 512 tokens, server included, by stage."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from pathlib import Path

import report
from kvpolicy.evaluation.records import FULL, read
from quality_parts.runs import EVAL, Run

TASKS = ("niah", "mk", "mq", "vt", "kv")
POLICIES = (FULL, "lava")
ENOUGH, LIMIT = 1000, 600  # samples, seconds


def main() -> None:
    parser = report.arguments(__doc__)
    parser.set_defaults(model=str(report.ROOT / "examples" / "model-small"))
    parser.add_argument("--samples", type=int, default=100, help="per task and policy")
    parser.add_argument("--length", type=int, default=512, help="prompt tokens")
    parser.add_argument("--at-once", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Run(
            folder=Path(folder) / "report",
            policies=POLICIES,
            tasks=TASKS,
            budgets=(0.25,),
            samples=options.samples,
            length=options.length,
            seed=options.seed,
            model=options.model,
            at_once=options.at_once,
        )
        started = time.monotonic()
        if status := subprocess.run([*EVAL, *run.words]).returncode:
            raise SystemExit(f"quality_speed: kvpolicy eval failed with status {status}")
        seconds = time.monotonic() - started
        answered = sum(1 for _ in read(run.folder / "samples.jsonl"))
        stages = json.loads((run.folder / "plan.json").read_text(encoding="utf-8"))["stages"]
    if answered != run.questions:
        raise SystemExit(f"quality_speed: {answered} answers to {run.questions} questions")
    rest = seconds - sum(stages.values())
    rows = [*stages.items(), ("the rest (imports, exit)", rest), ("everything", seconds)]
    verdict = "met" if seconds < LIMIT else "not met"
    asked = f" Asked of {ENOUGH}: under {LIMIT} s ({verdict})." if answered >= ENOUGH else ""
    text = (
        f"{answered} samples of {options.length} tokens: full KV and lava at 25 %, "
        f"{', '.join(TASKS)}; {options.at_once} requests at once. "
        f"{answered / seconds:.1f} samples per second, server included.{asked}\n\n"
        + report.table(["stage", "seconds"], [[name, f"{value:.1f}"] for name, value in rows])
    )
    facts = {"samples": answered, "seconds": seconds, "stages": stages}
    report.publish("quality_speed", "Speed of kvpolicy eval", text, facts, options.save)


if __name__ == "__main__":
    main()
