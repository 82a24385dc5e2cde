"""Goals of the GPU report and their verdicts: met, missed and by how much, or not measured.

Sections that did not run, or ran at toy sizes, are not judged.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from serving_report import PLUGIN_OFF, STOCK

LONG = 32768  # prompt tokens of goals for a prefill
NONE = "with the package, no policy"


class Figures:
    """Measured figures of the sections; of sections per model, those of one model."""

    def __init__(self, facts: dict, model: str | None = None) -> None:
        self._sections, self.model = facts["sections"], model

    def of(self, section: str) -> dict:
        """Results of a section, by file name; empty if it did not run."""
        key = f"{section} {self.model}" if section in ("serving", "pools") else section
        return self._sections.get(key, {}).get("results", {})

    def cases(self, topic: str) -> list[dict]:
        """Cases of kernels.py of a topic."""
        cases = self.of("targets").get("kernels", {}).get("cases", ())
        return [case for case in cases if case["topic"] == topic]

    def cells(self) -> list[dict]:
        """Cells of servers at equal batch."""
        run = self.of("serving").get("serving", {"cells": []})
        return [cell for cell in run["cells"] if cell["requests"] == run["at_once"]]

    def pools(self) -> list[dict]:
        """Runs of tight pools, the smallest pool first."""
        made = [run for name, run in self.of("pools").items() if name.startswith("pool-")]
        return sorted(made, key=lambda run: run["flags"]["max_total_tokens"])


# The figure, or a sentence on why there is none.
Found = float | str


@dataclass(frozen=True)
class Goal:
    """A limit on one figure.

    Attributes:
        what: the figure in words.
        limit: the bound.
        least: whether it is a lower bound; otherwise an upper one.
        unit: `%` (shares of 1, shown times 100), `x`, or a word.
        figure: computes the figure.
        each_model: whether it is judged for every served model.
    """

    what: str
    limit: float
    least: bool
    unit: str
    figure: Callable[[Figures], Found]
    each_model: bool = False

    def judged(self, figures: Figures) -> dict:
        """Goal, limit, measured, verdict."""
        found = self.figure(figures)
        made = {"goal": self.what, "model": figures.model if self.each_model else None}
        made["limit"] = f"at {'least' if self.least else 'most'} {self._shown(self.limit)}"
        if isinstance(found, str):
            return {**made, "measured": "", "verdict": f"not measured: {found}", "met": None}
        met = found >= self.limit if self.least else found <= self.limit
        far = abs(found - self.limit)
        if self.unit == "%":
            by = f"{100 * far:.3g} points"
        else:
            by = f"{100 * far / self.limit:.3g} %" if self.limit else self._shown(far)
        verdict = "met" if met else f"missed by {by}"
        return {**made, "measured": self._shown(found), "verdict": verdict, "met": met}

    def _shown(self, value: float) -> str:
        return f"{100 * value:.3g} %" if self.unit == "%" else f"{value:.3g} {self.unit}"


def judged(facts: dict) -> list[dict]:
    """All goals, in order; those of servers once for each model that was served."""
    served = [key.partition(" ")[2] for key in facts["sections"] if " " in key]
    made = []
    for goal in GOALS:
        for model in (list(dict.fromkeys(served)) or [None]) if goal.each_model else [None]:
            whole = goal.judged(Figures(facts, model))
            if facts["toy"]:
                why = "not measured: toy sizes say nothing of a GPU"
                whole |= {"measured": "", "verdict": why, "met": None}
            made.append(whole)
    return made


# Serving.


def _sizes(cells: list[dict]) -> Iterator[tuple[dict, dict]]:
    """Pairs of stock's cell and another server's cell of the same size."""
    stock = {(c["tokens"], c["requests"]): c for c in cells if c["server"] == STOCK}
    for cell in cells:
        other = stock.get((cell["tokens"], cell["requests"]))
        if other is not None and cell is not other:
            yield other, cell


def _slower(wanted: Callable[[dict], bool]) -> Callable[[Figures], Found]:
    """Time / stock's time - 1 of the same requests: median over lengths, slowest server."""

    def figure(figures: Figures) -> Found:
        ratios: dict[str, list[float]] = {}
        for stock, cell in _sizes(figures.cells()):
            if wanted(cell):
                ratio = statistics.median(cell["seconds"]) / statistics.median(stock["seconds"])
                ratios.setdefault(cell["server"], []).append(ratio - 1)
        if not ratios:
            return "no prompt was served by both"
        return max(statistics.median(each) for each in ratios.values())

    return figure


def _of_window(cell: dict) -> bool:
    return cell["server"].startswith("snapkv ")


def _faster_prefill(figures: Figures) -> Found:
    for stock, cell in _sizes(figures.cells()):
        if cell["server"].startswith("fastkv ") and cell["tokens"] == LONG:
            return statistics.median(stock["ttft"]) / statistics.median(cell["ttft"])
    return f"FastKV and stock did not both serve {LONG} tokens"


def _tight(share: float) -> Callable[[Figures], Found]:
    def figure(figures: Figures) -> Found:
        for run in figures.pools():
            for stock, cell in _sizes(run["cells"]):
                if cell["share"] == share:
                    mine, other = (statistics.median(c["throughput"]) for c in (cell, stock))
                    return mine / other
        return "no crowd was served by both"

    return figure


def _at_once(figures: Figures) -> Found:
    """Requests decoded at once / stock's, times the share of entries that each held: the least."""
    found = []
    for run in figures.pools():
        for stock, cell in _sizes(run["cells"]):
            held = statistics.mean(cell["held"])
            possible = max(stock["at_once"]) / held
            most = min(cell["requests"], run["flags"].get("max_running_requests", cell["requests"]))
            if cell["share"] < 1 and most >= possible:
                found.append(max(cell["at_once"]) / possible)
    return min(found) if found else "no crowd was served by both that was large enough"


# Answers.


def _different(figures: Figures) -> Found:
    facts = figures.of("server").get("server", {})
    if PLUGIN_OFF not in facts.get("equal", {}):
        return "the server section has no answers"
    itself = facts["equal"][f"{STOCK}, once more"]
    if itself < facts["answers"]:
        return "stock itself answers differently the second time"
    return facts["answers"] - facts["equal"][PLUGIN_OFF]


def _compiled(figures: Figures) -> Found:
    numbers = list(figures.of("host").get("host", {}).get("compiled_after_ready", {}).values())
    server = figures.of("server").get("server", {})
    numbers += [server["compiled_after_ready"]] if "compiled_after_ready" in server else []
    return sum(numbers) if numbers else "no server with policies got to its end"


def _host(figures: Figures) -> Found:
    """Host time beyond stock's in microseconds, the most of all batches and policies."""
    rows = figures.of("host").get("host", {}).get("rows", ())
    stock = {row["batch"]: row["host_us"] for row in rows if row["policy"] == STOCK}
    more = [
        row["host_us"] - stock[row["batch"]]
        for row in rows
        if row["policy"] not in (STOCK, "none") and row["batch"] in stock
    ]
    return max(more) if more else "no batch was profiled with and without policies"


# Kernels.


def _first_call(case: dict) -> dict:
    return next(iter(case["calls"].values()))


def _window_share(figures: Figures) -> Found:
    parts = [
        _first_call(case)["share_of_prefill"]
        for topic, word in (("scoring", "with selection"), ("compaction", "per list"))
        for case in figures.cases(topic)
        if word in case["case"] and case["tokens"] == LONG
    ]
    return sum(parts) if len(parts) == 2 else f"scoring or compaction of {LONG} tokens did not run"


def _column_share(figures: Figures) -> Found:
    for case in figures.cases("sums over all queries"):
        if case["tokens"] == LONG:
            return _first_call(case)["share_of_prefill"]
    return f"sums over {LONG} queries did not run"


def _decode(word: str, worst: Callable[..., float]) -> Callable[[Figures], Found]:
    """The worst value among targets of decode attention whose text contains `word`."""

    def figure(figures: Figures) -> Found:
        values = [
            target["value"]
            for case in figures.cases("decode attention")
            for target in case["targets"]
            if word in target["target"] and target["value"] is not None
        ]
        return worst(values) if values else "no case was timed beside FlashInfer"

    return figure


GOALS = (
    Goal("plugin off: answers unlike stock's", 0, False, "answers", _different),
    Goal("plugin off: slower than stock", 0.01, False, "%",
         _slower(lambda cell: cell["server"] == PLUGIN_OFF), True),
    Goal("ample pool, no policy asked for: slower than stock", 0.02, False, "%",
         _slower(lambda cell: cell["server"] == NONE), True),
    Goal("ample pool, snapkv: slower than stock", 0.02, False, "%", _slower(_of_window), True),
    Goal("tight pool, 50 % kept: throughput / stock's", 1.5, True, "x", _tight(0.5), True),
    Goal("tight pool, 25 % kept: throughput / stock's", 2.3, True, "x", _tight(0.25), True),
    Goal("tight pool, 10 % kept: throughput / stock's", 3.2, True, "x", _tight(0.1), True),
    Goal("decoded at once / stock's, times the share held", 0.95, True, "x", _at_once, True),
    Goal("scoring and compaction of 32k, window policies, of a prefill", 0.005, False, "%",
         _window_share),
    Goal("scoring of 32k by column sums, of a prefill", 0.35, False, "%", _column_share),
    Goal("FastKV: stock's TTFT / its own, 32k", 1.5, True, "x", _faster_prefill, True),
    Goal("decode of compressed lists / FlashInfer's, equal entries", 1.1, False, "x",
         _decode("as many entries", max)),
    Goal("decode of full KV / of 12.5 %, 64k", 6, True, "x", _decode("whole cache", min)),
    Goal("host time per decode step, more than stock's", 300, False, "us", _host),
    Goal("kernels compiled once a server was ready", 0, False, "kernels", _compiled),
)  # fmt: skip
