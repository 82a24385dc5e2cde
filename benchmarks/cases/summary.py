"""The report of `kernels.py` on its cases."""

from __future__ import annotations

import report

HEADER = (
    "case",
    "tokens",
    "batch",
    "call",
    "kernels alone, us",
    "as called, us",
    "share of copy, %",
    "share of prefill, %",
    "time / ours",
)


def _spread(times: dict | None) -> str:
    if not times:
        return ""
    low, high = (1e6 * times[name] for name in ("p10", "p90"))
    return f"{1e6 * times['median']:.1f} ({low:.1f}-{high:.1f}; {1e6 * times['min']:.1f})"


def _rows(cases: list[dict]) -> list[list[str]]:
    rows = []
    for case in cases:
        shown = [case["case"], case["tokens"], case["batch"]]
        for name, call in case["calls"].items():
            share, part = call.get("share_of_copy"), call.get("share_of_prefill")
            alone = call.get("share_of_prefill_kernels")
            rows.append(
                [
                    *shown,
                    name,
                    _spread(call.get("graph")),
                    _spread(call["called"]),
                    "" if share is None else f"{100 * share:.1f}",
                    "" if part is None else f"{100 * part:.2f} ({100 * alone:.2f})",
                    f"{call['ratio']:.2f} x" if call["ratio"] != 1 else "",
                ]
            )
            shown = ["", "", ""]
    return rows


def _reasons(cases: list[dict]) -> list[tuple[str, str]]:
    """Calls that no CUDA graph could capture, and why."""
    calls = [call for case in cases for call in case["calls"].items()]
    return sorted({(name, call["not_captured"]) for name, call in calls if "not_captured" in call})


def _target_rows(cases: list[dict]) -> list[list[str]]:
    words = {True: "met", False: "not met", None: "open"}
    return [
        [each["target"], each["limit"], each["measured"], words[each["met"]]]
        for case in cases
        for each in case["targets"]
    ]


def text(facts: dict) -> str:
    """The report in Markdown."""
    cases, model = facts["cases"], facts["model"]
    parts = [
        f"{model['layers']} layers, {model['heads']} query and {model['kv_heads']} KV heads of "
        f"{model['head_dim']}, {model['dtype']}. A copy of {facts['copy']['bytes'] / 2**30:.3g} "
        f"GiB on this device moves {facts['copy']['median'] / 1e12:.3g} TB/s, read and written. "
        f"The kernels are {facts['kernels']}.",
        "Times are of one call: median (10th-90th percentile; least). *Kernels alone*: the call "
        "captured as a CUDA graph and replayed; *as called*: with Python and launches. Between "
        "calls the L2 cache is flushed; alternatives take turns. Shares of copy are of the counted "
        "bytes by the time of the kernels alone; shares of prefill are of all layers as called "
        "(kernels alone), by a model of the 8B's prefill: measured matrix products and attention "
        "of one layer with random weights, times the layers.",
        report.table(("target", "limit", "measured", ""), _target_rows(cases)),
    ]
    for topic in dict.fromkeys(case["topic"] for case in cases):
        own = [case for case in cases if case["topic"] == topic]
        parts += [f"## {topic.capitalize()}", report.table(HEADER, _rows(own))]
        parts += [f"Checked: {'; '.join(dict.fromkeys(case['checked'] for case in own))}."]
        parts += [f"Note: {note}." for note in dict.fromkeys(c["note"] for c in own) if note]
        parts += [f"Not captured as a graph: {name}: {why}." for name, why in _reasons(own)]
    if facts["failed"]:
        lines = [[each["case"], each["error"]] for each in facts["failed"]]
        parts += ["## Failed", report.table(("case", "error"), lines)]
    if facts["left_out"]:
        parts += [f"Left out for want of time: {', '.join(facts['left_out'])}."]
    return "\n\n".join(parts)
