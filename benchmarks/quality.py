"""What every shipped policy costs in quality on the embedded model: the tables of one evaluation.

    python benchmarks/quality.py --samples 30 --save

Every policy at every budget is asked the questions of every task through `kvpolicy eval`; then the
conversations (a second question, with the prompt's full KV still in the tree, with it evicted, and
in the compressed copy), and FastKV with other layers on key-value retrieval. Stopped and started
again with the same options, it goes on. Results are checked before anything is written. What a run
of some policies alone saves lies beside the complete one, as quality_added.md and .json:

    python benchmarks/quality.py --policies NAMES --samples 20 --turn-samples 0 --layers "" --save
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import quality_layers
import report
from kvpolicy.dsl.syntax.library import shipped
from kvpolicy.evaluation.records import FULL, Record
from kvpolicy.evaluation.reporting import report as pages
from kvpolicy.evaluation.reporting import results
from kvpolicy.evaluation.reporting.results import Results
from kvpolicy.evaluation.reporting.summary import Summary, values
from quality_parts import tables
from quality_parts.checks import Doubtful, check_complete, check_full_kv
from quality_parts.orderings import Finding, findings
from quality_parts.runs import (
    Run,
    RunFailed,
    answered_of,
    carry_out,
    merge,
    split,
    stages_of,
    variants,
)

TASKS = "niah,mk,mq,mv,vt,kv,cwe,fwe"
PICTURES = ("accuracy", "pareto")
Groups = dict[str, list[Run]]


def parse() -> argparse.Namespace:
    """Options; the sizes decide how long a run takes."""
    parser = report.arguments(__doc__)
    parser.set_defaults(model=str(report.ROOT / "examples" / "model-small"))
    parser.add_argument("--policies", help="names, comma-separated; default all shipped")
    parser.add_argument("--budgets", default="0.5,0.25,0.125,0.0625", help="shares to keep")
    parser.add_argument("--tasks", default=TASKS)
    parser.add_argument("--length", type=int, default=512, help="prompt tokens")
    parser.add_argument("--samples", type=int, default=30, help="per task, policy and budget")
    parser.add_argument("--turn-budgets", default="0.5,0.125", help="of the conversations")
    parser.add_argument("--turn-samples", type=int, help="default: as --samples; 0: none")
    parser.add_argument("--layers", default="0,1,2,3", help="of FastKV's variants; empty: none")
    parser.add_argument("--tau", type=float, default=0.8, help="threshold of asl-looser")
    parser.add_argument("--kernel", type=int, default=9, help="pooling width of all variants")
    parser.add_argument("--layer-tasks", default="mk,kv", help="that the variants are asked")
    parser.add_argument("--layer-prompts", type=int, default=10, help="whose layers are told")
    parser.add_argument("--servers", type=int, default=2, help="that run at the same time")
    parser.add_argument("--at-once", type=int, default=8, help="requests at once on one server")
    parser.add_argument("--out", type=Path, default=report.ROOT / ".cache" / "quality")
    options = parser.parse_args()
    options.out = options.out.resolve()
    options.some = options.policies is not None
    options.policies = options.policies or ",".join(shipped())
    return options


def shares(text: str) -> tuple[float, ...]:
    """`0.5,0.25` as numbers."""
    return tuple(float(each) for each in text.split(","))


def planned(options: argparse.Namespace) -> Groups:
    """Runs by group: the table, the conversations, FastKV's variants."""
    names = [FULL, *options.policies.split(",")]
    whole = Run(
        folder=options.out / "table",
        policies=(),
        tasks=tuple(options.tasks.split(",")),
        budgets=shares(options.budgets),
        samples=options.samples,
        length=options.length,
        seed=options.seed,
        model=options.model,
        at_once=options.at_once,
    )
    groups = {"table": parts(whole, names, options.servers)}
    turns = options.samples if options.turn_samples is None else options.turn_samples
    if turns:
        folder, asked = options.out / "turns", shares(options.turn_budgets)
        run = replace(whole, folder=folder, tasks=tables.TURNS, budgets=asked)
        run = replace(run, samples=turns, turns=2)
        groups["turns"] = parts(run, names, options.servers)
    if options.layers:
        folder = options.out / "layers"
        layers = [int(layer) for layer in options.layers.split(",")]
        paths = variants(layers, options.tau, options.kernel, folder / "policies")
        run = replace(whole, folder=folder, tasks=tuple(options.layer_tasks.split(",")))
        groups["layers"] = parts(run, [FULL, *paths], 1)
    return groups


def parts(run: Run, names: list[str], servers: int) -> list[Run]:
    """A run split into `servers` runs with some of its policies and a folder each."""
    dealt = split(names, servers)
    return [
        replace(run, folder=run.folder / f"run-{number}", policies=chosen)
        for number, chosen in enumerate(dealt, 1)
    ]


def estimate(groups: Groups, options: argparse.Namespace) -> str:
    """Asks a few questions under some policies; states how long all runs will take."""
    runs = [run for each in groups.values() for run in each]
    names = [FULL, *options.policies.split(",")]
    few = replace(runs[0], folder=options.out / "estimate", samples=options.at_once)
    few = replace(few, budgets=few.budgets[len(few.budgets) // 2 :][:1])
    probes = parts(few, names[:: max(1, len(names) // 6)], options.servers)
    carry_out(probes, options.servers)
    starts, asking = [], []
    for probe in probes:
        stages = stages_of(probe)
        starts.append(stages["server start"])
        asking.append(stages["questions"])
    answered = sum(map(answered_of, probes))
    each = max(asking) / answered
    asked = sum(run.questions for run in runs)
    seconds = asked * each + max(starts) * -(-len(runs) // options.servers)
    return (
        f"{asked} questions in {len(runs)} runs, {options.servers} at a time: "
        f"about {seconds / 60:.0f} minutes ({1000 * each:.0f} ms a question, from {answered} asked)"
    )


def collect(groups: Groups, options: argparse.Namespace) -> dict[str, Results]:
    """Merges the results of each group's runs and checks that they are complete.

    Raises:
        Doubtful: answers are missing.
    """
    found = {}
    for name, runs in groups.items():
        folder = options.out / name
        merge(runs, folder, report.command())
        found[name] = results.load(folder)
        check_complete(folder, found[name])
    return found


def records_of(found: dict[str, Results], *groups: str) -> list[Record]:
    """All records of some groups."""
    return [record for name in groups if name in found for record in found[name].records]


def text(
    found: dict[str, Results],
    claims: list[Finding],
    checked: list[str],
    layers: str,
    *,
    pictures: bool,
) -> str:
    """The text of quality.md below its head."""
    plan = found["table"].plan
    parts = [
        f"{plan['samples']} samples for each task, policy and budget, prompts of "
        f"{plan['lengths'][0]} tokens, seed {plan['seed']}; the same for all, so that differences "
        "are paired. In percent, with 95 % intervals. Kept: of the prompt's entries, after its "
        "prefill; held: of all entries (of the bytes, where layers share them), after the last "
        "token. Windows of observation are 8 tokens.",
        "## Checked first",
        "\n".join(f"* {line}" for line in checked),
        tables.remarks(records_of(found, "table", "layers")),
        "## Accuracy",
        tables.accuracy(Summary(found["table"])),
    ]
    if pictures:
        parts += [
            "![accuracy against the share kept](quality_accuracy.png)",
            "![accuracy against memory and time](quality_pareto.png)",
        ]
    if "turns" in found:
        parts += ["## A second question", _TURNS, tables.second_turns(records_of(found, "turns"))]
    if claims:
        parts += ["## What papers report", _CLAIMS]
        parts += [tables.verdicts(claims), tables.orderings(claims)]
    if layers:
        parts += ["### Layers after which ASL let tokens leave", _LAYERS, layers]
    return "\n\n".join(parts)


_TURNS = (
    "Asked after the first answer. Full KV in the tree: the conversation is sent again, and finds "
    "the prompt as the model computed it. Evicted: the tree was emptied first, so it is computed "
    "again. In the compressed copy: the request goes on with what the policy left for the first "
    "question. The questions are the same in all three."
)
_CLAIMS = (
    "Points of accuracy by which the first of a pair is ahead, on the same samples; bold where the "
    "interval leaves zero out. A claim of better holds where the whole interval is above zero, and "
    "one of at least equal where it is above -2 points; it does not hold where the interval says "
    "the contrary (for better: less than 2 points). Nothing is corrected for the number of pairs."
)

_LAYERS = (
    "Counted over prompts; none: the ranking did not settle, so no token left the prefill and "
    "every layer chose for itself. `asl-wide` and `asl-looser` pool over more tokens, as FastKV's "
    "variants do, so that a whole pair is kept; the latter has a higher threshold too."
)


def data(
    found: dict[str, Results], claims: list[Finding], stages: dict[str, float]
) -> dict[str, object]:
    """The data of quality.json."""
    rows = {
        name: [{k: rounded(v) for k, v in values(row).items()} for row in Summary(f).rows.values()]
        for name, f in found.items()
    }
    pairs = [
        {
            "claim": f.ordering.claim,
            "source": f.ordering.source,
            "pair": [f.better, f.worse],
            "tasks": f.tasks,
            "by_budget": {f"{b:g}": list(e) for b, e in f.by_budget.items()},
            "pooled": f.pooled and list(f.pooled),
            "levels": [*f.levels, f.full] if f.pooled else None,
            "verdict": f.verdict,
        }
        for f in claims
    ]
    # Paths on this machine mean nothing elsewhere.
    policies = [
        {k: v for k, v in p.items() if k != "path"}
        for f in found.values()
        for p in f.plan["policies"]
    ]
    return {"stages": stages, "policies": policies, "rows": rows, "orderings": pairs}


def rounded(value: object) -> object:
    """Floats rounded to six digits; other values as they are."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def copy_pictures(folder: Path, target: Path) -> None:
    """Copies the table's pictures beside quality.md."""
    for name in PICTURES:
        source = folder / f"{name}.png"
        if source.exists():
            shutil.copyfile(source, target / f"quality_{name}.png")


def main() -> None:
    options = parse()
    groups = planned(options)
    runs = [run for each in groups.values() for run in each]
    try:
        if not any(map(answered_of, runs)):
            print(estimate(groups, options), file=sys.stderr)
        started = time.monotonic()
        seconds = carry_out(runs, options.servers)
        found = collect(groups, options)
        checked = check_full_kv(found["table"], Path(options.model))
    except (RunFailed, Doubtful) as error:
        raise SystemExit(f"quality: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit("\nquality: interrupted; the same command goes on from there") from None
    pages.write(options.out / "table")
    layers = ""
    if "layers" in groups and options.layer_prompts:
        sizes = (options.tau, options.kernel, options.layer_prompts)
        layers = quality_layers.table(quality_layers.chosen_layers(groups["layers"][0], *sizes))
    stages = {f"{n}: {s}": t for n, f in found.items() for s, t in f.plan["stages"].items()}
    stages |= {"all runs": seconds, "everything": time.monotonic() - started}
    claims = [f for f in findings(records_of(found, "table", "layers")) if f.pooled is not None]
    rows = [[stage, f"{spent:.0f}"] for stage, spent in stages.items()]
    body = text(found, claims, checked, layers, pictures=not options.some)
    body += "\n\n## Seconds by stage\n\n" + report.table(["stage", "seconds"], rows)
    name, title = "quality", "What the shipped policies cost"
    if options.some:
        name, title = "quality_added", "What policies added since the complete run cost"
    report.publish(name, title, body, data(found, claims, stages), options.save)
    if options.save and not options.some:
        copy_pictures(options.out / "table", options.save)


if __name__ == "__main__":
    main()
