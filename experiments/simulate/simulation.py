"""Simulated runs of an experiment: how often it errs, and how much traffic a decision takes.

Every run is looked at after every value, as a server does. In `false alarm` rows the mean of an arm
is exactly the margin, the worst case that must not be called a breach; in `breach` and `clear` rows
the arm is worse, or better, than the margin.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from kvpolicy.experiments.definition.experiment import Experiment, Metric
from kvpolicy.experiments.replica.judge import breach_threshold, clear_threshold
from kvpolicy.experiments.simulate.made_data import KINDS, Sampler
from kvpolicy.experiments.simulate.paths import (
    Sums,
    first_at_least,
    log_bayes_factors,
    log_e_above,
    log_e_below,
    sums,
)
from kvpolicy.experiments.statistics.sample_ratio import ALARM
from kvpolicy.experiments.statistics.shares import wilson
from tqdm import tqdm

AT_ONCE = 100_000  # values computed at once, so that the arrays fit the cache

# Means of bad and good arms, in margins; means that the metric cannot reach are skipped.
BAD = (1.5, 2.0, 4.0, 10.0)
GOOD = (0.0, 0.2, 0.5, 0.7)
WRONG_SHARES = (0.02, 0.05, 0.2, 1.0)  # share of the other arms' keys that end up in control


_Run = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]


@dataclass(frozen=True)
class RunsOutcome:
    """The outcome of many runs of one kind.

    Attributes:
        metric: name of the metric, "all guardrails" or "sample ratio".
        question: the event that is counted: "false alarm", "false clearing", "interval misses",
            "breach" or "clear"; for the sample ratio "false alarm" or "alarm".
        data: the simulated values, in words.
        runs: number of runs.
        share: share of the runs in which the event ever happened.
        low, high: 95 % interval of that share (Wilson 1927).
        bound: largest allowed share; None where the share should be large.
        median, ninety: number of values after which the event had happened in half, and in 90 %,
            of all runs; None where it happened in fewer.
        values: length of a run: values in the arm, or keys of all arms for the sample ratio.
    """

    metric: str
    question: str
    data: str
    runs: int
    share: float
    low: float
    high: float
    bound: float | None
    median: int | None
    ninety: int | None
    values: int


def simulate(
    experiment: Experiment,
    *,
    runs: int = 2_000,
    values: int = 4_000,
    requests: int = 20_000,
    seed: int = 0,
    progress: bool = False,
) -> list[RunsOutcome]:
    """Rows for each guardrail of an experiment, and for its sample ratio.

    Args:
        runs: runs of each row with a bound; rows without one take a quarter of them.
        values: values in each arm of a run: requests that are scored again, or windows.
        requests: values of a run where every request counts: requests in each arm for error rates,
            keys of all arms for the sample ratio.
        seed: seed of the random numbers.
        progress: whether to draw a progress bar on stderr.
    """
    plans = [
        *_together_plans(experiment),
        *_guardrail_plans(experiment),
        *_ratio_plans(experiment),
    ]
    rows = []
    with tqdm(plans, unit="row", disable=not progress) as bar:
        for number, plan in enumerate(bar):
            bar.set_postfix_str(f"{plan.metric}: {plan.question}")
            length = requests if plan.every_request else values
            some = runs if plan.bound is not None else max(1, runs // 4)
            rng = np.random.default_rng([seed, number])
            when = np.concatenate([plan.run(rng, shape) for shape in _blocks(some, length)])
            rows.append(_row(plan, when, length))
    return rows


@dataclass(frozen=True)
class _Plan:
    """Plan of one `RunsOutcome`.

    `run` simulates values of shape [R, N] and returns the number of values after which the event
    happened in each run, 0 for never: int [R].
    """

    metric: str
    question: str
    data: str
    bound: float | None
    run: _Run
    every_request: bool = False


def _blocks(runs: int, length: int) -> Iterator[tuple[int, int]]:
    """Shapes [R, N] of blocks of runs, with at most `AT_ONCE` values where R > 1."""
    most = max(1, AT_ONCE // length)
    for done in range(0, runs, most):
        yield min(most, runs - done), length


def _row(plan: _Plan, when: np.ndarray, length: int) -> RunsOutcome:
    happened = when > 0
    share = float(happened.mean())
    low, high = wilson(share, len(when))
    return RunsOutcome(
        plan.metric, plan.question, plan.data, len(when), share, low, high, plan.bound,
        _quantile(when, 0.5), _quantile(when, 0.9), length,
    )  # fmt: skip


def _quantile(when: np.ndarray, share: float) -> int | None:
    """Number of values after which a share of all runs had the event; None for never."""
    done = np.sort(when[when > 0])
    needed = math.ceil(share * len(when))
    return int(done[needed - 1]) if needed <= len(done) else None


def _guardrail_plans(experiment: Experiment) -> Iterator[_Plan]:
    for metric in experiment.metrics:
        if metric.role == "guardrail":
            absolute = metric.kind.compared == "margin"
            yield from (_own_plans if absolute else _difference_plans)(experiment, metric)


def _limits(metric: Metric) -> tuple[float, float]:
    """Largest value and margin of a guardrail, in its unit."""
    assert metric.upper is not None
    assert metric.margin is not None
    return metric.upper, metric.margin


def _together_plans(experiment: Experiment) -> Iterator[_Plan]:
    """Runs with every guardrail of every arm at its margin: does any of them raise an alarm?"""
    guardrails = [metric for metric in experiment.metrics if metric.role == "guardrail"]
    arms = sum(arm.weight > 0 for arm in experiment.arms[1:])
    threshold = breach_threshold(experiment)
    kinds = list(KINDS.values())

    def evidence(
        number: int,
        rng: np.random.Generator,
        shape: tuple[int, int],
        controls: dict[str, np.ndarray],
    ) -> np.ndarray:
        metric = guardrails[number % len(guardrails)]
        upper, margin = _limits(metric)
        if metric.kind.compared == "margin":
            values = kinds[number % len(kinds)](margin, upper)(rng, shape)
            return log_e_above(values, upper, margin)
        kind, base = _control(metric)
        if metric.metric not in controls:  # the arms share the values of control
            controls[metric.metric] = kind(base, upper)(rng, shape)
        pairs = kind(base + margin, upper)(rng, shape) - controls[metric.metric]
        return log_e_above(pairs + upper, 2 * upper, upper + margin)

    def run(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
        controls: dict[str, np.ndarray] = {}
        largest = np.zeros(shape)
        for number in range(len(guardrails) * arms):
            np.maximum(largest, evidence(number, rng, shape, controls), out=largest)
        return first_at_least(largest, threshold)

    if guardrails:
        alpha = experiment.analysis.alpha
        yield _Plan("all guardrails", "false alarm", "each at its margin", alpha, run)


def _control(metric: Metric) -> tuple[Callable[[float, float], Sampler], float]:
    """Kind and mean of the values of control, for a metric that is compared with control."""
    upper, margin = _limits(metric)
    if metric.kind.is_share:
        return KINDS["all or nothing"], min(margin, upper / 10)
    return KINDS[next(iter(KINDS))], upper / 10


def _own_plans(experiment: Experiment, metric: Metric) -> Iterator[_Plan]:
    """Plans for a metric whose mean is compared with its margin."""
    upper, margin = _limits(metric)
    alpha = experiment.analysis.alpha
    breach, clear = breach_threshold(experiment), clear_threshold(experiment)
    name = metric.metric

    def above(sampler: Sampler) -> _Run:
        return lambda rng, shape: first_at_least(
            log_e_above(sampler(rng, shape), upper, margin), breach
        )

    def below(sampler: Sampler) -> _Run:
        return lambda rng, shape: first_at_least(
            log_e_below(sampler(rng, shape), upper, margin), clear
        )

    def misses(sampler: Sampler) -> _Run:
        return lambda rng, shape: _missed(sums(sampler(rng, shape), upper), margin, alpha)

    for data, kind in KINDS.items():
        words = f"{data}, mean {margin:g}"
        yield _Plan(name, "false alarm", words, math.exp(-breach), above(kind(margin, upper)))
        yield _Plan(name, "false clearing", words, alpha, below(kind(margin, upper)))
        yield _Plan(name, "interval misses", words, alpha, misses(kind(margin, upper)))
    data, kind = next(iter(KINDS.items()))
    for factor in BAD:
        mean = factor * margin
        if mean < upper:
            yield _Plan(name, "breach", f"{data}, mean {mean:g}", None, above(kind(mean, upper)))
    for factor in GOOD:
        mean = factor * margin
        sampler = kind(mean, upper) if mean else _zero
        yield _Plan(
            name, "clear", f"{data if mean else 'zero'}, mean {mean:g}", None, below(sampler)
        )


def _zero(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return np.zeros(shape)


def _difference_plans(experiment: Experiment, metric: Metric) -> Iterator[_Plan]:
    """Plans for a metric that is compared with control; both arms get one value each in turn."""
    upper, margin = _limits(metric)
    breach, clear = breach_threshold(experiment), clear_threshold(experiment)
    kind, base = _control(metric)

    def plan(question: str, factor: float, bound: float | None) -> _Plan:
        mean = base + factor * margin
        evidence, threshold = (log_e_below, clear) if "clear" in question else (log_e_above, breach)
        control, arm = kind(base, upper), kind(mean, upper)

        def run(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
            pairs = arm(rng, shape) - control(rng, shape)
            return first_at_least(evidence(pairs + upper, 2 * upper, upper + margin), threshold)

        data = next(name for name, candidate in KINDS.items() if candidate is kind)
        words = f"{data}, {mean:g} against {base:g}"
        return _Plan(
            metric.metric, question, words, bound, run, every_request=experiment.design is None
        )

    yield plan("false alarm", 1.0, math.exp(-breach))
    yield plan("false clearing", 1.0, experiment.analysis.alpha)
    for factor in BAD[1:]:
        if base + factor * margin < upper:
            yield plan("breach", factor, None)
    yield plan("clear", 0.0, None)


def _missed(running: Sums, mean: float, alpha: float) -> np.ndarray:
    """Number of values after which an interval first misses the mean: int [R], 0 for never."""
    half = running.spread + running.scale * math.log(2 / alpha)
    return first_at_least(np.abs(running.center - mean) / half, 1.0)


def _ratio_plans(experiment: Experiment) -> Iterator[_Plan]:
    shares = np.array([share for share in experiment.shares().values() if share > 0])

    def plan(question: str, data: str, true: np.ndarray, bound: float | None) -> _Plan:
        def run(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
            arms = np.searchsorted(np.cumsum(true)[:-1], rng.random(shape), side="right")
            return first_at_least(log_bayes_factors(arms, list(shares)), -math.log(ALARM))

        return _Plan("sample ratio", question, data, bound, run, every_request=True)

    yield plan("false alarm", _percent(shares), shares, ALARM)
    for moved in WRONG_SHARES:
        true = shares * (1 - moved)
        true[0] += moved * (1 - shares[0])
        true[0] += shares[0] * moved  # control keeps its keys
        yield plan("alarm", f"{_percent(true)} for {_percent(shares)}", true, None)


def _percent(shares: np.ndarray) -> str:
    return "/".join(f"{100 * share:.3g}" for share in shares) + " %"
