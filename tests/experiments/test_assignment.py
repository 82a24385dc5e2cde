"""The split: shares as weighted, nobody moves when coverage ramps, experiments independent."""

import math
import timeit
from dataclasses import replace

import pytest
from kvpolicy.experiments.definition.experiment import Arm, Experiment, Switchback
from kvpolicy.experiments.replica.assignment import (
    Assignment,
    AssignmentReason,
    assign,
    fraction,
    in_burn_in,
    window_of,
)
from scipy import stats

KEYS = [f"user-{i}" for i in range(100_000)]
THREE = Experiment(
    name="three",
    coverage=1.0,
    arms=(
        Arm("control", "none", 2),
        Arm("never", "h2o", 0),
        Arm("a", "lava", 1),
        Arm("b", "tova", 5),
    ),
)


def arms(experiment, keys=KEYS, coverage=1.0):
    return [assign(experiment, key, coverage=coverage, seconds=0.0).arm for key in keys]


def test_shares_are_those_of_the_weights():
    drawn = arms(THREE)
    assert "never" not in drawn
    counts = [drawn.count(name) for name in ("control", "a", "b")]
    expected = [len(KEYS) * weight / 8 for weight in (2, 1, 5)]
    assert stats.chisquare(counts, expected).pvalue > 0.001


def test_nobody_changes_arm_when_coverage_grows():
    keys = KEYS[:20_000]
    before = {}
    for coverage in (0.0, 0.01, 0.1, 0.5, 1.0):
        now = {key: arm for key, arm in zip(keys, arms(THREE, keys, coverage), strict=True) if arm}
        assert before.items() <= now.items()
        inside = len(now) / len(keys)
        assert abs(inside - coverage) <= 4 * math.sqrt(coverage * (1 - coverage) / len(keys))
        before = now
    assert len(before) == len(keys)


def test_experiments_are_independent():
    one = [fraction("one", "arm", key) < 0.5 for key in KEYS]
    other = [fraction("other", "arm", key) < 0.5 for key in KEYS]
    coverage = [fraction("one", "coverage", key) < 0.5 for key in KEYS]
    for second in (other, coverage):
        table = [[0, 0], [0, 0]]
        for a, b in zip(one, second, strict=True):
            table[a][b] += 1
        assert stats.chi2_contingency(table).pvalue > 0.001


def test_fractions_are_uniform_and_never_change():
    values = [fraction("e", "arm", key) for key in KEYS[:20_000]]
    assert all(0 <= value < 1 for value in values)
    assert stats.kstest(values, "uniform").pvalue > 0.001
    assert fraction("lava-25", "arm", "user-1") == 0.0821180052586633
    assert 0 <= fraction("e", "arm", "\ud800 ü") < 1  # what JSON may hold


def test_reasons():
    def why(experiment, key="k", coverage=1.0):
        return assign(experiment, key, coverage=coverage, seconds=0.0)

    assert why(THREE).reason == AssignmentReason.SPLIT
    assert why(THREE, coverage=0.0) == Assignment(None, AssignmentReason.DEFAULT)
    assert why(THREE, key=None) == Assignment(None, AssignmentReason.DEFAULT)
    assert why(replace(THREE, enabled=False)) == Assignment(None, AssignmentReason.DISABLED)
    assert str(AssignmentReason.TARGETING_MATCH) == "TARGETING_MATCH"


def test_a_switchback_gives_a_window_one_arm():
    design = Switchback(600.0, 60.0)
    experiment = replace(THREE, design=design)

    def drawn(seconds, keys=KEYS[:50]):
        return {assign(experiment, key, coverage=1.0, seconds=seconds).arm for key in keys}

    assert drawn(6000.0) == drawn(6599.0)
    per_window = [drawn(600.0 * i, KEYS[:1]).pop() for i in range(2_000)]
    counts = [per_window.count(name) for name in ("control", "a", "b")]
    assert stats.chisquare(counts, [500, 250, 1250]).pvalue > 0.001
    assert all(len(drawn(600.0 * i)) == 1 for i in range(20))
    assert window_of(design, 599.9) == 0
    assert window_of(design, 600.0) == 1


@pytest.mark.parametrize(("seconds", "inside"), [(0.0, True), (59.9, True), (60.0, False)])
def test_burn_in(seconds, inside):
    experiment = replace(THREE, design=Switchback(600.0, 60.0))
    assert in_burn_in(experiment, 600.0 * 7 + seconds) == inside
    assert not in_burn_in(THREE, seconds)


def test_an_assignment_takes_microseconds():
    """A generous bound, not a measurement."""

    def one():
        assign(THREE, "user-123456", coverage=1.0, seconds=0.0)

    best = min(timeit.repeat(one, number=2_000, repeat=5)) / 2_000
    assert best < 20e-6


@pytest.mark.parametrize("coverage", [0.1, 0.5])
def test_shares_are_as_weighted_among_the_keys_that_take_part(coverage):
    """Participation and arm are drawn apart; else low coverage would reach the first arm only."""
    drawn = [arm for arm in arms(THREE, coverage=coverage) if arm is not None]
    assert len(drawn) / len(KEYS) == pytest.approx(coverage, abs=0.02)
    for arm in THREE.arms:
        assert drawn.count(arm.name) / len(drawn) == pytest.approx(arm.weight / 8, abs=0.03)
