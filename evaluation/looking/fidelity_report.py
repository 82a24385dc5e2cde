"""Table, files and page of `kvpolicy fidelity`."""

from __future__ import annotations

import csv
import html
import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from kvpolicy.dsl.tools.units import share_text
from kvpolicy.evaluation.looking.distributions import FEWEST
from kvpolicy.evaluation.looking.fidelity_result import Compared, PolicyFidelity, summaries
from kvpolicy.evaluation.reporting import plot_style
from kvpolicy.experiments.reporting import html_table, offline_page

_COLUMNS = (
    "policy",
    "kept",
    "mean KL, nats",
    "median",
    "99 %",
    "same top token",
    "first other",
    "first other, free",
    "perplexity (full KV)",
)
_SOURCES = Path(__file__).parents[1] / "pages"
_OWN = ("fidelity.css", "policy_style.js", "fidelity.js")
_BINS = 32  # largest number of bins of positions in a chart
_LEAST = 8  # fewest values in a bin, on average over all bins
_SHOWN = 4  # largest number of texts per policy on the page


def table(results: Sequence[Compared]) -> list[str]:
    """Lines for the terminal: a row per policy, and notes on the figures."""
    rows = [_COLUMNS, *map(_row, summaries(results))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)) for row in rows]
    return [*(line.rstrip() for line in lines), "", *notes(results)]


def _row(summary: PolicyFidelity) -> tuple[str, ...]:
    kl, agreement = f"{summary.kl.mean():.4f}", share_text(summary.agree.mean(), 1)
    if (of_kl := summary.kl_interval()) and (of_agreement := summary.agreement_interval()):
        kl += " ({:.4f} to {:.4f})".format(*of_kl)
        agreement += " ({:.1f} to {:.1f})".format(*(100 * share for share in of_agreement))
    with_policy, full = summary.perplexities()
    return (
        summary.title,
        "?" if summary.kept is None else share_text(summary.kept, 1),
        kl,
        f"{np.median(summary.kl):.4f}",
        f"{np.percentile(summary.kl, 99):.4f}",
        agreement,
        summary.first(greedy=False),
        summary.first(greedy=True),
        f"{with_policy:.5g} ({full:.5g})",
    )


def notes(results: Sequence[Compared]) -> Iterator[str]:
    """Sentences on what the figures mean."""
    texts = {result.text: len(result.continuation) for result in results}
    positions = sum(texts.values())
    count = "1 text" if len(texts) == 1 else f"{len(texts)} texts"
    has_intervals = summaries(results)[0].kl_interval() is not None
    intervals = "95 % intervals" if has_intervals else f"no intervals, which need {FEWEST} pieces"
    yield (
        f"{positions:,} positions of {count}; {intervals}; KL(full KV || policy) of the next "
        "token, every token before it given"
    )
    first = results[0]
    if first.whole:
        yield f"KL is over the whole vocabulary of {first.full.ids.shape[1]:,} tokens"
    else:
        least = min(result.distance.covered.min() for result in results)
        yield (
            f"KL is a lower bound: {first.full.ids.shape[1]:,} tokens of each distribution are "
            f"known, which are {share_text(least, 1)} of its probability at the least"
        )
    yield (
        "first other: position at which the top token is another one; free: at which another one "
        "is generated (medians over texts; position 0 is of the prefill)"
    )
    for result in results:
        if result.uncompressed:
            yield f"{result.policy} served {result.text} in full: {result.uncompressed}"


def write(results: Sequence[Compared], folder: Path) -> list[Path]:
    """Writes fidelity.csv (a row per position), .jsonl (a line per policy and text), .png, .html.

    Returns:
        The paths of the four files.

    Raises:
        OSError: a file cannot be written.
    """
    paths = [folder / f"fidelity.{end}" for end in ("csv", "jsonl", "png", "html")]
    with paths[0].open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(_positions(results))
    lines = [json.dumps(result.as_row(), ensure_ascii=False) for result in results]
    paths[1].write_text("\n".join(lines) + "\n", encoding="utf-8")
    draw(summaries(results), paths[2])
    paths[3].write_text(page(results), encoding="utf-8")
    return paths


def _positions(results: Sequence[Compared]) -> Iterator[tuple]:
    yield (
        *("text", "policy", "position", "token_id", "token", "kl", "agree", "covered"),
        *("top_full", "top_policy", "logprob_full", "logprob_policy"),
    )
    for result in results:
        for position, token in enumerate(result.continuation):
            yield (
                *(result.text, result.policy, position, token, result.words[position]),
                *(f"{result.distance.kl[position]:.9g}", int(result.distance.agree[position])),
                f"{result.distance.covered[position]:.9g}",
                *(result.full.ids[position, 0], result.other.ids[position, 0]),
                *(f"{result.full.given[position]:.9g}", f"{result.other.given[position]:.9g}"),
            )


def draw(found: Sequence[PolicyFidelity], path: Path) -> None:
    """Draws KL and agreement by position, a line per policy: means over texts in each bin."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, (kl_axis, agree_axis) = plt.subplots(
        2, 1, figsize=(8, 6), sharex=True, layout="constrained"
    )
    for number, summary in enumerate(found):
        style = plot_style.style(number)
        options = {
            "color": style.colour,
            "lw": 1.8,
            "marker": "o",
            "ms": 3.5,
            "label": summary.title,
        }
        if style.dash:
            options["dashes"] = style.dash
        for axis, name in ((kl_axis, "kl"), (agree_axis, "agree")):
            axis.plot(*by_position([getattr(p.distance, name) for p in summary.parts]), **options)
    kl_axis.set_ylabel("KL(full KV || policy), nats")
    # Where distributions agree to rounding, a logarithmic scale would magnify noise.
    kl_axis.set_yscale("symlog", linthresh=1e-4)
    kl_axis.set_ylim(bottom=0)
    agree_axis.set_ylabel("positions with the same top token")
    agree_axis.set_ylim(-0.02, 1.02)
    agree_axis.set_xlim(left=-0.5)
    agree_axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    agree_axis.set_xlabel("position in the continuation, tokens")
    lines, names = agree_axis.get_legend_handles_labels()
    figure.legend(lines, names, loc="outside upper left", ncols=2, frameon=False, fontsize=9)
    for axis in (kl_axis, agree_axis):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def by_position(values: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The middle of each bin of positions, and the mean in it over all texts: float64 [bins].

    Args:
        values: [T] of each text.
    """
    longest = max(map(len, values))
    bins = max(1, min(_BINS, longest, sum(map(len, values)) // _LEAST))
    edges = np.linspace(0, longest, bins + 1).astype(int)
    means = []
    for start, stop in pairwise(edges):
        means.append(np.mean(np.concatenate([text_values[start:stop] for text_values in values])))
    return (edges[:-1] + edges[1:] - 1) / 2, np.array(means)


def page(results: Sequence[Compared]) -> str:
    """The HTML page, which needs no network: table, charts, and texts with the KL of each token."""
    policy_summaries = summaries(results)
    head = [f"{_COLUMNS[0]} ", *_COLUMNS[1:]]
    paragraphs = "\n".join(f"<p>{html.escape(note)}</p>" for note in notes(results))
    texts = "\n".join(
        _text(part) for summary in policy_summaries for part in summary.parts[:_SHOWN]
    )
    body = f"""<h1>Fidelity to full KV</h1>
{html_table.table("Distance from full KV by policy", head, [*map(_row, policy_summaries)])}
{paragraphs}
<h2>By position</h2>
<div id="policies"></div>
{offline_page.figure("kl", "KL divergence by position")}
{offline_page.figure("agree", "Positions with the same top token")}
<h2>Where it differs</h2>
<p>Darker: the distribution of this token is further from full KV's, from a KL of 0.01, 0.1, 0.5 and
2 nats on. <span class="other">Underlined</span>: the likeliest token is another one.</p>
{texts}"""
    sources = [_SOURCES / name for name in _OWN]
    return offline_page.page("Fidelity to full KV", body, list(_charts(policy_summaries)), sources)


def _charts(policy_summaries: Sequence[PolicyFidelity]) -> Iterator[dict[str, Any]]:
    """Data of each policy for `pages/fidelity.js`: figures by position, and the line's style."""
    for number, summary in enumerate(policy_summaries):
        positions, kl = by_position([part.distance.kl for part in summary.parts])
        _, agree = by_position([part.distance.agree for part in summary.parts])
        yield {
            "name": summary.title,
            "style": plot_style.style(number)._asdict(),
            "positions": positions.tolist(),
            "kl": [float(f"{value:.4g}") for value in kl],
            "agree": [float(f"{value:.4g}") for value in agree],
        }


def _text(part: Compared) -> str:
    """A continuation: darker where the KL is larger, underlined where the top token differs."""
    spans = []
    for position, word in enumerate(part.words):
        kl, agree = part.distance.kl[position], part.distance.agree[position]
        shade = int(np.searchsorted((0.01, 0.1, 0.5, 2.0), kl))
        kind = f"kl{shade}" + ("" if agree else " other")
        title = f"position {position}: KL {kl:.4f}" + ("" if agree else ", another top token")
        spans.append(f'<span class="{kind}" title="{title}">{html.escape(word)}</span>')
    name = html.escape(f"{part.policy}, {part.text}")
    region = f'class="words" tabindex="0" role="region" aria-label="Text: {name}"'
    return f"<h3>{name}</h3>\n<pre {region}>{''.join(spans)}</pre>"
