"""Arm minus control: pairs, their bets, and events that move both arms."""

import json
import math

import numpy as np
import pytest
from kvpolicy.experiments.statistics.difference import PairedDifference
from statsmodels.stats.proportion import confint_proportions_2indep


def filled(arm, control, upper=1.0, margin=0.005):
    difference = PairedDifference(upper, margin)
    for x, c in zip(arm, control, strict=True):
        difference.add("control", float(c))
        difference.add("arm", float(x))
    return difference


def test_a_pair_is_the_mean_of_what_waited():
    difference = PairedDifference(1.0, 0.005)
    for value in (0.0, 1.0, 0.0, 0.0):
        difference.add("control", value)
    assert (difference.n, difference.mean) == (0, None)
    difference.add("arm", 1.0)
    assert (difference.n, difference.mean) == (1, pytest.approx(0.75))
    difference.add("arm", 1.0)
    difference.add("arm", 0.0)
    difference.add("control", 0.0)
    assert (difference.n, difference.mean) == (2, pytest.approx(0.625))


def test_interval_holds_that_of_a_fixed_sample():
    rng = np.random.default_rng(1)
    arm, control = rng.random(3_000) < 0.05, rng.random(3_000) < 0.02
    low, high = filled(arm, control).interval(0.05)
    exact = confint_proportions_2indep(int(arm.sum()), 3_000, int(control.sum()), 3_000)
    assert low <= exact[0]
    assert high >= exact[1]
    assert high - low < 5 * (exact[1] - exact[0])


def test_what_moves_both_arms_is_no_breach():
    """An overload in which everything fails half of the time."""
    rng = np.random.default_rng(2)
    rate = np.where(np.arange(6_000) % 2_000 < 500, 0.5, 0.001)
    difference = filled(rng.random(6_000) < rate, rng.random(6_000) < rate, margin=0.02)
    assert difference.log_e_above < math.log(20)
    low, high = difference.interval(0.05)
    assert low < 0 < high


def test_a_difference_is_found_and_a_lack_of_it_too():
    rng = np.random.default_rng(3)
    bad = filled(rng.random(3_000) < 0.06, rng.random(3_000) < 0.005)
    assert bad.log_e_above > math.log(60)
    good = filled(rng.random(9_000) < 0.002, rng.random(9_000) < 0.002)
    assert good.log_e_below > math.log(20)
    assert good.log_e_above < 0 < bad.log_e_above


def test_replicas_pool_and_those_that_wait_meet():
    rng = np.random.default_rng(4)
    parts = [filled(rng.random(500) < 0.05, rng.random(500) < 0.02) for _ in range(2)]
    parts[0].add("arm", 1.0)
    parts[1].add("control", 0.0)
    pooled = PairedDifference(1.0, 0.005)
    pooled.take([json.loads(json.dumps(part.as_document())) for part in parts])
    assert pooled.n == 1_001
    sums = [part.shifted.above for part in parts]
    last = PairedDifference(1.0, 0.005)
    last.add("arm", 1.0)
    last.add("control", 0.0)
    expected = [a + b + c for a, b, c in zip(*sums, last.shifted.above, strict=True)]
    assert pooled.shifted.above == pytest.approx(expected)


def test_values_outside_are_refused():
    with pytest.raises(ValueError, match="is not between 0 and 1"):
        PairedDifference(1.0).add("arm", 1.5)
