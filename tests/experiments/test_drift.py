"""Divergence of the top K: exact if K covers all, else a lower bound; zero for equal ones."""

import numpy as np
import pytest
from kvpolicy.experiments.statistics.drift import Candidates, disagreements, divergence
from scipy.special import log_softmax, rel_entr


def top(logprobs, count):
    ids = np.argsort(-logprobs, axis=1, kind="stable")[:, :count]
    values = np.take_along_axis(logprobs, ids, axis=1).astype(np.float32)
    return Candidates(ids.astype(np.int32), values)


def two(rows, words, noise, seed):
    random = np.random.default_rng(seed)
    logits = random.normal(size=(rows, words)) * 3
    return [log_softmax(x, axis=1) for x in (logits, logits + noise * random.normal(size=(words,)))]


@pytest.mark.parametrize("noise", [0.1, 1.0, 5.0])
def test_all_candidates_give_the_divergence_itself(noise):
    p, q = two(300, 37, noise, 1)
    wanted = rel_entr(np.exp(p), np.exp(q)).sum(axis=1)
    assert divergence(top(p, 37), top(q, 37)) == pytest.approx(wanted, abs=2e-5)


@pytest.mark.parametrize("count", [1, 3, 8, 20])
def test_fewer_candidates_bound_it_from_below(count):
    p, q = two(200, 50, 1.0, 2)
    wanted = rel_entr(np.exp(p), np.exp(q)).sum(axis=1)
    found = divergence(top(p, count), top(q, count))
    assert (found <= wanted + 1e-4).all()
    assert (found >= 0).all()
    if count == 20:
        assert found.mean() > 0.9 * wanted.mean()


def test_equal_distributions_are_zero_exactly():
    p, _ = two(500, 80, 0.0, 3)
    assert not divergence(top(p, 16), top(p, 16)).any()
    certain = Candidates(np.array([[5, 1]]), np.array([[0.0, -np.inf]], dtype=np.float32))
    assert not divergence(certain, certain).any()


def test_candidates_that_full_kv_does_not_list():
    p = Candidates(np.array([[1, 2]]), np.log(np.array([[0.6, 0.39]])))
    q = Candidates(np.array([[3, 4]]), np.log(np.array([[0.6, 0.39]])))
    # The first two have at most 0.39 each with full KV.
    wanted = 0.99 * np.log(0.99 / 0.78) + 0.01 * np.log(0.01 / 0.22)
    assert divergence(p, q) == pytest.approx([wanted], abs=1e-6)
    assert disagreements(p, q).tolist() == [True]


def test_what_full_kv_may_well_have_given_is_no_divergence():
    """It does not list the second candidate, which may have 0.25 of the 0.5 that it leaves."""
    p = Candidates(np.array([[1, 2]]), np.log(np.array([[0.5, 0.25]])))
    q = Candidates(np.array([[1, 3]]), np.log(np.array([[0.5, 0.3]])))
    assert divergence(p, q) == pytest.approx([0.0], abs=1e-9)


def test_nothing_at_all():
    empty = Candidates(np.empty((0, 4), dtype=np.int32), np.empty((0, 4), dtype=np.float32))
    assert divergence(empty, empty).shape == (0,)


def test_what_is_no_number_is_no_number_and_never_equal():
    """Such as logits of a policy that breaks the model: neither drift nor tokens look good."""
    p, _ = two(300, 40, 0.0, 4)  # more rows than are compared at once
    good, broken = top(p, 8), top(p, 8)
    broken.logprobs[7] = np.nan
    broken.logprobs[290, 5] = np.nan
    unlisted = Candidates(broken.ids + 100, broken.logprobs)
    wanted = [7, 290]
    for one, other in ((broken, good), (good, broken), (broken, broken), (unlisted, good)):
        found = divergence(one, other)
        assert np.flatnonzero(np.isnan(found)).tolist() == wanted
    assert not np.delete(divergence(broken, good), wanted).any()
    assert np.flatnonzero(disagreements(broken, good)).tolist() == wanted
    assert np.flatnonzero(disagreements(good, broken)).tolist() == wanted
