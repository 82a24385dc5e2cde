"""Folders as `kvpolicy eval` writes them, made from a seed instead of by servers.

Better policies and larger budgets find more; all figures are random. Reports of any size can be
looked at in seconds:

    python tests/evaluation/made_run.py FOLDER [POLICIES]
"""

import base64
import json
import sys
from pathlib import Path

import numpy as np
from kvpolicy.evaluation.records import FULL, Record, line

NAMES = (
    "snapkv", "lava", "sinks-recent", "adakv", "pyramidkv", "ada-pyramidkv", "dynamickv", "cake",
    "fastkv", "fastkv-adakv", "asl", "gemfilter", "pyramidinfer", "streamingllm",
    "streamingllm-original", "h2o", "vatp", "tova", "roco", "simlayerkv", "simlayerkv-prefill",
    "d2o", "d2o-code", "cam", "minicache", "asl-lava-d2o",
)  # fmt: skip
TITLES = {
    "niah": "Single needle", "mk": "Multi-key needle", "mq": "Multi-query needles",
    "vt": "Variable tracking", "kv": "Key-value pairs",
    "multiturn": "Second turn, full KV in the tree",
    "multiturn-evicted": "Second turn, tree emptied",
    "multiturn-copy": "Second turn in the compressed copy",
}  # fmt: skip
BUDGETS = (0.5, 0.25, 0.125, 0.06)
LAYERS, HEADS, BYTES = 6, 4, 6144


def plan(names, tasks, lengths, samples, budgets=BUDGETS):
    """Content of plan.json for full KV and policies `names`."""
    policies = [{"policy": FULL, "budget": None, "setting": {}, "about": "Everything."}]
    policies += [
        {"policy": n, "budget": b, "setting": {"rate": str(b)}, "about": f"What {n} keeps."}
        for n in names
        for b in budgets
    ]
    return {
        "command": "kvpolicy eval --policy all --budget 0.5 --tasks niah,mk --out report/",
        "model": "examples/model-small", "form": "embedded", "lengths": list(lengths),
        "tasks": {task: TITLES.get(task, task) for task in tasks}, "seed": 0, "samples": samples,
        "policies": policies,
        "server": {"url": "http://127.0.0.1:20000", "api": "sglang", "version": "0.5.23",
                   "L": LAYERS, "G": HEADS, "bytes_per_token": BYTES},
        "machine": "2 cores, Python 3.11", "stages": {"start": 18.2, "full KV": 60.0, "lava": 71.5},
    }  # fmt: skip


def questions(the_plan, seed=0):
    """Records of every question of a plan, with the same luck per question for all policies."""
    rng = np.random.default_rng(seed)
    skill = {name: rng.uniform(0.3, 1.0) for name in NAMES}
    for task_number, task in enumerate(the_plan["tasks"]):
        turns = 2 if task.startswith("multiturn") else 1
        for length in the_plan["lengths"]:
            luck = rng.random((the_plan["samples"], turns))
            depths = rng.random(the_plan["samples"])
            for entry in the_plan["policies"]:
                yield from _answers(
                    entry,
                    task,
                    task_number,
                    length,
                    luck,
                    depths,
                    skill.get(entry["policy"], 1),
                    rng,
                )


def _answers(entry, task, task_number, length, luck, depths, skill, rng):
    share = entry["budget"] or 1.0
    kept = min(1.0, share * rng.uniform(0.95, 1.1))
    chance = 0.98 - 0.02 * task_number - (1 - share) ** 6 * (1.2 - skill) * (1 + task_number / 4)
    full = entry["policy"] == FULL
    for index in range(len(luck)):
        for turn in range(luck.shape[1]):
            p = np.clip(chance - 0.2 * turn * (not full) - 0.1 * (depths[index] < 0.3), 0.02, 1)
            items = (rng.random(4) < p).mean() if task == "mq" else float(luck[index, turn] < p)
            short = not full and index % 37 == 36
            yield Record(
                policy=entry["policy"], budget=entry["budget"], setting=entry["setting"], task=task,
                length=length, index=index, turn=turn,
                depth=None if task in ("vt", "kv") else float(depths[index]), score=float(items),
                answer="w12 </script> & <b>", expected=["w12"], prompt_tokens=length,
                output_tokens=int(rng.integers(4, 9)), kept=1.0 if full or short else kept,
                held=1.0 if full or short else kept * 1.02,
                kv_bytes=float(int(BYTES * length * (1 if full or short else kept))),
                ttft=float(rng.gamma(20, 0.004) * (1 + (not full) * (1.3 - skill))),
                tpot=float(rng.gamma(20, 0.0006) * (0.5 + 0.5 * share)),
                uncompressed="short_prompt" if short else None,
            )  # fmt: skip


def kept_maps(the_plan, seed=0, prompts=1):
    """Lines of kept.jsonl: some prompts of the first two tasks."""
    rng = np.random.default_rng([seed, 1])
    length = the_plan["lengths"][0]
    for task in list(the_plan["tasks"])[:2]:
        for index in range(prompts):
            tokens = [f"w{number}" for number in rng.integers(0, 500, length - 1)] + ["</script>"]
            for entry in the_plan["policies"]:
                if entry["policy"] == FULL:
                    continue
                mask = rng.random((LAYERS, HEADS, length)) < entry["budget"]
                mask[:, :, -8:] = True
                bits = base64.b64encode(np.packbits(mask, axis=-1).tobytes()).decode()
                yield {"policy": entry["policy"], "budget": entry["budget"], "task": task,
                       "length": length, "index": index, "tokens": tokens,
                       "shape": list(mask.shape), "bits": bits}  # fmt: skip


def write(folder, names=NAMES[:3], tasks=tuple(TITLES), lengths=(512, 1024), samples=30, seed=0,
          maps=True, budgets=BUDGETS):  # fmt: skip
    """Writes a whole folder; returns its plan."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    made = plan(names, tasks, lengths, samples, budgets)
    (folder / "plan.json").write_text(json.dumps(made, indent=1))
    (folder / "samples.jsonl").write_text("".join(map(line, questions(made, seed))))
    if maps:
        lines = (json.dumps(entry) + "\n" for entry in kept_maps(made, seed))
        (folder / "kept.jsonl").write_text("".join(lines))
    return made


if __name__ == "__main__":
    write(sys.argv[1], NAMES[: int(sys.argv[2])] if len(sys.argv) > 2 else NAMES[:3], samples=100)
