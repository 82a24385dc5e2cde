"""Intervals compared with published values, and their coverage."""

import numpy as np
import pytest
from kvpolicy.evaluation.reporting.statistics import (
    FEW,
    Contexts,
    _weights,
    mean_score,
    of_share,
    paired_difference,
    quartiles,
)


def pairs(both, first, second, neither):
    """Scores of two policies with these numbers of questions right in both, in one, in none."""
    counts = (both, first, second, neither)
    return (
        np.repeat([1.0, 1.0, 0.0, 0.0], counts),
        np.repeat([1.0, 0.0, 1.0, 0.0], counts),
    )


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),  # Newcombe, Statistics in Medicine 17, 1998, p. 857
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (29, 29, 0.8830, 1.0),
    ],
)
def test_wilson_equals_published_values(right, count, low, high):
    estimate = of_share(right / count, count)
    assert estimate == pytest.approx((right / count, low, high), abs=5e-5)
    scores = np.repeat([1.0, 0.0], (right, count - right))
    assert mean_score([scores]) == pytest.approx(estimate)


@pytest.mark.parametrize(
    ("table", "low", "high"),
    [
        ((36, 12, 2, 0), 0.0569, 0.3404),  # Newcombe, Statistics in Medicine 17, 1998, p. 2635
        ((14, 5, 0, 22), 0.0115, 0.2265),  # Altman and others, Statistics with Confidence
    ],
)
def test_newcombe_equals_published_values(table, low, high):
    first, second = pairs(*table)
    estimate = paired_difference([first], [second])
    expected = (table[1] - table[2]) / sum(table)
    assert estimate == pytest.approx((expected, low, high), abs=5e-5)
    turned = paired_difference([second], [first])
    assert turned == pytest.approx((-expected, -high, -low), abs=5e-5)


def test_no_difference_seen_is_not_certainty():
    right = np.ones(50)
    estimate = paired_difference([right], [right])
    assert estimate.mean == 0
    assert estimate.low < -0.05 < 0.05 < estimate.high


def test_pairing_narrows_the_interval():
    rng = np.random.default_rng(0)
    full = (rng.random(200) < 0.7).astype(float)
    same = full.copy()
    same[:10] = 1 - same[:10]
    shuffled = rng.permutation(same)
    width = [e.high - e.low for e in (paired_difference([x], [full]) for x in (same, shuffled))]
    assert width[0] < 0.7 * width[1]


def _covered(estimate, truth):
    return estimate.low <= truth <= estimate.high


def test_bootstrap_holds_the_mean_as_often_as_it_says():
    """Scores in quarters, as with four items; 40 samples in each of 600 runs."""
    rng = np.random.default_rng(1)
    runs = rng.binomial(4, 0.7, size=(600, 40)) / 4
    share = np.mean([_covered(mean_score([run]), 0.7) for run in runs])
    assert 0.92 < share < 0.975


def test_paired_bootstrap_holds_the_difference_as_often_as_it_says():
    rng = np.random.default_rng(2)
    share = []
    for _ in range(600):
        ease = rng.uniform(0.3, 0.9, 40)  # some questions are hard for both
        full, policy = (rng.binomial(4, ease + shift) / 4 for shift in (0.05, -0.05))
        share.append(_covered(paired_difference([policy], [full]), -0.1))
    assert 0.92 < np.mean(share) < 0.975


def test_an_interval_that_ends_at_zero_does_not_leave_it_out():
    """Scores in thirds, whose sums are not exact: one end of each of these intervals is 0."""
    rng, at_zero = np.random.default_rng(2), 0
    for _ in range(1500):
        full = rng.integers(0, 4, 30)
        policy = np.where(rng.random(30) < 0.8, full, rng.integers(0, 4, 30))
        drawn = np.rint(_weights(30, 0) * 30).astype(int) @ (policy - full)  # whole numbers
        if 0 not in np.percentile(drawn, (2.5, 97.5)):
            continue
        at_zero += 1
        estimate = paired_difference([policy / 3], [full / 3])
        assert estimate.low <= 0 <= estimate.high
    assert at_zero > 20


def test_newcombe_holds_the_difference_as_often_as_it_says():
    rng = np.random.default_rng(3)
    share = []
    for _ in range(600):
        full = rng.random(50) < 0.9
        policy = np.where(rng.random(50) < 0.8, full, rng.random(50) < 0.4)
        truth = 0.2 * (0.4 - 0.9)
        estimate = paired_difference([policy.astype(float)], [full.astype(float)])
        share.append(_covered(estimate, truth))
    assert 0.93 < np.mean(share) < 0.99


def test_few_samples_are_never_narrow():
    """With three scores a bootstrap would give 0.5 to 0.75, or one point if all agree."""
    for scores in (np.array([0.5, 0.75, 0.5]), np.full(FEW - 1, 0.5), np.full(100, 0.5)):
        estimate = mean_score([scores])
        assert estimate.high - estimate.low > 0.18
        assert paired_difference([scores], [scores]).high > 0.05


def test_strata_weigh_the_same():
    many, few = np.ones(300), np.zeros(30)
    estimate = mean_score([many, few])
    assert estimate.mean == 0.5
    below, above = of_share(1, 300), of_share(0, 30)
    assert estimate.low == pytest.approx(0.5 - (1 - below.low) / 2)
    assert estimate.high == pytest.approx(0.5 + above.high / 2)
    quarters = [np.tile([0.25, 0.75], 30), np.tile([0.5, 1.0], 10)]
    mixed = mean_score(quarters)
    assert mixed.mean == pytest.approx(0.625)
    assert 0.5 < mixed.low < 0.6 < 0.65 < mixed.high < 0.75


def test_a_stratum_of_few_samples_makes_the_total_wide():
    """Two questions of one task beside a hundred of six: a bootstrap would not see their doubt."""
    sure = [np.ones(100)] * 5 + [np.tile([0.75, 1.0], 50)]
    assert mean_score(sure).high - mean_score(sure).low < 0.03
    estimate = mean_score([*sure, np.zeros(2)])
    assert estimate.high - estimate.mean > 0.6 / 7


def test_strata_hold_their_mean_as_often_as_they_say():
    rng = np.random.default_rng(6)
    shares = (0.9, 0.5, 0.99, 0.2)
    held = []
    for _ in range(600):
        strata = [rng.binomial(1, share, 30).astype(float) for share in shares]
        strata.append(rng.binomial(4, 0.6, 30) / 4)
        held.append(_covered(mean_score(strata), np.mean([*shares, 0.6])))
    assert 0.93 < np.mean(held) < 0.985


def _same(*counts):
    """Contexts of strata that share them, with these numbers of units."""
    return [Contexts("one", np.arange(count)) for count in counts]


def test_strata_of_the_same_contexts_and_scores_are_no_surer_than_one():
    right = np.repeat([1.0, 0.0], (24, 16))
    for scores in (right, np.tile([0.25, 0.75], 20), np.ones(40), np.ones(3)):
        one, strata = mean_score([scores]), [scores] * 3
        estimate = mean_score(strata, contexts=_same(*map(len, strata)))
        assert estimate == pytest.approx(one)
    full = np.repeat([1.0, 0.0], (30, 10))
    one = paired_difference([right], [full])
    contexts = _same(40, 40)
    assert paired_difference([right] * 2, [full] * 2, contexts=contexts) == pytest.approx(one)
    sources = [Contexts(source, np.arange(40)) for source in ("one", "other")]
    assert mean_score([right] * 2, contexts=sources) == mean_score([right] * 2)


def test_strata_of_the_same_contexts_hold_their_mean_as_often_as_they_say():
    """Three tasks ask about the same 40 contexts, of which some are hard for all of them."""
    rng = np.random.default_rng(8)
    held: dict[bool, list[bool]] = {True: [], False: []}
    for _ in range(600):
        hard = rng.random(40) < 0.4
        strata = [np.where(hard, rng.random(40) < 0.1, rng.random(40) < 0.9) for _ in range(3)]
        strata = [units.astype(float) for units in strata]
        for known in held:
            estimate = mean_score(strata, contexts=_same(40, 40, 40) if known else None)
            held[known].append(_covered(estimate, 0.4 * 0.1 + 0.6 * 0.9))
    assert 0.93 < np.mean(held[True]) < 0.985
    assert np.mean(held[False]) < 0.85


def test_only_the_contexts_that_strata_share_make_them_alike():
    scores = np.repeat([1.0, 0.0], (24, 16))
    numbers = [np.arange(40), np.arange(40, 80), np.arange(20, 60)]
    contexts = [Contexts("one", each) for each in numbers]
    width = [
        estimate.high - estimate.low
        for estimate in (
            mean_score([scores] * 2, contexts=[contexts[0], other]) for other in contexts
        )
    ]
    assert width[1] < width[2] < width[0]


def test_same_seed_same_interval():
    scores = np.random.default_rng(4).choice([0, 0.5, 1], 60)
    assert mean_score([scores], 7) == mean_score([scores], 7)
    assert mean_score([scores], 7) != mean_score([scores], 8)


def test_quartiles():
    assert quartiles([1, 2, 3, 4, 5]) == (3, 2, 4)
    assert quartiles([7.5]) == (7.5, 7.5, 7.5)
