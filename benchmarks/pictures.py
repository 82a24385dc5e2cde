"""Pictures of the GPU benchmarks, in colours that everybody can tell apart (Okabe and Ito)."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from timing import summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
LINE = {"color": "#666666", "linestyle": "--", "linewidth": 1}
# name -> points (x, y, low, high)
Lines = dict[str, list[tuple[float, float, float, float]]]


def panels(path: Path, rows: int, columns: int, size: tuple[float, float]):
    """A figure and its panels; None, with a message, without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        print(f"{path.name} is not drawn: there is no matplotlib here", file=sys.stderr)
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, figsize=size, squeeze=False)


def grid(path: Path, number: int) -> tuple[Figure, list[Axes]] | None:
    """A figure of up to two panels side by side, or four; None if there is nothing to draw on."""
    rows, columns = -(-number // 2), min(number, 2)
    drawn = panels(path, rows, columns, (5.5 * columns, 4 * rows)) if number else None
    if drawn is None:
        return None
    figure, made = drawn
    flat = list(made.flat)
    for unused in flat[number:]:
        unused.remove()
    return figure, flat[:number]


def draw(axes: Axes, lines: Lines) -> None:
    """Draw lines with the 10th and 90th percentile as bars."""
    styles = zip(COLOURS * 2, MARKERS * 2, strict=True)
    for (name, points), (colour, marker) in zip(lines.items(), styles, strict=False):
        x, y, low, high = zip(*sorted(points), strict=True)
        bars = [[max(0, a - b) for a, b in zip(y, low, strict=True)],
                [max(0, b - a) for a, b in zip(y, high, strict=True)]]  # fmt: skip
        axes.errorbar(x, y, yerr=bars, label=name, color=colour, marker=marker, capsize=2,
                      linewidth=1.3, markersize=5)  # fmt: skip
    axes.grid(alpha=0.3)
    if lines:
        axes.legend(fontsize=7)


def token_axis(axes: Axes, cases: Iterable[dict]) -> None:
    """Put ticks at the lengths of the cases."""
    lengths = sorted({case["tokens"] for case in cases})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("tokens of the prompt")


def _lines(cases: Iterable[dict], of: Callable[[dict, dict], float | None]) -> Lines:
    """A line per call; `of` returns (value, low, high) of a case and call."""
    made: Lines = {}
    for case in cases:
        for name, call in case["calls"].items():
            figure = of(case, call)
            if figure is not None:
                made.setdefault(name, []).append((case["tokens"], *figure))
    return made


def _time(case: dict, call: dict) -> tuple[float, float, float]:
    times = call.get("graph") or call["called"]
    return tuple(1e6 * times[name] / case["layers"] for name in ("median", "p10", "p90"))


def _share(case: dict, call: dict) -> tuple[float, float, float] | None:
    if "share_of_copy" not in call:
        return None
    times, share = call.get("graph") or call["called"], 100 * call["share_of_copy"]
    return tuple(share * times["median"] / times[name] for name in ("median", "p90", "p10"))


def kernels(facts: dict, path: Path) -> None:
    """Draw scoring, decode attention, compaction and shares of a prefill; none without cases."""
    cases = facts["cases"]

    def of(topic: str) -> list[dict]:
        return [case for case in cases if case["topic"] == topic]

    batches = sorted({case["batch"] for case in of("decode attention")})
    batch = 16 if 16 in batches else (batches or [0])[-1]
    parts = [
        (_copied, [case for case in of("scoring") if case["layers"] == 1], "Scoring of one layer"),
        (_attended, [case for case in of("decode attention") if case["batch"] == batch],
         f"Decode attention of one layer, batch {batch}"),
        (_compacted, of("compaction"), "Compaction, all layers (dashed: target)"),
        (_added_to_prefill, [case for case in cases if _added(case)],
         "All layers, as called (dashed: target of scoring)"),
    ]  # fmt: skip
    drawn = grid(path, len(parts := [part for part in parts if part[1]]))
    if drawn is None:
        return
    figure, places = drawn
    for axes, (draw_part, own, title) in zip(places, parts, strict=True):
        draw_part(axes, own)
        axes.set_title(title)
        token_axis(axes, own)
    device = facts["machine"].split(",")[0]
    figure.suptitle(f"Kernels on {device}; bars: 10th to 90th percentile", fontsize=10)
    save(figure, path)


def _copied(axes: Axes, cases: list[dict]) -> None:
    draw(axes, _lines(cases, _share))
    axes.set_ylabel("% of copy bandwidth")
    axes.set_ylim(bottom=0)


def _compacted(axes: Axes, cases: list[dict]) -> None:
    axes.axhline(60, **LINE)
    _copied(axes, cases)


def _attended(axes: Axes, cases: list[dict]) -> None:
    draw(axes, _lines(cases, _time))
    axes.set_ylabel("microseconds")
    axes.set_yscale("log")


def _added_to_prefill(axes: Axes, cases: list[dict]) -> None:
    draw(axes, _prefill(cases))
    axes.axhline(0.5, **LINE)
    axes.set_ylabel("% of prefill")
    axes.set_yscale("log")


def _added(case: dict) -> bool:
    """Whether our call of a case is part of every prefill, and of no other case."""
    twice = (case["topic"] == "scoring" and case["layers"] == 1) or "own numbers" in case["case"]
    return "share_of_prefill" in next(iter(case["calls"].values())) and not twice


def _prefill(cases: Iterable[dict]) -> Lines:
    made: Lines = {}
    for case in cases:
        call = next(iter(case["calls"].values()))
        share, times = 100 * call["share_of_prefill"], call["called"]
        spread = (share * times[name] / times["median"] for name in ("p10", "p90"))
        name = f"{case['topic']}: {case['case']}"
        made.setdefault(name, []).append((case["tokens"], share, *spread))
    return made


def save(figure, path: Path) -> None:
    """Write a figure and free it."""
    from matplotlib import pyplot

    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def serving(facts: dict, path: Path) -> None:
    """Draw TTFT and TPOT at equal batch, and a crowd's throughput and size where there was one.

    The x axis has the shares kept, or the lengths of prompts where there are more of those.
    """
    cells, batch = facts["cells"], facts["at_once"]
    equal = [cell for cell in cells if cell["requests"] == batch]
    crowd = [cell for cell in cells if cell["requests"] != batch]
    lengths = {cell["tokens"] for cell in equal}
    by_length = len(lengths) > len({cell["share"] for cell in equal if cell["share"] < 1})
    # The longest prompts that were served with a policy.
    longest = max((cell["tokens"] for cell in equal if cell["share"] < 1), default=0)
    if not by_length:
        equal = [cell for cell in equal if cell["tokens"] == longest]
    parts = [
        (equal, by_length, "ttft", 1000, "TTFT at equal batch, ms"),
        (equal, by_length, "tpot", 1000, "TPOT at equal batch, ms"),
        (crowd, False, "throughput", 1, "Tokens per second, crowd in a tight pool"),
        (crowd, False, "at_once", 1, "Requests decoded at once, crowd in a tight pool"),
    ]
    drawn = grid(path, len(parts := [part for part in parts if part[0]]))
    if drawn is None:
        return
    figure, places = drawn
    for axes, (part, of_lengths, name, scale, title) in zip(places, parts, strict=True):
        lines: Lines = {}
        for cell in part:
            x = cell["tokens"] if of_lengths else 100 * cell["share"]
            point = (x, *_middle(cell[name], scale))
            lines.setdefault(_policy(cell["server"]), []).append(point)
        draw(axes, lines)
        axes.set_title(title)
        if of_lengths:
            token_axis(axes, part)
        else:
            axes.set_xlabel("% of the prompt kept, as asked")
        if of_lengths and name == "ttft":
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
    device = facts["machine"].split(",")[0]
    shares = sorted({cell["share"] for cell in equal if cell["share"] < 1})
    what = ", ".join(f"{100 * share:.3g} %" for share in shares) + " kept"
    what = what if by_length else f"prompts of {longest} tokens"
    title = f"Serving on {device}, {what}, {batch} at equal batch"
    figure.suptitle(f"{title}; bars: 10th to 90th percentile", fontsize=10)
    save(figure, path)


def _policy(label: str) -> str:
    """A cell's label without its share."""
    name, _, share = label.rpartition(" ")
    return name if share.endswith("%") else label


def _middle(values: list[float], scale: float) -> tuple[float, float, float]:
    facts = summary(values)
    return tuple(scale * facts[name] for name in ("median", "p10", "p90"))
