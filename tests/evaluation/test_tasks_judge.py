"""Judges: which answers count, for embedded models, in English, and in own data."""

import pickle

import pytest
from kvpolicy.evaluation.questions import judge


def test_a_single_answer_must_begin_with_the_item():
    judged = judge.beginning("oak river stone")
    assert judged(" oak river stone") == judged("Oak river stone . lake") == 1
    assert judged("oak river lake") == judged("lake oak river stone") == judged("oak") == 0


def test_what_follows_the_end_is_not_read():
    assert judge.beginning("oak river stone")("oak river stone<end> x") == 1
    assert judge.beginning("oak river stone")("<end> oak river stone") == 0
    assert judge.named(["oak", "elm"])("oak <end> elm") == 0.5
    assert judge.parts(["a b", "c d"])("a b <end> , c d") == 0.5


def test_items_between_commas_have_their_share_in_any_order():
    judged = judge.parts(["blue dog is oak", "red cat is elm"])
    assert judged("red cat is elm, blue dog is oak") == 1
    assert judged("red cat is elm , red cat is elm") == 0.5
    assert judged("red cat is elm blue dog is oak") == 0
    assert judged("red cat is , elm") == 0


def test_words_said_twice_count_once():
    judged = judge.named(["oak", "elm", "fig", "fir"])
    assert judged("oak oak oak elm") == 0.5
    assert judged("fir , fig , elm , oak , ash") == 1
    assert judged("oaks") == 0


def test_english_items_are_words_of_their_own_in_any_case():
    judged = judge.mentioned(["1234567", "TSV"])
    assert judged(" 1234567, and TSV.") == judged("**tsv** 1234567") == 1
    assert judged("12345678 and TSVX") == 0
    assert judged("the number 1234567.") == 0.5


def test_own_data_any_answer_will_do():
    judged = judge.any_of(["New York", "NYC"])
    assert judged("It is  new\nyork, I think") == judged("nyc") == 1
    assert judged("York") == 0


def test_own_data_f1_is_the_best_of_all_answers():
    judged = judge.overlap(["the red house", "a cottage by the lake"])
    assert judged("Red house!") == 1
    assert judged("cottage lake") == pytest.approx(2 * 2 / (3 + 2))
    assert judged("nothing") == judged("") == 0


def test_own_data_classes_share_the_score():
    judged = judge.one_class(["Sports news"], ["Sports", "Sports news", "Politics"])
    assert judged("sports news") == 1
    assert judged("Sports news or politics") == 0.5
    assert judged("Sports") == judged("Politics") == 0
    assert judge.one_class(["Sports  news"], ["sports news", "Politics"])("sports news") == 1


def test_judges_go_from_process_to_process():
    for made in (judge.beginning("a"), judge.parts(["a"]), judge.one_class(["a"], ["a", "b"])):
        assert pickle.loads(pickle.dumps(made))("a") == 1
