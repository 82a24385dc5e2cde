"""The verdict on an experiment in one sentence."""

from __future__ import annotations

from typing import Literal, NamedTuple

from kvpolicy.dsl.syntax.diagnostics import listed
from kvpolicy.experiments.definition.experiment import NO_POLICY
from kvpolicy.experiments.fleet.outlook import by_window
from kvpolicy.experiments.fleet.overview import Overview
from kvpolicy.experiments.replica.lifecycle import ExperimentState
from kvpolicy.experiments.replica.verdict import Verdict
from kvpolicy.experiments.reporting import words

Tone = Literal["good", "bad", "open"]


class Headline(NamedTuple):
    """The verdict on an experiment.

    Attributes:
        tone: "bad" where something is aborted, rolled back, breached or not comparable; "good"
            where an arm is cleared or promoted; else "open".
        sentence: one sentence with a full stop.
    """

    tone: Tone
    sentence: str


def headline(overview: Overview) -> Headline:
    """How the experiment ended, which arms are breached or cleared, or what the others lack."""
    if ExperimentState.ABORTED in overview.states:
        return Headline("bad", _aborted(overview))
    if ExperimentState.PROMOTED in overview.states:
        return _promoted(overview)
    if overview.state == ExperimentState.DISABLED:
        return Headline("open", "Disabled in its file: every request gets the default.")
    untrue = [alarm.kind for alarm in overview.analysis.alarms() if alarm.untrue]
    if untrue:
        return Headline("bad", f"Compare nothing: {untrue[0]}.")
    breached = [
        verdict
        for verdict in overview.guardrails
        if verdict.outcome == "breached" and verdict.arm not in overview.rolled_back
    ]
    if breached:
        return Headline("bad", _breached(overview, breached))
    if not overview.guardrails:
        return Headline("open", "No metric is a guardrail: nothing is decided by itself.")
    return _undecided(overview)


def decided(overview: Overview, arm: str) -> bool:
    """Whether an arm is cleared of all its guardrails and no replica has rolled it back."""
    if arm in overview.rolled_back:
        return False
    verdicts = [verdict for verdict in overview.guardrails if verdict.arm == arm]
    return bool(verdicts) and all(verdict.outcome == "cleared" for verdict in verdicts)


def lacks(overview: Overview, verdict: Verdict) -> str:
    """What an undecided guardrail lacks, as the words that follow "lacks"."""
    if not verdict.samples:
        return "its first sample"
    forecast, seconds = overview.outlook(verdict)
    if forecast is None:
        return "samples; how many cannot be told yet"
    unit = "windows" if by_window(overview.analysis, verdict) else "requests"
    noun = "samples" if verdict.absolute else f"pairs of {unit}"
    when = "" if seconds is None else f", {words.duration(seconds)} at the present rate"
    towards = "" if forecast.outcome == "cleared" else ", and goes towards a breach"
    return f"about {words.rounded(forecast.missing)} more {noun}{when}{towards}"


def _aborted(overview: Overview) -> str:
    where = _where(overview, ExperimentState.ABORTED)
    default = overview.experiment.default
    what = "full KV" if default == NO_POLICY else f"`{default}`"
    requests = "requests there get" if where else "every request gets"
    reason = overview.reasons[0] if overview.reasons else "no reason is given"
    cleared = _cleared(overview)
    besides = f"; {cleared}" if cleared else ""
    return f"Aborted{where}: {reason}; {requests} {what}{besides}."


def _where(overview: Overview, state: ExperimentState) -> str:
    """` at REPLICAS only` for the replicas in a state; empty if all replicas are in one state."""
    return "" if overview.state is not None else f" at {', '.join(overview.states[state])} only"


def _promoted(overview: Overview) -> Headline:
    arm = next(name for name, _ in overview.values("promoted") if name)
    where = _where(overview, ExperimentState.PROMOTED)
    reason = f" ({overview.reasons[0]})" if overview.reasons else ""
    policy = overview.experiment.arm(arm).policy
    sentence = f"Promoted{where}: arm `{arm}` serves every request with `{policy}`{reason}."
    return Headline("good", sentence)


def _breached(overview: Overview, breached: list[Verdict]) -> str:
    worst = max(breached, key=lambda verdict: verdict.log_e_breach or 0.0)
    interval = words.interval(worst.metric, worst.low, worst.high)
    margin = words.measured(worst.metric, worst.margin)
    if overview.experiment.analysis.on_fail == "alert":
        why = "the experiment goes on, as its file says `on_fail: alert`"
    elif len(overview.answers) > 1:
        why = "no replica alone has seen enough to roll it back: `abort --arm` does"
    else:
        why = "it is rolled back with the next request"
    return (
        f"Guardrail `{worst.metric}` of arm `{worst.arm}` is breached ({interval}, margin "
        f"{margin}); {why}."
    )


def _cleared(overview: Overview) -> str | None:
    """Clause that names the arms that are cleared of every guardrail; None if there are none."""
    arms = [row.arm for row in overview.rows if decided(overview, row.arm)]
    if not arms:
        return None
    one = len(arms) == 1
    names = listed(arms, "and")
    return f"{'arm' if one else 'arms'} {names} {'is' if one else 'are'} cleared of every guardrail"


def _undecided(overview: Overview) -> Headline:
    arms = list(dict.fromkeys(verdict.arm for verdict in overview.guardrails))
    cleared = _cleared(overview)
    back = [_rolled_back(overview, arm) for arm in overview.rolled_back]
    parts = [*back, *([cleared] if cleared else [])]
    for arm in arms:
        if not decided(overview, arm) and arm not in overview.rolled_back:
            left = [
                verdict
                for verdict in overview.guardrails
                if verdict.arm == arm and verdict.outcome == "undecided"
            ]
            longest = max(left, key=lambda verdict: _length(overview, verdict))
            what = lacks(overview, longest)
            parts.append(f"arm `{arm}` is not decided: {longest.metric} lacks {what}")
    one_sided = [alarm.kind for alarm in overview.analysis.alarms() if alarm.one_sided]
    if cleared and one_sided:
        parts.append(f"there are {one_sided[0]}")
    sentence = "; ".join(parts)
    tone: Tone = "good" if cleared and not one_sided else "bad" if back else "open"
    return Headline(tone, sentence[0].upper() + sentence[1:] + ".")


def _rolled_back(overview: Overview, arm: str) -> str:
    reasons = overview.rolled_back[arm]
    where = f" at {', '.join(reasons)} only" if overview.serves(arm) else ""
    return f"arm `{arm}` is rolled back{where} ({next(iter(reasons.values()))})"


def _length(overview: Overview, verdict: Verdict) -> float:
    """Seconds until a guardrail is decided, or missing samples where the rate is not known.

    Infinite where neither is known; the largest value tells which guardrail is decided last.
    """
    forecast, seconds = overview.outlook(verdict)
    if forecast is None:
        return float("inf")
    return forecast.missing if seconds is None else seconds
