"""The sequential sample-ratio test against scipy's distributions."""

import math

import numpy as np
import pytest
from kvpolicy.experiments.statistics.sample_ratio import ALARM, CONCENTRATIONS, SampleRatio
from scipy import special, stats


def counted(weights, arms):
    ratio = SampleRatio(weights)
    for arm in arms:
        ratio.add(int(arm))
    return ratio


def test_bayes_factor_is_that_of_a_dirichlet_prior():
    weights = [5, 3, 2]
    shares = np.array(weights) / 10
    ratio = counted(weights, np.random.default_rng(1).choice(3, 500, p=[0.4, 0.4, 0.2]))
    n = sum(ratio.counts)
    null = stats.multinomial(n, shares).logpmf(ratio.counts)
    priors = [
        stats.dirichlet_multinomial(c * shares, n).logpmf(ratio.counts) for c in CONCENTRATIONS
    ]
    expected = special.logsumexp(np.array(priors) - null) - math.log(len(priors))
    assert ratio.log_bayes_factor == pytest.approx(expected, abs=1e-6)
    assert SampleRatio(weights, ratio.counts).log_bayes_factor == pytest.approx(expected, abs=1e-6)


def test_expected_bayes_factor_is_one():
    """So the probability that its inverse ever falls below a is at most a."""
    n, shares = 12, [0.3, 0.7]
    mean = sum(
        stats.binom(n, 0.3).pmf(k) * math.exp(SampleRatio(shares, [k, n - k]).log_bayes_factor)
        for k in range(n + 1)
    )
    assert mean == pytest.approx(1.0)


def test_p_value_never_rises():
    ratio, values = SampleRatio([1, 1]), []
    for arm in [0] * 40 + [1] * 40:
        ratio.add(arm)
        values.append(ratio.p_value)
    assert values == sorted(values, reverse=True)
    assert values[-1] < ALARM
    assert SampleRatio([1, 1], ratio.counts).p_value > ALARM  # of the counts as they are now


def test_true_weights_raise_no_alarm():
    rng = np.random.default_rng(2)
    found = [counted([9, 1], rng.choice(2, 3_000, p=[0.9, 0.1])).p_value for _ in range(100)]
    assert min(found) > ALARM


def test_88_to_12_for_90_to_10_is_found():
    rng = np.random.default_rng(3)
    needed = []
    for _ in range(15):
        ratio = SampleRatio([90, 10])
        for arm in rng.choice(2, 20_000, p=[0.88, 0.12]):
            ratio.add(int(arm))
            if ratio.p_value < ALARM:
                break
        needed.append(sum(ratio.counts))
    assert 1_500 < np.median(needed) < 8_000


def test_everything_in_one_arm_is_found_at_once():
    ratio = counted([1, 1], [1] * 30)
    assert ratio.p_value < ALARM


def test_an_arm_of_weight_zero_gets_nothing():
    ratio = counted([1, 0, 1], [0, 2] * 50)
    assert ratio.p_value > ALARM
    ratio.add(1)
    assert ratio.p_value == 0.0


def test_an_arm_that_is_rolled_back_is_no_mismatch():
    """Keys of other arms continue by their weights; the arm's earlier count is still shown."""
    from kvpolicy.experiments.statistics.distinct_keys import STAGES, DistinctKeys

    rng = np.random.default_rng(5)
    weights = {"a": 1.0, "b": 1.0, "c": 2.0}
    keys = DistinctKeys(weights)
    for key in range(4000):
        arm = rng.choice(list(weights), p=[0.25, 0.25, 0.5])
        if key == 1000:
            keys.retire("c")
        for stage in STAGES:
            keys.reached(stage, str(arm), key)
    counts = keys.counts("assigned")
    assert counts["c"] == pytest.approx(500, abs=60)
    assert counts["a"] == pytest.approx(1000, abs=100)
    assert all(ratio.p_value > 0.01 for ratio in keys.ratios.values())
    again = DistinctKeys.pooled(weights, [keys.as_document(False)] * 2)
    assert again.counts("finished") == {arm: 2 * n for arm, n in keys.counts("finished").items()}
    assert again.ratios["finished"].p_value > 0.01


def test_another_key_with_the_same_hash_stays_out_of_other_arms():
    """Arms of replicas would mix: keys of the second and third became some of a fourth."""
    from kvpolicy.experiments.statistics.distinct_keys import STAGES, DistinctKeys

    weights = {"a": 1.0, "b": 1.0, "c": 1.0}
    replicas = [DistinctKeys(weights) for _ in range(2)]
    for replica, arm in zip(replicas, "bc", strict=True):
        replica.reached("assigned", arm, 7)
        replica.reached("assigned", "a", 8)
    replicas[0].reached("finished", "a", 7)
    assert replicas[0].counts("finished") == dict.fromkeys(weights, 0)
    replicas[1].reached("finished", "a", 8)
    pooled = DistinctKeys.pooled(weights, [each.as_document(True) for each in replicas])
    assert pooled.counts("assigned") == {"a": 1, "b": 1, "c": 0}
    assert pooled.counts("finished") == {"a": 1, "b": 0, "c": 0}
    assert pooled.counts(STAGES[2]) == dict.fromkeys(weights, 0)
