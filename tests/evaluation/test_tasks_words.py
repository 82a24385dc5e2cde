"""Parts of the tasks in English: fitting to a length, filler, names, places of statements."""

import numpy as np
import pytest
from kvpolicy.evaluation.questions.words import MOST_NAMES, Filler, largest, listing, names, numbers
from kvpolicy.evaluation.questions.words_facts import weave


def rng(seed=0):
    return np.random.default_rng(seed)


@pytest.mark.parametrize("limit", [0, 3, 60, 199, 1000, 12_345])
@pytest.mark.parametrize("first", [0, 1, 40, 10_000])
def test_the_largest_that_fits_is_found_whatever_is_tried_first(limit, first):
    for seed in range(20):
        grown = np.cumsum(rng(seed).integers(0, 12, 3000)).tolist()
        calls = []

        def size(n, grown=grown, calls=calls):
            calls.append(n)
            return grown[n]

        found = largest(size, limit, 2999, first)
        best = max((n for n in range(3000) if grown[n] <= limit), default=0)
        assert found <= best
        assert found == best or grown[found] >= limit - limit // 200
        assert len(calls) <= 24


def test_nothing_beyond_the_most_is_tried():
    assert largest(lambda n: {0: 5, 1: 6, 2: 7}[n], 100, 2, 50) == 2
    assert largest(lambda n: {0: 5}[n], 100, 0, 7) == 0


def test_filler_begins_alike_whatever_is_asked_first():
    one, other = Filler(rng()), Filler(rng())
    long = one.sentences(3000)
    assert other.sentences(30)[:-1] == long[: len(other.sentences(30)) - 1]
    assert other.sentences(3000) == long
    for words in (0, 1, 7, 500):
        text = " ".join(one.sentences(words))
        assert len(text.split()) == words
        assert text.endswith(".") or not words


def test_names_and_numbers_are_all_different():
    assert len(set(names(5000, rng()))) == 5000
    assert len(set(names(MOST_NAMES, rng()))) == MOST_NAMES
    drawn = numbers(80, 2, rng())
    assert len(set(drawn)) == 80
    assert {len(number) for number in drawn} == {2}


def test_listing():
    assert [listing("abc"[:n]) for n in (1, 2, 3)] == ["a", "a and b", "a, b and c"]


def test_statements_lie_where_they_were_put():
    sentences = [f"Sentence {i} stands here." for i in range(50)]
    statements, places = ["END.", "START.", "MIDDLE."], [1.0, 0.0, 0.5]
    woven = weave("Read. ", statements, places, sentences)
    assert [woven.text[start:stop] for start, stop in woven.spans] == statements
    assert woven.text.startswith("Read. START. Sentence 0")
    assert woven.text.endswith("END.")
    assert [woven.depth(i) for i in range(3)] == pytest.approx([1, 0, 0.5], abs=0.02)
    assert sum(woven.text.count(sentence) for sentence in sentences) == 50
    assert weave("", ["A."], [0.3], []).text == "A."
