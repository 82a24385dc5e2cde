"""A picture of the entries that policies keep of one prompt: positions across, heads down."""

from __future__ import annotations

from kvpolicy.dsl.tools.units import share_text
from kvpolicy.evaluation.looking.kept import unpacked
from kvpolicy.evaluation.reporting import summary_text
from kvpolicy.evaluation.reporting.summary import Summary
from matplotlib import pyplot
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

MOST_PANELS = 8
SHADES = ListedColormap(("#ffffff00", "#0072B2"))
ASKED = "#E69F00"
LABELLED = 16  # largest number of rows with a label


def kept(summary: Summary) -> Figure | None:
    """Draws the maps of one prompt, the first that has maps; None if there are none to draw.

    Of several budgets, the one at which the policies' scores differ most is drawn if it has maps.
    """
    maps = summary.results.maps
    if not maps:
        return None
    prompt = (maps[0]["task"], maps[0]["length"], maps[0]["index"])
    prompt_maps = [m for m in maps if (m["task"], m["length"], m["index"]) == prompt]
    budgets = {m["budget"] for m in prompt_maps}
    budget = summary.telling_budget()
    budget = budget if budget in budgets else prompt_maps[0]["budget"]
    best = summary.prominent(len(prompt_maps))
    prompt_maps = sorted(
        (m for m in prompt_maps if m["budget"] in (budget, None) and m["policy"] in best),
        key=lambda m: best.index(m["policy"]),
    )[:MOST_PANELS]
    if not prompt_maps:
        return None
    figure, axes = pyplot.subplots(
        len(prompt_maps), 1, figsize=(9, 1.45 * len(prompt_maps) + 0.6), sharex=True,
        squeeze=False, layout="constrained",
    )  # fmt: skip
    for axis, entry in zip(axes[:, 0], prompt_maps, strict=True):
        _panel(axis, entry)
    axes[-1, 0].set_xlabel("position in the prompt", fontsize=9)
    figure.supylabel("layer.KV head", fontsize=9)
    shaded = ", shaded: what it asks for" if prompt_maps[0].get("asked") else ""
    budget_text = f", {summary_text.percent(budget)} to be kept" if budget else ""
    title = f"What is kept (dark) of one {summary.results.short[prompt[0]]} prompt"
    figure.suptitle(title + budget_text + shaded, fontsize=10)
    return figure


def _panel(axis: pyplot.Axes, entry: dict) -> None:
    kept_mask = unpacked(entry, len(entry["tokens"]))
    layers, heads, tokens = kept_mask.shape
    rows = kept_mask.reshape(layers * heads, tokens)
    axis.set_facecolor("#eef1f5")
    axis.imshow(rows, cmap=SHADES, vmin=0, vmax=1, aspect="auto", interpolation="nearest", zorder=1)
    for start, stop in entry.get("asked") or ():
        # The area is below the kept entries, its edges are above them.
        axis.axvspan(start - 0.5, stop - 0.5, color=ASKED, alpha=0.6, linewidth=0, zorder=0)
        axis.vlines((start - 0.5, stop - 0.5), -0.5, len(rows) - 0.5, color=ASKED, linewidth=0.8)
    step = max(1, -(-layers * heads // LABELLED))
    if step > 1:  # label whole layers only
        step = -(-step // heads) * heads
    ticks = range(0, layers * heads, step)
    axis.set_yticks(ticks, [f"{i // heads}.{i % heads}" for i in ticks], fontsize=6)
    axis.tick_params(axis="x", labelsize=8)
    axis.set_title(f"{entry['policy']}: {share_text(rows.mean(), 1)} kept", fontsize=9, loc="left",
                   pad=3)  # fmt: skip
    axis.spines[["top", "right"]].set_visible(False)
