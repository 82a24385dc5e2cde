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
    """Draw four panels: scoring, decode attention, compaction, and shares of a prefill."""
    drawn = panels(path, 2, 2, (11, 8))
    if drawn is None:
        return
    figure, ((scoring, attention), (compaction, prefill)) = drawn
    cases = facts["cases"]

    def of(topic: str) -> list[dict]:
        return [case for case in cases if case["topic"] == topic]

    one = [case for case in of("scoring") if case["layers"] == 1]
    compaction.axhline(60, **LINE)
    for axes, own, title in (
        (scoring, one, "Window scoring of one layer"),
        (compaction, of("compaction"), "Compaction, all layers (dashed: target)"),
    ):
        draw(axes, _lines(own, _share))
        axes.set(title=title, ylabel="% of copy bandwidth")
        axes.set_ylim(bottom=0)
        token_axis(axes, own)
    batches = sorted({case["batch"] for case in of("decode attention")})
    batch = 16 if 16 in batches else (batches or [0])[-1]
    own = [case for case in of("decode attention") if case["batch"] == batch]
    draw(attention, _lines(own, _time))
    attention.set(title=f"Decode attention of one layer, batch {batch}", ylabel="microseconds")
    attention.set_yscale("log")
    token_axis(attention, own)
    draw(prefill, _prefill(cases))
    prefill.axhline(0.5, **LINE)
    prefill.set(title="All layers, as called (dashed: target of scoring)", ylabel="% of prefill")
    prefill.set_yscale("log")
    token_axis(prefill, [case for case in cases if _added(case) is not None])
    device = facts["machine"].split(",")[0]
    figure.suptitle(f"Kernels on {device}; bars: 10th to 90th percentile", fontsize=10)
    save(figure, path)


def _added(case: dict) -> dict | None:
    """Our call of a case that is part of every prefill; None for others and for duplicates."""
    call = next(iter(case["calls"].values()))
    twice = (case["topic"] == "scoring" and case["layers"] == 1) or "own numbers" in case["case"]
    return call if "share_of_prefill" in call and not twice else None


def _prefill(cases: Iterable[dict]) -> Lines:
    made: Lines = {}
    for case in cases:
        call = _added(case)
        if call is not None:
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
    """Draw four panels over the share kept: TTFT and TPOT at equal batch; results of a crowd."""
    drawn = panels(path, 2, 2, (11, 8))
    if drawn is None:
        return
    figure, axs = drawn
    cells = facts["cells"]
    equal = [cell for cell in cells if cell["requests"] == facts["at_once"]]
    # The longest prompts that were served with a policy.
    longest = max((cell["tokens"] for cell in equal if cell["share"] < 1), default=0)
    equal = [cell for cell in equal if cell["tokens"] == longest]
    crowd = [cell for cell in cells if cell["requests"] != facts["at_once"]]
    for axes, part, name, scale, title in (
        (axs[0, 0], equal, "ttft", 1000, "TTFT at equal batch, ms"),
        (axs[0, 1], equal, "tpot", 1000, "TPOT at equal batch, ms"),
        (axs[1, 0], crowd, "throughput", 1, "Tokens per second, crowd in a tight pool"),
        (axs[1, 1], crowd, "at_once", 1, "Requests decoded at once, crowd in a tight pool"),
    ):
        lines: Lines = {}
        for cell in part:
            point = (100 * cell["share"], *_middle(cell[name], scale))
            lines.setdefault(_policy(cell["server"]), []).append(point)
        draw(axes, lines)
        axes.set(title=title, xlabel="% of the prompt kept, as asked")
        axes.set_ylim(bottom=0)
    device = facts["machine"].split(",")[0]
    title = f"Serving on {device}, prompts of {longest} tokens, {facts['at_once']} at equal batch"
    figure.suptitle(f"{title}; bars: 10th to 90th percentile", fontsize=10)
    save(figure, path)


def _policy(label: str) -> str:
    """A cell's label without its share."""
    name, _, share = label.rpartition(" ")
    return name if share.endswith("%") else label


def _middle(values: list[float], scale: float) -> tuple[float, float, float]:
    facts = summary(values)
    return tuple(scale * facts[name] for name in ("median", "p10", "p90"))
