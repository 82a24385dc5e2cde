"""Intervals and bets on a bounded mean, against the formulas and against fixed-sample oracles."""

import json
import math

import numpy as np
import pytest
from kvpolicy.experiments.statistics.bounded_mean import ABOVE, BELOW, BoundedMean
from scipy import optimize, special, stats
from statsmodels.stats.proportion import proportion_confint


def filled(values, upper=1.0, margin=None):
    mean = BoundedMean(upper, margin)
    for value in values:
        mean.add(float(value))
    return mean


def lognormal(rng, mean, size, upper=2.0):
    """Random values with heavy tails and 0.5 % outliers at the clip."""
    values = np.minimum(rng.lognormal(math.log(mean) - 0.72, 1.2, size), upper)
    values[rng.random(size) < 0.005] = upper
    return values


def test_interval_is_theorem_2():
    """Compared with the formula in the paper, with its indices."""
    x = np.random.default_rng(1).beta(2, 5, 300)
    alpha, lambdas, v = 0.05, [], []
    for t in range(1, len(x) + 1):
        mus = [(0.5 + x[:i].sum()) / (i + 1) for i in range(1, t)]
        variance = (0.25 + sum((x[i] - mus[i]) ** 2 for i in range(t - 1))) / t
        lambdas.append(
            min(math.sqrt(2 * math.log(2 / alpha) / (variance * t * math.log(t + 1))), 0.75)
        )
        before = (0.5 + x[: t - 1].sum()) / t
        v.append(4 * (x[t - 1] - before) ** 2)
    psi = [(-math.log(1 - bet) - bet) / 4 for bet in lambdas]
    center = np.dot(lambdas, x) / sum(lambdas)
    half = (math.log(2 / alpha) + np.dot(v, psi)) / sum(lambdas)
    low, high = filled(x).interval(alpha)
    assert low == pytest.approx(center - half)
    assert high == pytest.approx(center + half)


@pytest.mark.parametrize("p", [0.002, 0.05, 0.5])
def test_interval_holds_the_exact_one_of_a_fixed_sample(p):
    """Continuous looking costs width: the sequence contains Clopper and Pearson's interval."""
    x = np.random.default_rng(2).random(4_000) < p
    low, high = filled(x).interval(0.05)
    exact_low, exact_high = proportion_confint(int(x.sum()), len(x), 0.05, method="beta")
    assert low <= exact_low
    assert high >= exact_high
    assert high - low < 4.5 * (exact_high - exact_low)


def test_interval_scales_with_the_values():
    x = np.random.default_rng(3).random(100)
    low, high = filled(x).interval(0.05)
    assert filled(2 * x, upper=2.0).interval(0.05) == pytest.approx((2 * low, 2 * high))


def test_without_values_nothing_is_known():
    mean = BoundedMean(2.0, 0.05)
    assert mean.interval(0.05) == (0.0, 2.0)
    assert mean.log_e_above == mean.log_e_below == 0.0
    assert mean.mean is None


def test_bets_are_a_mixture_over_the_grid():
    x, m = np.random.default_rng(4).random(50), 0.3
    mean = filled(x, margin=m)
    above = [np.log1p(share / m * (x - m)).sum() for share in ABOVE]
    below = [np.log1p(share / (1 - m) * (m - x)).sum() for share in BELOW]
    assert mean.log_e_above == pytest.approx(special.logsumexp(above) - math.log(len(ABOVE)))
    assert mean.log_e_below == pytest.approx(special.logsumexp(below) - math.log(len(BELOW)))


def test_the_mixture_is_nearly_as_good_as_the_best_bet():
    """The best bet is known only afterwards; the grid may cost its size, log 16, and a little."""
    x, m = lognormal(np.random.default_rng(5), 0.2, 400) / 2, 0.025

    def lost(bet):
        return -np.log1p(bet / m * (x - m)).sum()

    best = -optimize.minimize_scalar(lost, bounds=(0, 0.999), method="bounded").fun
    mean = filled(2 * x, upper=2.0, margin=0.05)
    assert best - math.log(len(ABOVE)) - 0.05 * best < mean.log_e_above <= best


def test_capital_is_fair_at_the_margin():
    """The expected e-value of one value is 1 where the mean is the margin, for every law."""
    m = 0.1
    for values, chances in (([0, 1], [0.9, 0.1]), ([0, 0.05, 0.4], [0.4, 0.4, 0.2])):
        assert np.dot(values, chances) == pytest.approx(m)
        for name in ("log_e_above", "log_e_below"):
            e = [math.exp(getattr(filled([value], margin=m), name)) for value in values]
            assert np.dot(e, chances) == pytest.approx(1.0)


def test_replicas_pool_exactly():
    x = lognormal(np.random.default_rng(6), 0.1, 900)
    parts = [filled(part, 2.0, 0.05) for part in np.split(x, 3)]
    pooled = BoundedMean.pooled(parts)
    whole = filled(x, 2.0, 0.05)
    assert pooled.n == 900
    assert pooled.mean == pytest.approx(whole.mean)
    assert pooled.log_e_above == pytest.approx(whole.log_e_above)  # bets do not depend on the past
    assert pooled.log_e_below == pytest.approx(whole.log_e_below)
    assert pooled.log_e_above >= sum(part.log_e_above for part in parts)
    low, high = pooled.interval(0.05)
    assert low < x.mean() < high
    assert all(high - low < part.interval(0.05)[1] - part.interval(0.05)[0] for part in parts)


def test_a_document_goes_on_where_it_stopped():
    x = lognormal(np.random.default_rng(7), 0.1, 200)
    stopped = json.loads(json.dumps(filled(x[:120], 2.0, 0.05).as_document()))
    again = BoundedMean.from_document(stopped)
    for value in x[120:]:
        again.add(float(value))
    assert again.as_document() == filled(x, 2.0, 0.05).as_document()


def test_only_alike_means_pool():
    with pytest.raises(ValueError, match="one bound and one margin"):
        BoundedMean.pooled([BoundedMean(1.0, 0.05), BoundedMean(1.0, 0.1)])


@pytest.mark.parametrize("x", [-0.1, 2.1, math.nan, math.inf])
def test_values_outside_are_refused(x):
    with pytest.raises(ValueError, match="is not between 0 and 2"):
        BoundedMean(2.0).add(x)


@pytest.mark.parametrize(
    ("upper", "margin"), [(0.0, None), (math.inf, None), (1.0, 1.0), (1.0, 0.0)]
)
def test_impossible_bounds_are_refused(upper, margin):
    with pytest.raises(ValueError, match="must be above 0"):
        BoundedMean(upper, margin)


@pytest.mark.parametrize("damage", [{"total": "1"}, {"above": [0.0]}, {"bets": math.nan}])
def test_damaged_documents_are_refused(damage):
    with pytest.raises(ValueError, match=r"no number|another version"):
        BoundedMean.from_document(BoundedMean(2.0, 0.05).as_document() | damage)


def decided(draw, margin, evidence, threshold, runs=40, most=4_000):
    """Median over runs of the number of values until the evidence reaches a threshold."""
    found = []
    for run in range(runs):
        mean = BoundedMean(2.0, margin)
        for value in draw(np.random.default_rng([8, run]), most):
            mean.add(float(value))
            if getattr(mean, evidence) >= threshold:
                break
        found.append(mean.n)
    return float(np.median(found))


def test_a_bad_arm_is_caught_after_some_values():
    """0.5 nats at a margin of 0.05, three guardrails."""
    after = decided(lambda rng, n: lognormal(rng, 0.5, n), 0.05, "log_e_above", math.log(3 / 0.05))
    assert after < 40


def test_a_good_arm_is_cleared_after_a_few_hundred_values():
    after = decided(lambda rng, n: lognormal(rng, 0.01, n), 0.05, "log_e_below", math.log(1 / 0.05))
    assert 100 < after < 800


def test_coverage_beats_a_t_interval_under_continuous_looking():
    """Under continuous looking an interval for a fixed sample misses the mean; ours does not."""
    rng = np.random.default_rng(9)
    missed = {"sequence": 0, "t": 0}
    for _ in range(60):
        x = rng.random(600) < 0.1
        mean, misses = BoundedMean(1.0), {"sequence": False, "t": False}
        for i, value in enumerate(x, 1):
            mean.add(float(value))
            low, high = mean.interval(0.05)
            misses["sequence"] |= not low <= 0.1 <= high
            if i >= 20 and i % 5 == 0:
                seen = x[:i]
                half = stats.t.ppf(0.975, i - 1) * seen.std(ddof=1) / math.sqrt(i)
                misses["t"] |= not seen.mean() - half <= 0.1 <= seen.mean() + half
        for name, miss in misses.items():
            missed[name] += miss
    assert missed["sequence"] <= 6
    assert missed["t"] > 15
