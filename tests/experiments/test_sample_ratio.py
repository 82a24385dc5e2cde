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
        keys.assigned(str(arm), key, sampled=True)
        for stage in STAGES[1:]:
            keys.ended(stage, str(arm), key, reached=True)
    counts = keys.counts("assigned")
    assert counts["c"] == pytest.approx(500, abs=60)
    assert counts["a"] == pytest.approx(1000, abs=100)
    assert all(ratio.p_value > 0.01 for ratio in keys.ratios.values())
    again = DistinctKeys.pooled(weights, [keys.as_document(False)] * 2)
    assert again.counts("finished") == {arm: 2 * n for arm, n in keys.counts("finished").items()}
    assert again.ratios["finished"].p_value > 0.01


def test_requests_that_end_after_their_arm_was_rolled_back_are_no_mismatch():
    from kvpolicy.experiments.statistics.distinct_keys import DistinctKeys

    keys = DistinctKeys({"a": 1.0, "b": 1.0, "c": 1.0})
    for number, arm in enumerate("abc" * 5):
        keys.assigned(arm, number)
    keys.retire("c")
    for number, arm in enumerate("abc" * 5):
        keys.ended("finished", arm, number, reached=True)
    assert keys.counts("finished") == {"a": 5, "b": 5, "c": 0}
    assert all(ratio.p_value > ALARM for ratio in keys.ratios.values())


def test_another_key_with_the_same_hash_stays_out_of_other_arms():
    """Arms of replicas would mix: keys of the second and third became some of a fourth."""
    from kvpolicy.experiments.statistics.distinct_keys import STAGES, DistinctKeys

    weights = {"a": 1.0, "b": 1.0, "c": 1.0}
    replicas = [DistinctKeys(weights) for _ in range(2)]
    for replica, arm in zip(replicas, "bc", strict=True):
        replica.assigned(arm, 7)
        replica.assigned("a", 8)
    replicas[0].ended("finished", "a", 7, reached=True)
    assert replicas[0].counts("finished") == dict.fromkeys(weights, 0)
    replicas[1].ended("finished", arm, 7, reached=True)
    replicas[1].ended("finished", "a", 8, reached=True)
    pooled = DistinctKeys.pooled(weights, [each.as_document(True) for each in replicas])
    assert pooled.counts("assigned") == {"a": 1, "b": 1, "c": 0}
    assert pooled.counts("finished") == {"a": 1, "b": 0, "c": 0}
    assert pooled.counts(STAGES[2]) == dict.fromkeys(weights, 0)


def arriving(seed, loses, slow=20.0, rate=50.0, seconds=1200.0):
    """Keys at a rate per second whose requests last 10 s on average, and `slow` in one of two arms.

    Args:
        loses: share of that arm's requests of which nothing is heard any more.
    """
    from kvpolicy.experiments.statistics.distinct_keys import DistinctKeys

    rng, now, events = np.random.default_rng(seed), [0.0], []
    times = np.cumsum(rng.exponential(1 / rate, int(rate * seconds)))
    for key, time in enumerate(times):
        arm = "slow" if rng.random() < 0.5 else "fast"
        events.append((time, 0, arm, key))
        if arm == "fast" or rng.random() >= loses:
            events.append((time + rng.exponential(slow if arm == "slow" else 10.0), 1, arm, key))
    keys = DistinctKeys({"fast": 1, "slow": 1}, lambda: now[0])
    for now[0], ended, arm, key in sorted(events):
        if now[0] > seconds:
            break
        if ended:
            keys.ended("finished", arm, key * 2_654_435_761, reached=True)
        else:
            keys.assigned(arm, key * 2_654_435_761)
    return keys


@pytest.mark.parametrize("seed", range(3))
def test_a_slower_arm_is_no_smaller_one(seed):
    """At any moment fewer of its keys have ended, though all of them will."""
    keys = arriving(seed, loses=0.0, seconds=400.0)
    assert keys.ratios["finished"].p_value > ALARM
    assert sum(keys.ratios["finished"].counts) > 10_000


def test_requests_that_are_lost_are_found():
    keys = arriving(0, loses=0.1)
    fast, slow = keys.ratios["finished"].counts
    assert slow / fast == pytest.approx(0.9, abs=0.03)
    assert keys.ratios["assigned"].p_value > ALARM > keys.ratios["finished"].p_value


def test_nothing_waits_for_ever():
    from kvpolicy.experiments.statistics.distinct_keys import DistinctKeys
    from kvpolicy.experiments.statistics.waiting_line import PATIENCE

    now = [0.0]
    keys = DistinctKeys({"a": 1, "b": 1}, lambda: now[0])
    for key in range(3):
        keys.assigned("a", key)
    for key in (1, 2):
        keys.ended("finished", "a", key, reached=True)
    assert keys.counts("finished")["a"] == 0
    keys.ended("finished", "a", 0, reached=False)  # aborted
    assert keys.counts("finished")["a"] == 2
    keys.assigned("a", 0)  # it comes again
    keys.ended("finished", "a", 0, reached=True)
    assert keys.counts("finished")["a"] == 3
    keys.assigned("b", 3)
    keys.assigned("b", 4)
    keys.ended("finished", "b", 4, reached=True)
    assert keys.counts("finished")["b"] == 0
    now[0] = PATIENCE + 1
    keys.assigned("b", 5)
    assert keys.counts("finished")["b"] == 1
    assert len(keys._lines["finished"]) == 1
