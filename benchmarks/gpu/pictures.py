"""Pictures of the GPU report; figures that were not measured are left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pictures
from pictures import LINE, Lines
from serving_report import STOCK
from timing import summary

from gpu.goals import Figures

BATCH = 16  # requests in the picture of decode attention


def draw_all(facts: dict, folder: Path) -> list[str]:
    """Draw every picture that has figures; returns all files, those of earlier runs included."""
    models = [key.partition(" ")[2] for key in facts["sections"] if " " in key]
    served = [Figures(facts, model) for model in dict.fromkeys(models)]
    for name, lines, draw in (
        ("throughput.png", [(f.model, _pools(f)) for f in served], _throughput),
        ("latency.png", [(f.model, f.cells()) for f in served], _latency),
        ("prefill.png", [("", _shares(Figures(facts)))], _prefill),
        ("decode.png", [("", _bandwidth(Figures(facts)))], _decode),
        ("host.png", [("", _host(Figures(facts)))], _host_time),
    ):
        if drawn := [each for each in lines if each[1]]:
            draw(drawn, folder / name)
    return sorted(path.name for path in folder.glob("*.png"))


def _point(x: float, values: list[float], scale: float = 1) -> tuple[float, float, float, float]:
    facts = summary(values)
    return (x, *(scale * facts[name] for name in ("median", "p10", "p90")))


def _row(path: Path, columns: int, rows: int = 1):
    """A figure and its panels; None without matplotlib."""
    return pictures.panels(path, rows, columns, (5.5 * columns, 4.2 * rows))


# Servers.


def _pools(figures: Figures) -> Lines:
    lines: Lines = {}
    for run in figures.pools():
        for cell in run["cells"]:
            point = _point(run["flags"]["max_total_tokens"], cell["throughput"])
            lines.setdefault(cell["server"], []).append(point)
    return lines


def _throughput(models: list[tuple[str, Lines]], path: Path) -> None:
    drawn = _row(path, len(models))
    if drawn is None:
        return
    figure, axes = drawn
    for panel, (model, lines) in zip(axes[0], models, strict=True):
        pictures.draw(panel, lines)
        panel.set(title=f"Crowd, {model}", xlabel="tokens that the pool holds", ylabel="tokens / s")
        panel.set_ylim(bottom=0)
    pictures.save(figure, path)


def _latency(models: list[tuple[str, list[dict]]], path: Path) -> None:
    drawn = _row(path, 2, len(models))
    if drawn is None:
        return
    figure, axes = drawn
    for row, (model, cells) in zip(axes, models, strict=True):
        for panel, name in zip(row, ("ttft", "tpot"), strict=True):
            lines: Lines = {}
            for cell in cells:
                point = _point(cell["tokens"], cell[name], 1000)
                lines.setdefault(cell["server"], []).append(point)
            pictures.draw(panel, lines)
            panel.set(title=f"{name.upper()}, {model}", ylabel="ms")
            panel.set_yscale("log")
            pictures.token_axis(panel, cells)
    pictures.save(figure, path)


# Kernels.


def _calls(cases: Iterable[dict], of: Callable[[dict], float | None], own: bool) -> Lines:
    """A line per call, or with `own` only of each case's first call, in percent."""
    lines: Lines = {}
    for case in cases:
        for name, call in list(case["calls"].items())[: 1 if own else None]:
            value = of(call)
            if value is not None:
                label = f"{case['topic']}: {case['case']}" if own else name
                lines.setdefault(label, []).append((case["tokens"], *3 * (100 * value,)))
    return lines


def _shares(figures: Figures) -> Lines:
    cases = [c for c in figures.cases("scoring") if "with selection" in c["case"]]
    cases += [c for c in figures.cases("compaction") if "per list" in c["case"]]
    cases += figures.cases("sums over all queries")
    return _calls(cases, lambda call: call.get("share_of_prefill"), own=True)


def _bandwidth(figures: Figures) -> Lines:
    cases = figures.cases("decode attention")
    batches = {case["batch"] for case in cases}
    batch = BATCH if BATCH in batches else max(batches, default=0)
    cases = [case for case in cases if case["batch"] == batch]
    return _calls(cases, lambda call: call.get("share_of_copy"), own=False)


def _by_tokens(lines: Lines, path: Path, title: str, limits: Iterable[float], log: bool) -> None:
    drawn = _row(path, 1)
    if drawn is None:
        return
    figure, ((panel,),) = drawn
    pictures.draw(panel, lines)
    for limit in limits:
        panel.axhline(limit, **LINE)
    panel.set(title=title, ylabel="%")
    if log:
        panel.set_yscale("log")
    points = [{"tokens": point[0]} for line in lines.values() for point in line]
    pictures.token_axis(panel, points)
    pictures.save(figure, path)


def _prefill(lines: list[tuple[str, Lines]], path: Path) -> None:
    title = "All layers, of the same prompt's prefill (dashed: goals)"
    _by_tokens(lines[0][1], path, title, (0.5, 35), log=True)


def _decode(lines: list[tuple[str, Lines]], path: Path) -> None:
    title = "Decode attention: bytes of the lists / s, of a copy's rate"
    _by_tokens(lines[0][1], path, title, (100,), log=False)


# Host.


def _host(figures: Figures) -> Lines:
    lines: Lines = {}
    for row in figures.of("host").get("host", {}).get("rows", ()):
        name = row["policy"] if row["policy"] == STOCK else f"policies: {row['policy']}"
        lines.setdefault(name, []).append((row["batch"], *3 * (row["host_us"],)))
    return lines


def _host_time(lines: list[tuple[str, Lines]], path: Path) -> None:
    drawn = _row(path, 1)
    if drawn is None:
        return
    figure, ((panel,),) = drawn
    pictures.draw(panel, lines[0][1])
    panel.set(title="Host time of a decode step", xlabel="requests in the batch", ylabel="us")
    panel.set_ylim(bottom=0)
    pictures.save(figure, path)
