"""Warnings about what makes a comparison of arms untrue, each with a likely cause and a remedy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kvpolicy.experiments.definition.experiment import NO_POLICY, Experiment
from kvpolicy.experiments.replica.arm_record import ArmRecord
from kvpolicy.experiments.replica.windows import Windows
from kvpolicy.experiments.statistics.distinct_keys import DistinctKeys
from kvpolicy.experiments.statistics.majority_key import ENOUGH, MajorityKey
from kvpolicy.experiments.statistics.sample_ratio import ALARM, SampleRatio

NOISE = 1 / 4  # largest share of the margin that control's drift may reach without a warning
LATE = 1 / 100  # largest share of values that may come after their window has closed

_WHY = {
    "assigned": "keys do not reach the arms as the weights say: look for a gateway that rewrites "
    "the key, and for clients that retry until they get another answer",
    "finished": "requests of one arm come to an end less often: look for aborts, timeouts and "
    "crashes in it",
    "shadowed": "requests of one arm are scored again less often: raise "
    "`shadow.tokens_per_second`, or look at the skipped shadows by reason",
}


def alarms(
    experiment: Experiment,
    records: Mapping[str, ArmRecord],
    keys: DistinctKeys,
    majority: MajorityKey,
    sources: Sequence[int],
    windows: Windows,
) -> list[str]:
    """The warnings that hold now, the gravest first.

    The text before the first colon holds no figures, so it identifies a warning.

    Args:
        records: what was seen of each arm, by its name.
        sources: requests by the place where their key was found, in the order of `targeting_key`.
    """
    return [
        *_one_key(majority),
        *_no_key(experiment, sources),
        *_sample_ratio(experiment, keys),
        *_noise(experiment, records),
        *_windows(windows),
    ]


def _one_key(majority: MajorityKey) -> Iterator[str]:
    if majority.dominates:
        count, requests = majority.shown()
        yield (
            f"all traffic in one arm: one key carries {count:,} of the last {requests:,} requests, "
            "as when a gateway strips or overwrites the key; let it pass, or put a key first in "
            "`targeting_key` that the gateway keeps"
        )


def _no_key(experiment: Experiment, sources: Sequence[int]) -> Iterator[str]:
    kinds = [key.kind for key in experiment.targeting_key]
    if "rid" not in kinds:
        return
    place = kinds.index("rid")
    if place and sources[place] >= ENOUGH and not any(sources[:place]):
        names = ", ".join(f"`{key}`" for key in experiment.targeting_key[:place])
        yield (
            f"no key: none of {sources[place]:,} requests has one ({names}), so each is drawn by "
            "its own id and a user meets several arms; let clients send a key, or the gateway "
            "pass it"
        )


def _sample_ratio(experiment: Experiment, keys: DistinctKeys) -> Iterator[str]:
    for stage, ratio in keys.ratios.items():
        if ratio.p_value < ALARM:
            yield (
                f"sample ratio mismatch at the stage `{stage}`: {_counts(experiment, ratio)}; "
                + (f"{_WHY[stage]}; until then compare nothing")
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


def _noise(experiment: Experiment, records: Mapping[str, ArmRecord]) -> Iterator[str]:
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
            yield (
                f"noise in `{metric.metric}`: control has {seen.mean:.3g} with full KV on both "
                f"sides, more than a quarter of the margin {metric.margin:.3g}, as prefill and "
                "decode kernels differ; raise the margin to four times this noise"
            )


def _windows(windows: Windows) -> Iterator[str]:
    values = windows.taken + windows.late
    if windows.late > LATE * values:
        yield (
            f"late values: {windows.late:,} of {values:,} came when their window was closed and do "
            "not count; make `window` longer than requests take, and look at the server's clock"
        )
    if windows.full:
        yield (
            "no more windows: there are as many as are kept and later ones do not count; end "
            "the experiment, or make `window` longer"
        )
