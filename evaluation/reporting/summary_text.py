"""The summary as Markdown tables that are also readable in a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import ROUND_HALF_UP, Decimal

from kvpolicy.dsl.tools.units import digits_text, share_text, size_text
from kvpolicy.evaluation.records import FULL
from kvpolicy.evaluation.reporting.results import Results, Series
from kvpolicy.evaluation.reporting.statistics import FEW, Estimate, Spread
from kvpolicy.evaluation.reporting.summary import Summary, SummaryRow, Turns

UNKNOWN = "-"
EXPLAINED = (
    "Scores in percent with their 95 % intervals; `n = a/b`: only a of b questions have an answer, "
    "and the score is of those. All tasks: each task and length has the same weight."
)


def percent(share: float | None) -> str:
    """A share in percent; `-` for None."""
    return UNKNOWN if share is None else share_text(share)


def name(series: Series) -> str:
    """Name of a policy with its budget, for people."""
    policy, budget = series
    policy_name = "full KV" if policy == FULL else policy
    return policy_name if budget is None else f"{policy_name} {percent(budget)}"


def size(count: float | None) -> str:
    """A number of bytes with its unit; `-` for None."""
    return UNKNOWN if count is None else size_text(count)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A Markdown table aligned in plain text too; the first `left` columns are left-aligned."""
    head, *rows = ([_in_table(cell) for cell in row] for row in (head, *rows))
    widths = [max(3, *(len(row[i]) for row in [head, *rows])) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "| " + " | ".join(padded) + " |"

    rule = ("-" * width if i < left else "-" * (width - 1) + ":" for i, width in enumerate(widths))
    return "\n".join([line(head), "| " + " | ".join(rule) + " |", *map(line, rows)])


def _in_table(cell: str) -> str:
    """A text that ends neither its cell nor its line."""
    return " ".join(cell.split("\n")).replace("|", "\\|")


def scored(row: SummaryRow) -> str:
    """The score with its interval; and `n = answered/asked` if questions lack an answer."""
    missing = "" if row.complete else f"n = {row.answered}/{row.asked}"
    if row.score is None:
        return missing or UNKNOWN
    mean, low, high = map(rounded, row.score)
    return f"{mean} ({low} to {high})" + (f" {missing}" if missing else "")


def rounded(share: float, step: str = "1") -> Decimal:
    """A share in percent, rounded half away from zero from four digits, as on the page."""
    return (100 * Decimal(f"{share:.4g}")).quantize(Decimal(step), ROUND_HALF_UP) + 0  # no -0


def signed(estimate: Estimate | None) -> str:
    """A difference in points with its interval; in bold if the interval excludes zero."""
    if estimate is None:
        return UNKNOWN
    mean, low, high = estimate
    text = f"{_points(mean)} ({_points(low)} to {_points(high)})"
    return f"**{text}**" if low > 0 or high < 0 else text


def _points(share: float) -> str:
    """Whole points; tenths near zero, so that an interval beside zero does not seem to touch it."""
    points = rounded(share) or rounded(share, "0.1")
    return f"{points:+}" if points else "0"


def milliseconds(spread: Spread | None) -> str:
    """Median and quartiles in milliseconds."""
    if spread is None:
        return UNKNOWN
    return "{} ({} to {})".format(*(digits_text(1000 * value) for value in spread))


def scores(summary: Summary, length: int | None = None) -> str:
    """The main table: scores with policies and budgets down and tasks across, and shares kept."""
    tasks = list(summary.results.tasks)
    columns = [None, *tasks] if len(tasks) > 1 else tasks
    head = ["policy", "asked", "kept", *_names(summary, columns)]
    rows = []
    for series in summary.results.series:
        total = summary.row(series, None, length)
        cells = [scored(summary.row(series, task, length)) for task in columns]
        policy = name((series[0], None))
        rows.append([policy, percent(series[1]), percent(total.kept), *cells])
    return table(head, rows)


def differences(summary: Summary) -> str:
    """The table of differences to full KV, paired by question."""
    tasks = list(summary.results.tasks)
    columns = [None, *tasks] if len(tasks) > 1 else tasks
    rows = [
        [name(series), *(signed(summary.row(series, task).difference) for task in columns)]
        for series in summary.results.series
        if series[0] != FULL
    ]
    return table(["policy", *_names(summary, columns)], rows)


def _names(summary: Summary, tasks: Sequence[str | None]) -> list[str]:
    """Titles of the columns of tasks; None stands for all tasks."""
    return [summary.results.short[task] if task else "all tasks" for task in tasks]


def costs(summary: Summary) -> str:
    """The table of entries, memory and times over all tasks and lengths."""
    head = ["policy", "kept", "held at the end", "KV of the prompt", "TTFT, ms", "TPOT, ms",
            "output tokens", "served in full"]  # fmt: skip
    rows = []
    for series in summary.results.series:
        row = summary.row(series)
        reasons = ", ".join(f"{reason} {count}" for reason, count in row.in_full.items())
        rows.append([
            name(series), percent(row.kept), percent(row.held), size(row.kv_bytes),
            milliseconds(row.ttft), milliseconds(row.tpot),
            UNKNOWN if row.output_tokens is None else f"{row.output_tokens:.1f}",
            reasons or UNKNOWN,
        ])  # fmt: skip
    return table(head, rows)


def conversations(summary: Summary) -> str:
    """The table of first and later questions, for tasks that ask several about one context."""
    kinds = [(task, turns) for task in summary.results.conversations()
             for turns in (Turns.FIRST, Turns.LATER)]  # fmt: skip
    head = ["policy", *(f"{summary.results.short[task]}: {turns}" for task, turns in kinds)]
    rows = [
        [name(series), *(scored(summary.row(series, task, turns=turns)) for task, turns in kinds)]
        for series in summary.results.series
    ]
    return table(head, rows)


def markdown(summary: Summary) -> str:
    """The text of summary.md."""
    plan = summary.results.plan
    short = summary.results.short
    tasks = "\n".join(
        f"* `{short[task]}`: {title}" for task, title in summary.results.tasks.items()
    )
    parts = [
        "# What the policies cost",
        f"    {plan['command']}" if plan.get("command") else "",
        EXPLAINED + _few(summary.results),
        scores(summary),
        tasks,
        *_each_length(summary),
        *_section(summary, "Difference to full KV", differences, _DIFFERENCE, _has_full),
        *_section(summary, "First and later questions", conversations, "", _has_conversations),
        *_section(summary, "Costs", costs, _COSTS),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


_DIFFERENCE = (
    "In points, of the questions that both answered, with 95 % intervals; bold where the interval "
    "leaves zero out. Of many cells one in twenty does so by chance."
)
_COSTS = (
    "Means over all questions; times as median (quartiles), as the client saw them, waiting for "
    "other requests of the run included."
)


def samples(results: Results) -> str:
    """Number of samples per task and length: `100`, or `12 to 100`."""
    least, most = results.samples
    return str(least) if least == most else f"{least} to {most}"


def _few(results: Results) -> str:
    if results.samples[0] >= FEW:
        return ""
    return f" With {samples(results)} samples per task and length the intervals are wide: ask more."


def _has_full(summary: Summary) -> bool:
    return any(row.difference is not None for row in summary.rows.values())


def _has_conversations(summary: Summary) -> bool:
    return bool(summary.results.conversations())


def _section(
    summary: Summary, title: str, text: Callable[[Summary], str], about: str,
    applies: Callable[[Summary], bool] = lambda summary: True,
) -> list[str]:  # fmt: skip
    return [f"## {title}", about, text(summary)] if applies(summary) else []


def _each_length(summary: Summary) -> list[str]:
    lengths = summary.results.lengths
    if len(lengths) == 1:
        return []
    return [part for n in lengths for part in (f"## Prompts of {n} tokens", scores(summary, n))]
