"""report.md: verdicts first, then what each section found, failures with their last lines."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable

import report
import serving_report
from cases import summary

from gpu import expected

Facts = dict


def text(facts: Facts) -> str:
    """The page in Markdown."""
    sections = facts["sections"]
    machine = _results(sections, "preflight", "preflight").get("machine", "not looked at")
    parts = [
        "# GPU report" + (", toy sizes on a CPU" if facts["toy"] else ""),
        f"Command: `{facts['command']}`  \nMachine: {machine}",
        "## Verdicts",
        _goals(facts["goals"]),
        "## Expected and measured",
        *expected.text(facts),
        "## Sections",
        _sections(sections),
    ]
    if facts["left_out"]:
        parts.append(f"Left out for want of time: {', '.join(facts['left_out'])}. `--resume`.")
    parts += [f"![{name.partition('.')[0]}]({name})" for name in facts.get("pictures", ())]
    for key, section in sections.items():
        for name, found in section["results"].items():
            say = _SAID.get("pool" if name.startswith("pool-") else name)
            if say:
                parts += [f"## {key}: {name}" if key != name else f"## {key}", *say(found)]
    parts += list(_failures(sections))
    return "\n\n".join(parts)


def _results(sections: Facts, key: str, name: str) -> Facts:
    return sections.get(key, {}).get("results", {}).get(name, {})


def _goals(goals: Iterable[Facts]) -> str:
    rows = [[g["goal"], g["model"] or "", g["limit"], g["measured"], g["verdict"]] for g in goals]
    return report.table(("goal", "model", "limit", "measured", "verdict"), rows)


def _sections(sections: Facts) -> str:
    rows = [
        [
            key, each["what"], each["state"], f"{each.get('seconds', 0):.0f}",
            f"{each['limit']:.0f}", each["version"],
        ]
        for key, each in sections.items()
    ]  # fmt: skip
    return report.table(("section", "what", "ended", "seconds", "limit", "version"), rows)


def _failures(sections: Facts) -> Iterable[str]:
    for key, section in sections.items():
        for name, step in section["steps"].items():
            if step["state"] != "done":
                lines = "\n".join(step["tail"]).replace("```", "'''")
                status = "" if step["status"] is None else f", exit status {step['status']}"
                yield f"## {key}: {name}: {step['state']}{status}\n\n```\n{lines}\n```"


# Results, by the names of their files.


def _preflight(found: Facts) -> list[str]:
    rows = []
    if found.get("memory"):
        free, whole = (size / 2**30 for size in found["memory"])
        rows.append(["memory free, of", f"{free:.1f} of {whole:.1f} GiB"])
    if "copy" in found:
        rows.append(["copy, read and written", f"{found['copy']['median'] / 1e12:.3g} TB/s"])
    if "flops" in found:
        rows.append(["products, bfloat16", f"{found['flops'] / 1e12:.3g} TFLOP/s"])
    rows += [[name, path or "not here"] for name, path in found["tools"].items()]
    rows.append(["FlashAttention 3", "here" if found["fa3"] else "not here: FlashInfer serves"])
    rows.append(["missing packages", ", ".join(found["missing"]) or "none"])
    return [report.table(("", ""), rows)]


def _smoke(found: Facts) -> list[str]:
    bad = [case for case in found["cases"] if case["state"] != "passed"]
    checker = found["checker"] or "there is no compute-sanitizer here"
    said = f"{len(found['cases']) - len(bad)} of {len(found['cases'])} passed; memory: {checker}."
    rows = [[case["case"], case["run"], case["state"], "".join(case["tail"][-1:])] for case in bad]
    table = [report.table(("case", "run", "ended", "last line"), rows)] if bad else []
    return [said, *table]


def _numerics(found: Facts) -> list[str]:
    counts = ", ".join(f"{number} {what}" for what, number in found["outcomes"].items())
    missing = f"missing: {', '.join(found['missing'])}" if "missing" in found else ""
    return [f"{counts or missing or 'nothing ran'}.", *(f"- {x}" for x in found["failures"][:50])]


def _kernels(found: Facts) -> list[str]:
    return [summary.text(found).replace("\n## ", "\n### ")]


def _server(found: Facts) -> list[str]:
    rows = [[label, f"{n} of {found['answers']}"] for label, n in found["equal"].items()]
    made = [f"Model: {found['model']}.", report.table(("answers as stock's", ""), rows)]
    if found["agreement"]:
        shares = [[policy, f"{100 * share:.0f}"] for policy, share in found["agreement"].items()]
        head = ("in a mixed batch", "tokens as alone, %")
        made.append(report.table(head, shares))
    if "leaked" in found:
        made.append(
            f"{found['steps_in_graphs']} of {found['steps']} decode steps replayed a graph; "
            f"{found['compiled_after_ready']} kernels compiled once ready; "
            f"{found['leaked']} slots in use at the end."
        )
    return made


def _host(found: Facts) -> list[str]:
    rows = [
        [
            row["policy"], row["batch"], f"{row['step_us']:.0f}", f"{row['host_us']:.0f}",
            f"{row['launches']:.1f}", "" if row["idle"] is None else f"{100 * row['idle']:.0f}",
        ]
        for row in found["rows"]
    ]  # fmt: skip
    head = ("policy", "requests", "step, us", "host, us", "launches", "device idle, %")
    after = ", ".join(f"{n} by {who}" for who, n in found["compiled_after_ready"].items())
    return [
        f"{found['model']}, prompts of {found['prompt']} tokens, {found['steps']} steps under the "
        f"profiler. Compiled once ready: {after or 'not counted'}.",
        report.table(head, rows),
    ]


def _fold_host(found: Facts) -> list[str]:
    rows = [
        [name, made["folds"], made["operations"], made["launches"],
         f"{1000 * statistics.median(made['mean_seconds']):.2f}",
         f"{1000 * statistics.median(made['slowest_seconds']):.1f}"]
        for name, made in found.items() if "@" in name
    ]  # fmt: skip
    head = ("policy@requests", "folds", "operations", "launches", "ms per step", "ms, slowest")
    return ["On the processor alone, by fold_host.py.", report.table(head, rows)]


def _serving(found: Facts) -> list[str]:
    return [serving_report.text(found).replace("\n## ", "\n### ")]


_SAID: dict[str, Callable[[Facts], list[str]]] = {
    "preflight": _preflight,
    "smoke": _smoke,
    "numerics": _numerics,
    "kernels": _kernels,
    "server": _server,
    "host": _host,
    "fold_host": _fold_host,
    "serving": _serving,
    "pool": _serving,
}
