"""report.html: one file that needs no network, with the figures as data for its scripts."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from kvpolicy.evaluation.records import FULL
from kvpolicy.evaluation.reporting import summary_text
from kvpolicy.evaluation.reporting.needles import needles
from kvpolicy.evaluation.reporting.plot_style import MOST, OTHERS, style
from kvpolicy.evaluation.reporting.results import Series
from kvpolicy.evaluation.reporting.statistics import FEW
from kvpolicy.evaluation.reporting.summary import (
    COSTS,
    Summary,
    SummaryRow,
    Turns,
    front,
    named,
    point,
)
from kvpolicy.experiments.reporting import offline_page

SOURCES = Path(__file__).parents[1] / "pages"
OWN = (
    *("kept_map.css", "report.css"),
    *("kept_map.js", "policy_style.js", "report_charts.js", "report_tables.js", "report.js"),
)
MAP_BYTES = 1_500_000  # largest size of all maps in the page


def text(summary: Summary) -> str:
    """The page as HTML."""
    template = (SOURCES / "report.html").read_text(encoding="utf-8")
    body = offline_page.filled(template, {"HEADER": _header(summary)})
    sources = [SOURCES / name for name in OWN]
    return offline_page.page("What the policies cost - kvpolicy", body, page_data(summary), sources)


def page_data(summary: Summary) -> dict[str, Any]:
    """The data that the scripts read; rows are arrays in the order of `_row`; -1 stands for all."""
    results = summary.results
    policies = list(dict.fromkeys(policy for policy, _ in results.series if policy != FULL))
    about = {entry["policy"]: entry.get("about") or "" for entry in results.plan["policies"]}
    entries = {(entry["policy"], entry["budget"]): entry for entry in results.plan["policies"]}
    return {
        "policies": [{"name": name, "about": about[name]} for name in policies],
        "series": [_series(series, policies, entries[series]) for series in results.series],
        "tasks": [
            {"name": results.short[task], "title": title} for task, title in results.tasks.items()
        ],
        "lengths": results.lengths,
        "samples": summary_text.samples(results),
        "few": results.samples[0] < FEW,
        "rows": [_row(summary, row) for row in summary.rows.values()],
        "fronts": _fronts(summary),
        "conversations": [
            list(results.tasks).index(task) for task in summary.results.conversations()
        ],
        "needles": _needles(summary),
        "maps": _maps(summary),
        "chosen": [policies.index(name) for name in summary.prominent(MOST)],
        "telling": summary.telling_budget(),
        "styles": [style(i)._asdict() for i in range(len(policies))],
        "others": OTHERS,
    }


def _series(series: Series, policies: list[str], entry: dict) -> dict[str, Any]:
    """A policy (None for full KV) with its budget; `entry` is that of the plan."""
    setting = entry.get("setting") or {}
    return {
        "policy": None if series[0] == FULL else policies.index(series[0]),
        "budget": series[1],
        "name": summary_text.name(series),
        "setting": ", ".join(f"{key} = {value}" for key, value in setting.items()),
    }


def _place(summary: Summary, task: str | None, length: int | None) -> tuple[int, int]:
    """Indices of task and length; -1 for all."""
    results = summary.results
    return (
        -1 if task is None else list(results.tasks).index(task),
        -1 if length is None else results.lengths.index(length),
    )


def _row(summary: Summary, row: SummaryRow) -> list:
    def three(values: Sequence[float] | None) -> list | None:
        return None if values is None else [_rounded(value) for value in values]

    return [
        summary.results.series.index(row.series),
        *_place(summary, row.task, row.length),
        list(Turns).index(row.turns),
        row.answered,
        row.asked,
        three(row.score),
        three(row.difference),
        *map(_rounded, (row.kept, row.held, row.kv_bytes)),
        three(row.ttft),
        three(row.tpot),
        _rounded(row.output_tokens),
        ", ".join(f"{reason} {count}" for reason, count in row.in_full.items()),
    ]


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _fronts(summary: Summary) -> dict[str, dict[str, list[list[int]]]]:
    """Cost -> `task,length` -> series on the front, by rising cost, and the series to name."""
    fronts: dict[str, dict[str, list[list[int]]]] = {cost: {} for cost in COSTS}
    places = dict.fromkeys((row.task, row.length) for row in summary.rows.values())
    for cost in COSTS:
        for task, length in places:
            series_points = [
                (i, cost_score)
                for i, series in enumerate(summary.results.series)
                if (cost_score := point(summary.row(series, task, length), cost)) is not None
            ]
            points = [cost_score for _, cost_score in series_points]
            if points:
                key = "{},{}".format(*_place(summary, task, length))
                best = sorted(front(points), key=lambda i: points[i])
                fronts[cost][key] = [
                    [series_points[i][0] for i in indices] for indices in (best, named(points))
                ]
    return {cost: by_place for cost, by_place in fronts.items() if by_place}


def _needles(summary: Summary) -> list[dict]:
    """Per task: series -> scores [depth][length], and series -> numbers of answers."""
    results = summary.results
    heatmaps = []
    for task, heat in needles(results).items():
        scores: dict[str, list] = {}
        counts: dict[str, list] = {}
        for series, score in heat.score.items():
            number = str(results.series.index(series))
            scores[number] = [
                [None if np.isnan(value) else _rounded(value) for value in row] for row in score
            ]
            counts[number] = heat.count[series].astype(int).tolist()
        task_number = list(results.tasks).index(task)
        heatmaps.append({"task": task_number, "score": scores, "count": counts})
    return heatmaps


def _maps(summary: Summary) -> dict[str, Any]:
    """The prompts, each once, and the entries that each series keeps, within MAP_BYTES."""
    prompt_numbers: dict[tuple, int] = {}
    prompts: list[dict] = []
    maps: list[list] = []
    numbers = {series: i for i, series in enumerate(summary.results.series)}
    tasks = list(summary.results.tasks)
    size = left_out = 0
    for entry in _ordered_maps(summary):
        key = (entry["task"], entry["length"], entry["index"])
        entry_size = len(entry["bits"]) + (
            0 if key in prompt_numbers else len(json.dumps(entry["tokens"]))
        )
        if size + entry_size > MAP_BYTES:
            left_out += 1
            continue
        size += entry_size
        if key not in prompt_numbers:
            prompt_numbers[key] = len(prompt_numbers)
            prompts.append(
                {
                    "task": tasks.index(key[0]),
                    "length": key[1],
                    "index": key[2],
                    "tokens": entry["tokens"],
                    "asked": entry.get("asked") or [],
                }
            )
        layers, heads, _ = entry["shape"]
        series = numbers[entry["policy"], entry["budget"]]
        maps.append([prompt_numbers[key], series, layers, heads, entry["bits"]])
    return {"prompts": prompts, "shown": maps, "left_out": left_out}


def _ordered_maps(summary: Summary) -> list[dict]:
    """The maps by index of the sample, then the best policies first."""
    series_count = len(summary.results.series)
    best = {policy: i for i, policy in enumerate(summary.prominent(series_count))}
    return sorted(summary.results.maps, key=lambda m: (m["index"], best.get(m["policy"], -1)))


def _header(summary: Summary) -> str:
    """HTML with command, machine, versions, stages and notes."""
    plan = summary.results.plan
    server = plan.get("server") or {}
    layers, heads = server.get("L"), server.get("G")
    samples = summary_text.samples(summary.results)
    facts = {
        "Model": plan.get("model"),
        "Server": " ".join(str(server[k]) for k in ("api", "version", "url") if server.get(k)),
        "KV cache": f"{layers} layers, {heads} KV heads" if layers and heads else None,
        "Machine": plan.get("machine"),
        "Questions": f"{samples} samples of each task and length, seed {plan.get('seed')}",
        "Prompts": ", ".join(str(n) for n in summary.results.lengths) + " tokens",
        "Answered": _answered(summary),
        "Stages": ", ".join(f"{name} {seconds:.0f} s" for name, seconds in _stages(plan)),
    }
    items = "".join(
        f"<dt>{html.escape(name)}</dt><dd>{html.escape(str(value))}</dd>"
        for name, value in facts.items()
        if value
    )
    notes = "".join(f"<li>{html.escape(str(note))}</li>" for note in plan.get("notes") or ())
    command = html.escape(str(plan.get("command") or ""))
    return (
        (f"<pre><code>{command}</code></pre>" if command else "")
        + f"<dl>{items}</dl>"
        + (f'<ul class="notes">{notes}</ul>' if notes else "")
    )


def _stages(plan: dict) -> list[tuple[str, float]]:
    stages = plan.get("stages")
    return list(stages.items()) if isinstance(stages, dict) else []


def _answered(summary: Summary) -> str:
    totals = [summary.row(series) for series in summary.results.series]
    asked, answered = sum(row.asked for row in totals), sum(row.answered for row in totals)
    return f"{answered:,} of {asked:,} questions" if answered < asked else f"{answered:,} questions"
