"""An experiment on one screen of a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping

from kvpolicy.experiments.definition.experiment import NO_POLICY
from kvpolicy.experiments.fleet.overview import ArmRow, Overview
from kvpolicy.experiments.replica.judge import breach_threshold, clear_threshold
from kvpolicy.experiments.replica.lifecycle import ExperimentState
from kvpolicy.experiments.replica.verdict import Verdict
from kvpolicy.experiments.reporting import words
from kvpolicy.experiments.reporting.headline import headline
from kvpolicy.experiments.reporting.text_table import shortened, table
from kvpolicy.experiments.statistics.sample_ratio import ALARM

_CHANGES = 5  # number of changes shown
_COLOURS = {"good": "32", "bad": "31", "open": "33"}  # ANSI codes
_SHORT = {
    "top1_disagreement": "top1",
    "kv_bytes_per_prompt_token": "kv bytes",
    "ttft_seconds": "ttft",
    "e2e_seconds": "e2e",
}


def screen(overview: Overview, *, width: int = 80, colours: bool = False) -> str:
    """The text of the screen; each line ends with a newline.

    Args:
        width: characters of a line; fewer than 60 count as 60.
        colours: whether to use ANSI codes for colours.
    """
    width = max(60, width)
    blocks = [
        list(_standing(overview, width, colours)),
        list(_arms(overview, width)),
        list(_verdicts(overview, width)),
        list(_sample_ratio(overview, width)),
        list(_warnings(overview, width)),
        list(_shadow(overview, width)),
        list(_log(overview, width)),
    ]
    return "\n\n".join("\n".join(lines) for lines in blocks if lines) + "\n"


def _standing(overview: Overview, width: int, colours: bool) -> Iterator[str]:
    tone, sentence = headline(overview)
    state = "differs" if overview.state is None else overview.state.value
    first = f"{state.upper()}  {overview.experiment.name}, revision {overview.experiment.revision}"
    yield f"\033[1;{_COLOURS[tone]}m{first}\033[0m" if colours else first
    yield from textwrap.wrap(sentence, width)
    if not overview.ended:
        yield from textwrap.wrap(_coverage(overview), width)
    if len(overview.answers) > 1:
        names = ", ".join(answer.name for answer in overview.answers)
        yield from textwrap.wrap(f"{len(overview.answers)} replicas, pooled: {names}", width)


def _coverage(overview: Overview) -> str:
    values = overview.values("coverage")
    if len(values) == 1:
        text = f"coverage {words.percent(values[0][0])} of the keys"
    else:
        shares = (f"{words.percent(share)} at {names}" for share, names in values)
        text = f"coverage {', '.join(shares)}"
    return f"{text}; {next_step(overview)}"


def next_step(overview: Overview) -> str:
    """Time until the next step of coverage, in words."""
    running = [
        answer.document
        for answer in overview.answers
        if answer.document["state"] == ExperimentState.RUNNING
    ]
    waits = [each["next_step_in_seconds"] for each in running if not each.get("held")]
    known = [float(wait) for wait in waits if wait is not None]
    if known:
        return f"next step in {words.duration(min(known))}"
    if ExperimentState.PAUSED in overview.states:
        return "no further step while it is paused"
    held = next((each["held"] for each in running if each.get("held")), None)
    return f"no further step, as long as this holds: {held}" if held else "no further step"


def _arms(overview: Overview, width: int) -> Iterator[str]:
    keys = overview.experiment.design is None
    head = ["ARM ", "POLICY ", "REQS", "KEYS", "SEEN", "WANTED"]
    head += ["FAILED", "SHADOWED", "DRIFT", "KEPT"]
    rows = [_arm(row) for row in overview.rows]
    if not keys:  # with a switchback, keys have no arm
        head, rows = _without(head, rows, 3)
    yield from table(head, rows, width, cut=(1, 0))


def _without(
    head: list[str], rows: list[list[str]], column: int
) -> tuple[list[str], list[list[str]]]:
    return head[:column] + head[column + 1 :], [r[:column] + r[column + 1 :] for r in rows]


def _arm(row: ArmRow) -> list[str]:
    return [
        row.arm,
        row.policy,
        f"{row.requests:,}",
        "-" if row.keys is None else f"{row.keys:,}",
        words.percent(row.seen),
        "gone" if row.gone else words.percent(row.wanted),
        f"{row.failed:,}",
        f"{row.shadowed:,}",
        words.number(row.means["drift"]),
        words.percent(row.kept),
    ]


def _verdicts(overview: Overview, width: int) -> Iterator[str]:
    head = ["METRIC ", "ARM ", "MEAN", "INTERVAL", "MARGIN", "EVIDENCE", "OUTCOME "]
    rows = [
        [
            _SHORT.get(verdict.metric, verdict.metric),
            verdict.arm,
            words.measured(verdict.metric, verdict.mean),
            words.interval(verdict.metric, verdict.low, verdict.high),
            words.measured(verdict.metric, verdict.margin) if verdict.role == "guardrail" else "-",
            evidence(overview, verdict),
            outcome(overview, verdict),
        ]
        for verdict in overview.verdicts
        if not overview.is_aside(verdict)
    ]
    if rows:
        yield from table(head, rows, width, cut=(1,))


def outcome(overview: Overview, verdict: Verdict) -> str:
    """The outcome of a verdict in a word or two."""
    if verdict.arm == overview.experiment.control.name:
        return "noise floor" if overview.experiment.control.policy == NO_POLICY else "control"
    if verdict.low is None:
        return "no clip"  # without one a mean has no interval
    if verdict.role == "success":
        return "better" if verdict.outcome == "cleared" else "not shown yet"
    return verdict.outcome if verdict.role == "guardrail" else "shown only"


def evidence(overview: Overview, verdict: Verdict) -> str:
    """Evidence as a share of its threshold: `40 % clear`; `-` if the verdict is on no guardrail."""
    if verdict.role != "guardrail":
        return "-"
    clear = (verdict.log_e_clear or 0.0) / clear_threshold(overview.experiment)
    breach = (verdict.log_e_breach or 0.0) / breach_threshold(overview.experiment)
    share = min(1.0, max(clear, breach, 0.0))
    if share < 0.005:
        return "0 %"
    return f"{100 * share:.0f} % {'clear' if clear >= breach else 'breach'}"


def _sample_ratio(overview: Overview, width: int) -> Iterator[str]:
    if overview.experiment.design is None:
        values = overview.analysis.p_values()
        parts = ", ".join(f"{stage} {words.probability(p)}" for stage, p in values.items())
        word = "mismatch" if min(values.values()) < ALARM else "as wanted"
        text = f"sample ratio {word}: p = {parts}; alarm below {ALARM:g}"
        yield from textwrap.wrap(text, width, subsequent_indent="  ")


def _warnings(overview: Overview, width: int) -> Iterator[str]:
    for kind, sentences in (("warning", overview.warnings), ("note", overview.notes)):
        for sentence in sentences:
            yield from textwrap.wrap(
                sentence, width, initial_indent=f"{kind}: ", subsequent_indent="  "
            )


def _shadow(overview: Overview, width: int) -> Iterator[str]:
    if overview.experiment.shadow is not None:
        parts = [
            f"{row.arm}: {outcomes_text(overview.shadow[row.arm])}{_compared(row)}"
            for row in overview.rows
        ]
        text = "; ".join(parts)
        yield from textwrap.wrap(f"shadow of {text}", width, subsequent_indent="  ")


def _compared(row: ArmRow) -> str:
    if row.compared is None:
        return ""
    share, tokens = words.percent(row.compared.requests), words.percent(row.compared.tokens)
    return f" ({share} compared, {tokens} of their tokens)"


def outcomes_text(counts: Mapping[str, int]) -> str:
    """Numbers of sampled requests by outcome: `30 compared, 2 busy`."""
    parts = [f"{count:,} {outcome}" for outcome, count in counts.items() if count]
    return ", ".join(parts) or "none sampled"


def _log(overview: Overview, width: int) -> Iterator[str]:
    several = len(overview.answers) > 1
    for time, name, what in overview.log[-_CHANGES:]:
        yield shortened(f"{time}  {f'{name}: ' if several else ''}{what}", width)
