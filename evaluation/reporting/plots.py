"""The pictures of a run as PNG files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import numpy as np
from kvpolicy.evaluation.records import FULL
from kvpolicy.evaluation.reporting import plot_kept, plot_labels, summary_text
from kvpolicy.evaluation.reporting.needles import needles
from kvpolicy.evaluation.reporting.plot_style import MOST, OTHERS, LineStyle, style
from kvpolicy.evaluation.reporting.results import Series
from kvpolicy.evaluation.reporting.summary import COSTS, Summary, SummaryRow, front, named, point
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from matplotlib.transforms import ScaledTranslation

DPI = 120
MARKS = {"circle": "o", "square": "s", "diamond": "D", "triangle": "^", "down": "v", "cross": "X"}
FULL_LINE = {"color": "black", "linestyle": (0, (4, 2)), "linewidth": 1.2}
STAR = {"color": "black", "marker": "*", "markersize": 11, "linestyle": "none"}
ASIDE = 2  # horizontal distance between two curves at one share, in points
PANELS = 24  # largest number of panels with several budgets in needle.png
AXES = {"kv_bytes": "KV memory of the prompt, MiB", "ttft": "time to first token, ms",
        "tpot": "time per output token, ms"}  # fmt: skip
SCALES = {"kv_bytes": 2**-20, "ttft": 1000, "tpot": 1000}
_Placed = list[tuple[SummaryRow, tuple[float, float]]]  # rows and their points in the picture


def write(summary: Summary, folder: Path) -> list[Path]:
    """Writes accuracy.png, pareto.png, needle.png and kept.png, those that the run has figures for.

    Returns:
        The paths of the files written.
    """
    paths = []
    for name, draw in (
        ("accuracy.png", accuracy),
        ("pareto.png", pareto),
        ("needle.png", needle),
        ("kept.png", plot_kept.kept),
    ):
        figure = draw(summary)
        if figure is None:
            (folder / name).unlink(missing_ok=True)  # a picture left by an earlier report
        else:
            # The version of matplotlib is left out, so that equal inputs give equal files.
            figure.savefig(folder / name, dpi=DPI, metadata={"Software": None})
            pyplot.close(figure)
            paths.append(folder / name)
    return paths


def _styles(summary: Summary) -> dict[str, LineStyle]:
    """Styles of the policies drawn in colour."""
    return {policy: style(i) for i, policy in enumerate(summary.prominent(MOST))}


def _policies(summary: Summary) -> list[str]:
    return list(dict.fromkeys(p for p, _ in summary.results.series if p != FULL))


def _legend(
    figure: Figure, summary: Summary, styles: dict[str, LineStyle], full: dict | None
) -> None:
    """Draws the legend below the panels; `full` has the line options of full KV, if shown."""
    handles = [
        pyplot.Line2D([], [], color=s.colour, marker=MARKS[s.marker], linestyle=_dash(s),
                      label=policy, markersize=5, linewidth=1.5)
        for policy, s in styles.items()
    ]  # fmt: skip
    others = len(_policies(summary)) - len(styles)
    if others > 0:
        label = f"{others} others" if others > 1 else "another policy"
        handles.append(pyplot.Line2D([], [], color=OTHERS, linewidth=0.9, marker=".", label=label))
    if full:
        handles.append(pyplot.Line2D([], [], **full, label="full KV"))
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 5),
                      fontsize=8, frameon=False)  # fmt: skip


def _dash(s: LineStyle) -> str | tuple:
    return (0, s.dash) if s.dash else "-"


def _grid(count: int, width: float, height: float, most_columns: int, share: str = "all"):
    """A figure of `count` panels of `width` x `height` inches, at most `most_columns` in a row."""
    columns = min(most_columns, count)
    rows = -(-count // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(max(4.5, width * columns), height * rows + 0.8), squeeze=False,
        sharex=share, sharey=share, layout="constrained",
    )  # fmt: skip
    panels = list(axes.flat)
    for axis in panels[count:]:
        axis.set_visible(False)
    # The lowest panel of each column has the numbers, even if the place below it is empty.
    for axis in panels[max(0, count - columns) : count]:
        axis.tick_params(labelbottom=True)
    return figure, panels[:count]


def accuracy(summary: Summary) -> Figure | None:
    """Draws the score against the share kept: a panel per task, a curve per policy."""
    tasks = list(summary.results.tasks)
    panel_tasks = [None, *tasks] if len(tasks) > 1 else tasks
    styles = _styles(summary)
    figure, panels = _grid(len(panel_tasks), 3.2, 2.6, 4)
    for axis, task in zip(panels, panel_tasks, strict=True):
        for policy in _policies(summary):
            offset = list(styles).index(policy) - (len(styles) - 1) / 2 if policy in styles else 0
            _curve(axis, summary, policy, task, styles.get(policy), offset * ASIDE)
        full = [summary.row(s, task).score for s in summary.results.series if s[0] == FULL]
        if full and full[0]:
            axis.axhline(100 * full[0].mean, **FULL_LINE, zorder=1)
        axis.set_title("All tasks" if task is None else summary.results.short[task], fontsize=9)
        axis.set_ylim(-3, 103)
        axis.grid(alpha=0.25)
        axis.tick_params(labelsize=8)
    _share_axis(panels, summary)
    samples = summary_text.samples(summary.results)
    figure.suptitle(f"Score against what is kept; bars: 95 % intervals of {samples} samples "
                    "per task and length", fontsize=10)  # fmt: skip
    has_full = any(series[0] == FULL for series in summary.results.series)
    _legend(figure, summary, styles, FULL_LINE if has_full else None)
    return figure


def _curve(
    axis: Axes, summary: Summary, policy: str, task: str | None, s: LineStyle | None, offset: float
) -> None:
    """Draws one policy, moved by `offset` points, so that bars at one share do not overlap."""
    rows = [summary.row(series, task) for series in summary.results.series if series[0] == policy]
    points = [(row.kept, row.score) for row in rows if row.score and row.kept]
    if not points:
        return
    points.sort(key=lambda pair: pair[0])
    x = [100 * kept for kept, _ in points]
    mean, low, high = 100 * np.array([score for _, score in points]).T
    if s is None:
        axis.plot(x, mean, color=OTHERS, linewidth=0.8, marker=".", markersize=3, zorder=1.5)
        return
    shift = ScaledTranslation(offset / 72, 0, axis.figure.dpi_scale_trans)
    axis.errorbar(x, mean, yerr=[mean - low, high - mean], color=s.colour, marker=MARKS[s.marker],
                  linestyle=_dash(s), markersize=4, linewidth=1.4, elinewidth=0.8, capsize=2,
                  zorder=3, transform=axis.transData + shift)  # fmt: skip


def _share_axis(panels: Sequence[Axes], summary: Summary) -> None:
    """Makes the axis of shares logarithmic, with the budgets as ticks."""
    budgets = {100 * budget for _, budget in summary.results.series if budget}
    # Full KV is a horizontal line without a share.
    kept = [100 * row.kept for row in summary.rows.values() if row.kept and row.policy != FULL]
    ticks = sorted(budgets | ({100} if max(kept, default=100) > 90 else set()))
    panels[0].set_xscale("log")
    low, high = min([*kept, *ticks]), max([*kept, *ticks])
    room = (high / low) ** 0.06 * 1.05
    panels[0].set_xlim(low / room, high * room)
    for axis in panels:
        if axis.xaxis.get_tick_params()["labelbottom"]:
            axis.set_xlabel("entries of the prompt kept, %", fontsize=8)
        place = axis.get_subplotspec()
        if place is not None and place.is_first_col():
            axis.set_ylabel("score, %", fontsize=8)
        axis.xaxis.set_major_locator(FixedLocator(ticks))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))


def pareto(summary: Summary) -> Figure | None:
    """Draws the mean score over all tasks against memory and times, with the front of each."""
    rows = [summary.row(series) for series in summary.results.series]
    by_cost = {cost: placed for cost in COSTS if (placed := _known(rows, cost))}
    if not by_cost:
        return None
    styles = _styles(summary)
    figure, panels = _grid(len(by_cost), 5, 4.4, 3, share="none")
    for axis, (cost, placed) in zip(panels, by_cost.items(), strict=True):
        _points(axis, placed, styles)
        axis.set_xlabel(AXES[cost], fontsize=9)
        axis.set_ylabel("mean score over all tasks, %", fontsize=9)
        axis.grid(alpha=0.25)
        axis.tick_params(labelsize=8)
    figure.suptitle("Score against memory and time; joined: what nothing beats in both; named: "
                    "the best of each cost", fontsize=10)  # fmt: skip
    _legend(figure, summary, styles, STAR if any(row.policy == FULL for row in rows) else None)
    figure.canvas.draw()  # the layout must be final before labels are placed
    figure.set_layout_engine("none")
    for axis, placed in zip(panels, by_cost.values(), strict=True):
        _name_front(axis, placed)
    return figure


def _known(rows: Sequence[SummaryRow], cost: str) -> _Placed:
    """The rows that have a score and a cost, with their points (scaled cost, score in percent)."""
    pairs = ((row, point(row, cost)) for row in rows)
    return [(row, (SCALES[cost] * xy[0], 100 * xy[1])) for row, xy in pairs if xy is not None]


def _points(axis: Axes, placed: _Placed, styles: dict[str, LineStyle]) -> None:
    for row, (x, y) in placed:
        s = styles.get(row.policy)
        options: dict[str, Any]
        if row.policy == FULL:
            options = STAR | {"zorder": 4}
        elif s:
            options = {"color": s.colour, "marker": MARKS[s.marker], "markersize": 6, "zorder": 3}
        else:
            options = {"color": OTHERS, "marker": ".", "markersize": 6, "zorder": 2}
        axis.plot([x], [y], **options)
    points = [xy for _, xy in placed]
    best = sorted(points[i] for i in front(points))
    axis.plot(*zip(*best, strict=True), color="black", linewidth=0.8, drawstyle="steps-post",
              zorder=1.8)  # fmt: skip
    axis.margins(0.09)


def _name_front(axis: Axes, placed: _Placed) -> None:
    points = [xy for _, xy in placed]
    best = named(points)
    names = [summary_text.name(placed[i][0].series) for i in best]
    line = sorted(points[i] for i in front(points))
    plot_labels.annotate(axis, [points[i] for i in best], names, points, line)


def needle(summary: Summary) -> Figure | None:
    """Draws scores by depth and length for the first task with needles, a panel per series."""
    by_task = needles(summary.results)
    if not by_task:
        return None
    task, heat = next(iter(by_task.items()))
    panel_series = [series for series in summary.results.series if series in heat.score]
    budget, columns = None, max(Counter(policy for policy, _ in panel_series).values())
    if len(panel_series) > PANELS:
        budget = summary.telling_budget()
        panel_series = [series for series in panel_series if series[1] in (budget, None)]
    if budget is not None or columns == 1:
        columns = int(np.ceil(np.sqrt(1.8 * len(panel_series))))
    rows = _rows(panel_series, columns)
    width = 0.75 + 0.42 * max(2, len(summary.results.lengths))
    figure, panels = pyplot.subplots(
        len(rows), columns, figsize=(max(4.5, width * columns + 1), 2 * len(rows) + 1),
        squeeze=False, layout="constrained",
    )  # fmt: skip
    for axes_row, row in zip(panels, rows, strict=True):
        for axis, series in zip(axes_row, [*row, *[None] * (columns - len(row))], strict=True):
            axis.set_visible(series is not None)
            if series:
                shades = _heat(axis, heat.score[series], series, summary.results.lengths)
    bar = figure.colorbar(shades, ax=panels, shrink=0.8, pad=0.02)
    bar.set_label("score, %", fontsize=9)
    bar.ax.tick_params(labelsize=8)
    figure.supxlabel("prompt tokens (grey: nothing was asked there)", fontsize=9)
    figure.supylabel("depth of the answer in the prompt, %", fontsize=9)
    title = f"Where the needle is found: {summary.results.short[task]}"
    figure.suptitle(title + (f", {summary_text.percent(budget)} asked for" if budget else ""),
                    fontsize=10)  # fmt: skip
    return figure


def _rows(panel_series: Sequence[Series], columns: int) -> list[list[Series]]:
    """Rows of panels: one per policy if a policy has several budgets, else `columns` per row."""
    policies = list(dict.fromkeys(policy for policy, _ in panel_series))
    if len(policies) < len(panel_series):
        return [[series for series in panel_series if series[0] == policy] for policy in policies]
    return [list(panel_series[i : i + columns]) for i in range(0, len(panel_series), columns)]


def _heat(axis: Axes, score: np.ndarray, series: Series, lengths: Sequence[int]) -> AxesImage:
    shades = axis.imshow(100 * score, cmap="cividis", vmin=0, vmax=100, aspect="auto",
                         origin="upper")  # fmt: skip
    axis.set_facecolor("#dddddd")
    policy, budget = summary_text.name((series[0], None)), series[1]
    title = policy if budget is None else f"{policy}\n{summary_text.percent(budget)}"
    axis.set_title(title, fontsize=7.5)
    names = [str(length) for length in lengths]
    axis.set_xticks(range(len(lengths)), names, fontsize=7, rotation=90 * (len(lengths) > 3))
    axis.set_yticks((-0.5, len(score) / 2 - 0.5, len(score) - 0.5), ("0", "50", "100"), fontsize=7)
    return shades
