"""Warnings about what makes a comparison of arms untrue, each with a likely cause and a remedy."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvpolicy.experiments.definition.experiment import NO_POLICY, Experiment
from kvpolicy.experiments.replica.arm_record import ArmRecord
from kvpolicy.experiments.replica.scoring import COMPARED
from kvpolicy.experiments.replica.windows import Windows
from kvpolicy.experiments.statistics.distinct_keys import DistinctKeys
from kvpolicy.experiments.statistics.majority_key import ENOUGH, MajorityKey
from kvpolicy.experiments.statistics.sample_ratio import ALARM, SampleRatio

NOISE = 1 / 4  # largest share of the margin that control's drift may reach without a warning
FEW = 0.9  # share of the sampled requests, or of their tokens, below which too few are compared
SAMPLED = 100  # sampled requests of an arm before that is looked at
HEAVY = 1 / 20  # largest share of an arm's values that one key may have without a warning
MANY = 1_000  # values of an arm before that is looked at
KEYLESS = 1 / 20  # largest share of the requests that may have no key without a warning
LATE = 1 / 100  # largest share of values that may come after their window has closed

_WHY = {
    "assigned": "keys do not reach the arms as the weights say: look for a gateway that rewrites "
    "the key, and for clients that retry until they get another answer",
    "finished": "requests of one arm come to an end less often: look for aborts, timeouts and "
    "crashes in it",
    "shadowed": "requests of one arm are scored again less often: raise "
    "`shadow.tokens_per_second`, or look at the skipped shadows by reason",
}


@dataclass(frozen=True)
class Alarm:
    """A warning that holds now.

    Attributes:
        kind: what is wrong, the same while figures change.
        about: figures, a likely cause and a remedy.
        untrue: whether nothing can be compared while it holds.
        one_sided: whether what is compared may differ from what is served. While this or `untrue`
            holds, no arm is promoted.
    """

    kind: str
    about: str
    untrue: bool = False
    one_sided: bool = False

    def __str__(self) -> str:
        return f"{self.kind}: {self.about}"


def kind_of(warning: str) -> str:
    """The kind of an alarm whose text is `warning`."""
    return warning.split(":")[0]


def alarms(
    experiment: Experiment,
    records: Mapping[str, ArmRecord],
    keys: DistinctKeys,
    majority: MajorityKey,
    sources: Sequence[int],
    keyless: int,
    windows: Windows,
) -> list[Alarm]:
    """The alarms that hold now, the gravest first.

    Args:
        records: what was seen of each arm, by its name.
        sources: requests by the place where their key was found, in the order of `targeting_key`.
        keyless: requests whose key was found nowhere.
    """
    return [
        *_one_key(experiment, majority),
        *_no_key(experiment, sources),
        *_keyless(experiment, sum(sources), keyless),
        *_sample_ratio(experiment, keys),
        *_heavy_key(records, keys.retired),
        *_left_out(experiment, records, keys.retired),
        *_noise(experiment, records),
        *_windows(windows),
    ]


def _one_key(experiment: Experiment, majority: MajorityKey) -> Iterator[Alarm]:
    # With a switchback the arm is that of the window, whatever the key.
    if experiment.design is None and majority.dominates:
        count, requests = majority.shown()
        yield Alarm(
            "all traffic in one arm",
            f"one key carries {count:,} of the last {requests:,} requests, as when a gateway "
            "strips or overwrites the key; let it pass, or put a key first in `targeting_key` "
            "that the gateway keeps",
            untrue=True,
        )


def _no_key(experiment: Experiment, sources: Sequence[int]) -> Iterator[Alarm]:
    kinds = [key.kind for key in experiment.targeting_key]
    if "rid" not in kinds:
        return
    place = kinds.index("rid")
    if place and sources[place] >= ENOUGH and not any(sources[:place]):
        names = ", ".join(f"`{key}`" for key in experiment.targeting_key[:place])
        yield Alarm(
            "no key",
            f"none of {sources[place]:,} requests has one ({names}), so each is drawn by its own "
            "id and a user meets several arms; let clients send a key, or the gateway pass it",
        )


def _keyless(experiment: Experiment, found: int, keyless: int) -> Iterator[Alarm]:
    requests = found + keyless
    if requests >= ENOUGH and keyless > KEYLESS * requests:
        names = ", ".join(f"`{key}`" for key in experiment.targeting_key)
        yield Alarm(
            "requests without a key",
            f"{keyless:,} of {requests:,} ({keyless / requests:.0%}) have none of {names}; they "
            f"get `{experiment.default}` and take no part; let clients send a key, or put `rid` "
            "last in `targeting_key`",
        )


def _sample_ratio(experiment: Experiment, keys: DistinctKeys) -> Iterator[Alarm]:
    for stage, ratio in keys.ratios.items():
        if ratio.p_value < ALARM:
            yield Alarm(
                f"sample ratio mismatch at the stage `{stage}`",
                f"{_counts(experiment, ratio)}; {_WHY[stage]}; until then compare nothing",
                untrue=True,
            )
            return  # a mismatch passes on to the later stages


def _counts(experiment: Experiment, ratio: SampleRatio) -> str:
    total = sum(ratio.counts)
    parts = [
        f"{arm.name} has {count:,} of {total:,} keys ({count / total:.1%} for {share:.1%})"
        for arm, count, share in zip(experiment.arms, ratio.counts, ratio.shares, strict=True)
        if share or count
    ]
    return f"{', '.join(parts)}, p = {ratio.p_value:.1g}"


def _heavy_key(records: Mapping[str, ArmRecord], retired: Collection[str]) -> Iterator[Alarm]:
    for arm, record in records.items():
        values, largest = record.heavy.values, record.heavy.largest
        if arm not in retired and values >= MANY and largest > HEAVY * values:
            yield Alarm(
                f"one key has much of arm `{arm}`",
                f"at least {largest:,} of {values:,} finished requests ({largest / values:.0%}); "
                "they are alike, so there is less evidence than it seems; give that user a policy "
                "by name, or a key for each session",
            )


_MORE = {
    "busy": "the server is hardly ever idle: lower its load",
    "no_room": "raise `--kv-experiment-slots`",
    "queue_full": "lower `shadow.sample`",
    "over_budget": "raise `shadow.tokens_per_second`",
    "too_long": "prompt and output fill the model's context",
    "not_comparable": "prompts that are not only tokens, and other weights, are not compared",
    "failed": "the log says why",
}


def _left_out(
    experiment: Experiment, records: Mapping[str, ArmRecord], retired: Collection[str]
) -> Iterator[Alarm]:
    if not any(metric.kind.shadow for metric in experiment.metrics):
        return
    for arm, record in records.items():
        share = record.scoring.share
        if arm in retired or share is None or share.sampled < SAMPLED or share.least >= FEW:
            continue
        left_out = {
            outcome: count
            for outcome, count in record.scoring.requests.items()
            if count and outcome in _MORE
        }
        most = max(left_out, key=lambda outcome: record.scoring.requests[outcome])
        reasons = ", ".join(f"{count:,} `{outcome}`" for outcome, count in left_out.items())
        yield Alarm(
            f"requests of `{arm}` that are not scored again",
            f"{record.scoring.requests[COMPARED]:,} of {share.sampled:,} sampled ones are compared "
            f"({share.requests:.1%}), with {share.tokens:.1%} of their tokens ({reasons}); where "
            f"length decides, drift is not that of what is served; {_MORE[most]}",
            one_sided=True,
        )


def _noise(experiment: Experiment, records: Mapping[str, ArmRecord]) -> Iterator[Alarm]:
    control = experiment.control
    if control.policy != NO_POLICY:  # then control's drift is what its policy loses
        return
    for metric in experiment.metrics:
        if metric.kind.compared != "margin" or metric.margin is None:
            continue
        seen = records[control.name].means[metric.metric]
        if (
            seen.n >= experiment.analysis.min_samples
            and seen.total > NOISE * metric.margin * seen.n
        ):
            yield Alarm(
                f"noise in `{metric.metric}`",
                f"control has {seen.mean:.3g} with full KV on both sides, more than a quarter of "
                f"the margin {metric.margin:.3g}, as prefill and decode kernels differ; raise the "
                "margin to four times this noise",
            )


def _windows(windows: Windows) -> Iterator[Alarm]:
    values = windows.taken + windows.late
    if windows.late > LATE * values:
        yield Alarm(
            "late values",
            f"{windows.late:,} of {values:,} came when their window was closed and do not count; "
            "make `window` longer than requests take, and look at the server's clock",
        )
    if windows.full:
        yield Alarm(
            "no more windows",
            "there are as many as are kept and later ones do not count; end the experiment, or "
            "make `window` longer",
        )
