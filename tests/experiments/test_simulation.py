"""Simulation: statistics equal those computed one by one, data have their means, bounds hold."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from kvpolicy.experiments.definition.experiment import Arm, Metric, Switchback
from kvpolicy.experiments.definition.reading import load
from kvpolicy.experiments.simulate.made_data import KINDS
from kvpolicy.experiments.simulate.paths import (
    first_at_least,
    log_bayes_factors,
    log_e_above,
    log_e_below,
    sums,
)
from kvpolicy.experiments.simulate.simulation import simulate
from kvpolicy.experiments.statistics.bounded_mean import BoundedMean
from kvpolicy.experiments.statistics.difference import PairedDifference
from kvpolicy.experiments.statistics.sample_ratio import SampleRatio
from kvpolicy.experiments.statistics.shares import wilson
from statsmodels.stats.proportion import proportion_confint

ROOT = Path(__file__).parents[2]
EXAMPLE = load(ROOT / "examples" / "experiments" / "lava-25.yaml").require()


def test_paths_are_the_statistics_one_by_one():
    values = KINDS["lognormal, 0.5 % outliers"](0.1, 2.0)(np.random.default_rng(1), (3, 200))
    above, below = log_e_above(values, 2.0, 0.05), log_e_below(values, 2.0, 0.05)
    found = sums(values, 2.0)
    half = found.spread + found.scale * math.log(2 / 0.01)
    for run in range(3):
        mean = BoundedMean(2.0, 0.05)
        for n, value in enumerate(values[run]):
            mean.add(float(value))
            assert above[run, n] == pytest.approx(mean.log_e_above)
            assert below[run, n] == pytest.approx(mean.log_e_below)
            low, high = mean.interval(0.01)
            assert max(0, found.center[run, n] - half[run, n]) == pytest.approx(low)
            assert min(2, found.center[run, n] + half[run, n]) == pytest.approx(high)


def test_pairs_are_differences_one_by_one():
    rng = np.random.default_rng(2)
    arm, control = rng.random((2, 100)) < 0.2
    path = log_e_above((arm * 1.0 - control + 1)[None], 2.0, 1.005)
    difference = PairedDifference(1.0, 0.005)
    for n in range(100):
        difference.add("arm", float(arm[n]))
        difference.add("control", float(control[n]))
        assert path[0, n] == pytest.approx(difference.log_e_above)


def test_factors_are_the_sample_ratio_one_by_one():
    arms = np.random.default_rng(3).choice(3, (2, 300), p=[0.5, 0.3, 0.2])
    paths = log_bayes_factors(arms, [0.4, 0.4, 0.2])
    for run in range(2):
        ratio = SampleRatio([2, 2, 1])
        for n, arm in enumerate(arms[run]):
            ratio.add(int(arm))
            assert paths[run, n] == pytest.approx(ratio.log_bayes_factor, abs=1e-9)


def test_first_at_least():
    paths = np.array([[0.0, 1, 2], [0, 0, 0], [3, 0, 0]])
    assert first_at_least(paths, 1.0).tolist() == [2, 0, 1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("mean", "upper"), [(0.05, 2.0), (0.5, 2.0), (0.02, 1.0), (0.004, 1.0)])
def test_made_data_have_the_mean_they_claim(kind, mean, upper):
    values = KINDS[kind](mean, upper)(np.random.default_rng(4), (1_000, 2_000))
    assert values.min() >= 0
    assert values.max() <= upper
    error = values.std() / math.sqrt(values.size)
    assert abs(values.mean() - mean) < 4 * error
    if kind.startswith("lognormal") and mean > 0.01 * upper:
        assert 0.004 < (values == upper).mean() < 0.06


@pytest.mark.parametrize(("happened", "runs"), [(0, 100), (7, 2_000), (100, 100)])
def test_wilson(happened, runs):
    assert wilson(happened / runs, runs) == pytest.approx(
        proportion_confint(happened, runs, 0.05, method="wilson"), abs=1e-9
    )


@pytest.fixture(scope="module")
def rows():
    """Rows of a simulation with a twentieth of the committed runs."""
    return simulate(EXAMPLE, runs=200, values=1_500, requests=5_000)


@pytest.mark.thorough
def test_errors_stay_within_their_bounds(rows):
    bounded = [row for row in rows if row.bound is not None]
    assert {row.metric for row in bounded} == {
        "all guardrails", "drift", "top1_disagreement", "error_rate", "sample ratio"
    }  # fmt: skip
    assert {row.question for row in bounded} == {"false alarm", "false clearing", "interval misses"}
    for row in bounded:
        assert row.runs == 200
        assert row.low <= row.bound, row
        assert row.share < row.bound + 4 * math.sqrt(row.bound * (1 - row.bound) / row.runs), row


def test_bad_arms_are_caught_and_good_ones_cleared(rows):
    found = {(row.metric, row.question, row.data.rpartition("mean ")[2]): row for row in rows}
    assert found["drift", "breach", "0.5"].ninety < 40
    assert found["drift", "breach", "0.2"].median < found["drift", "breach", "0.1"].median < 200
    assert 100 < found["drift", "clear", "0.01"].median < 600
    assert found["drift", "clear", "0.035"].share < 1
    alarms = {row.data: row for row in rows if row.question == "alarm"}
    assert alarms["100/0 % for 50/50 %"].ninety < 40
    assert alarms["60/40 % for 50/50 %"].median < 1_000


def test_other_designs_are_simulated_too():
    experiment = replace(
        EXAMPLE,
        arms=(*EXAMPLE.arms, Arm("b", "lava", 0.0), Arm("c", "tova", 2.0)),
        design=Switchback(600.0, 60.0),
        metrics=(Metric("ttft_seconds", "guardrail", 0.5, 10.0), Metric("error_rate", "info")),
    )
    found = simulate(experiment, runs=20, values=300, requests=500, seed=1)
    assert [row.metric for row in found].count("ttft_seconds") == 6
    assert any("25/25/50" in row.data for row in found)
    assert found[0].values == 300


def test_the_same_seed_gives_the_same_rows():
    experiment = replace(EXAMPLE, metrics=EXAMPLE.metrics[:1])
    twice = [simulate(experiment, runs=10, values=50, requests=50, seed=5) for _ in range(2)]
    assert twice[0] == twice[1]
