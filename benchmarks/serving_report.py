"""The report of `serving.py` on its cells."""

from __future__ import annotations

import statistics

import report
from timing import summary

STOCK = "stock SGLang"
PLUGIN_OFF = "the package installed, no --kv-policy"
# Key in a cell, name, and whether more is worse.
FIGURES = (("ttft", "TTFT", True), ("tpot", "TPOT", True), ("throughput", "tokens/s", False))
HEADER = (
    "tokens",
    "server",
    "kept, %",
    "requests",
    "TTFT, ms",
    "TPOT, ms",
    "tokens/s",
    "at once",
    "retracted",
)


def rows(cells: list[dict]) -> list[list[object]]:
    """Table rows of cells, by prompt length."""

    def spread(values: list[float], scale: float, digits: int) -> str:
        facts = summary(values)
        return "{:.{d}f} ({:.{d}f}-{:.{d}f})".format(
            *(scale * facts[name] for name in ("median", "p10", "p90")), d=digits
        )

    made = []
    for each in sorted(cells, key=lambda each: each["tokens"]):
        kept = 100 * statistics.mean(each["held"])
        made.append(
            [
                each["tokens"], each["server"], f"{kept:.1f}", each["requests"],
                spread(each["ttft"], 1000, 0), spread(each["tpot"], 1000, 2),
                spread(each["throughput"], 1, 0), max(each["at_once"]), each["retracted"],
            ]
        )  # fmt: skip
    return made


def text(facts: dict) -> str:
    """The report in Markdown."""
    equal = [each for each in facts["cells"] if each["requests"] == facts["at_once"]]
    tight = [each for each in facts["cells"] if each["requests"] != facts["at_once"]]
    flags = ", ".join(f"{name} {value}" for name, value in facts["flags"].items())
    parts = [
        f"Model: {facts['model']}; {facts['new']} tokens generated; all servers with {flags}. "
        f"Median (10th-90th percentile) over all requests of all rounds; tokens/s are generated "
        f"ones over the time from the first request sent to the last answer; *at once* is the "
        f"largest decode batch; *kept* is what a request held at its end, of prompt and answer.",
    ]
    for title, cells in (
        (f"Equal batch: {facts['at_once']} requests sent together", equal),
        (f"A crowd in a pool of {facts['flags']['max_total_tokens']} tokens", tight),
    ):
        if cells:
            parts += [f"## {title}", report.table(HEADER, rows(cells))]
    slower = slower_than_stock(facts["cells"])
    if slower:
        head = ("slower than stock by more than 5 %", "requests", "figure", "of stock's")
        parts += ["## Where it is slower", report.table(head, slower)]
    if facts["failed"]:
        parts += ["## Failed", *facts["failed"]]
    if facts["left_out"]:
        parts += [f"Left out for want of time: {'; '.join(facts['left_out'])}."]
    return "\n\n".join(parts)


def slower_than_stock(cells: list[dict]) -> list[list[str]]:
    """Table rows of figures that are worse than stock's by more than 5 %."""
    stock = {(c["tokens"], c["requests"]): c for c in cells if c["server"] == STOCK}
    found = []
    for each in cells:
        other = stock.get((each["tokens"], each["requests"]))
        if other is None or other is each:
            continue
        for name, words, more in FIGURES:
            ratio = statistics.median(each[name]) / statistics.median(other[name])
            if (ratio if more else 1 / ratio) > 1.05:
                size = f"{each['requests']} x {each['tokens']}"
                found.append([each["server"], size, words, f"{ratio:.2f} x"])
    return found
