"""The further tasks: seeded, exact in length, right by an independent reading of the prompt."""

from collections import Counter

import lessons
import more_tasks
import numpy as np
import pytest
import tasks
from kvpolicy.evaluation.questions import embedded, embedded_worlds
from kvpolicy.evaluation.questions.embedded import COMMA

LENGTHS = (64, 100, 512, 2048)
MIXES = [value for name, value in vars(lessons).items() if name.endswith("MIX")]
LISTED = ("mv", "vt", "kv")
KINDS = sorted({*lessons.MIX, *lessons.LISTING_MIX} - {"copy"})


def draw(task, length, seed=0):
    return more_tasks.sample(task, length, np.random.default_rng(seed))


def split(ids, question):
    """Context and question of a prompt whose question has `question` tokens."""
    return ids[1:-question], ids[-question:]


def facts_in(context):
    """(Key, value) pairs in order, read only from the tokens."""
    starts = [at for at, token in enumerate(context) if token == embedded.FACT]
    return [(tuple(context[at + 1 : at + 3]), context[at + 4 : at + 7]) for at in starts]


def links_in(context):
    """Variable -> the variable it points to: `let a b .`; other uses of `let` are filler."""
    found = {}
    for at in range(len(context) - 3):
        let, a, b, dot = context[at : at + 4]
        if let == embedded_worlds.LET and a in embedded.KEYS and b in embedded.KEYS:
            assert dot == embedded.DOT
            assert a not in found
            found[a] = b
    return found


def pairs_in(context):
    starts = [at - 3 for at, token in enumerate(context) if token == embedded.IS]
    return {tuple(context[at : at + 3]): context[at + 4 : at + 9] for at in starts}


@pytest.mark.parametrize("task", more_tasks.TITLES)
def test_samples_depend_on_the_seed_alone(task):
    assert draw(task, 200, 5) == draw(task, 200, 5)
    assert draw(task, 200, 5) != draw(task, 200, 6)


@pytest.mark.parametrize("task", tasks.TASKS)
def test_the_first_tasks_are_unchanged(task):
    assert draw(task, 200) == tasks.sample(task, 200, np.random.default_rng(0))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("task", LISTED)
def test_prompts_have_their_length_and_the_needles_are_statements(task, length):
    heads = {"mv": embedded.FACT, "vt": embedded_worlds.LET}
    for seed in range(10):
        sample = draw(task, length, seed)
        ids = sample.prompt_ids
        assert len(ids) == length
        assert (ids[0], ids[-1]) == (embedded.BOS, embedded.ANSWER)
        for start, stop in sample.needles:
            if task in heads:
                assert ids[start] == heads[task]
            assert ids[stop - 1] == (COMMA if task == "kv" else embedded.DOT)


@pytest.mark.parametrize("length", LENGTHS)
def test_many_values_asks_for_all_values_of_a_key(length):
    for seed in range(10):
        sample = draw("mv", length, seed)
        context, question = split(sample.prompt_ids, 10)
        key = tuple(question[1:3])
        listed = [*key, COMMA, *key, COMMA, *key]
        assert question == [embedded.LIST, *listed, embedded.ANSWER]
        values = [value for other, value in facts_in(context) if other == key]
        assert len(values) == 3
        said = [sample.answer_ids[at + 3 : at + 6] for at in (0, 7, 14)]
        assert sorted(said) == sorted(values)


@pytest.mark.parametrize("length", LENGTHS)
def test_variables_are_tracked_to_the_end(length):
    for seed in range(10):
        sample = draw("vt", length, seed)
        context, question = split(sample.prompt_ids, 3)
        links = links_in(context)
        chain = [question[1]]
        while chain[-1] in links:
            chain.append(links[chain[-1]])
        assert question[0] == embedded_worlds.FOLLOW
        assert question[1] not in links.values()
        assert sample.answer_ids == chain
        assert len(chain) == 5


@pytest.mark.parametrize("length", LENGTHS)
def test_pairs(length):
    for seed in range(10):
        sample = draw("kv", length, seed)
        context, question = split(sample.prompt_ids, 5)
        found = pairs_in(context)
        assert len(found) == len(context) // 10
        assert sample.answer_ids == found[tuple(question[1:4])]


def test_keys_of_pairs_share_two_of_three_words_in_hard_samples():
    shared = 0
    for seed in range(20):
        keys = list(pairs_in(draw("kv", 512, seed).prompt_ids))
        shared += len({key[1:] for key in keys}) < len(keys)
    assert 3 < shared < 17


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("task", "count", "lead"), [("cwe", 5, 2.0), ("fwe", 3, 1.1)])
def test_counted_words_are_clearly_ahead(task, count, lead, length):
    for seed in range(10):
        sample = draw(task, length, seed)
        context, _ = split(sample.prompt_ids, 3)
        ranked = Counter(context).most_common()
        assert len(sample.prompt_ids) == length
        assert {word for word, _ in ranked[:count]} == set(sample.answer_ids[::2])
        assert set(sample.answer_ids[1::2]) == {COMMA}
        assert COMMA not in context
        assert ranked[count - 1][1] >= lead * ranked[count][1]


def test_right_lets_lists_have_any_order_and_chains_none():
    for task, other_order in (("fwe", True), ("cwe", True), ("vt", False), ("kv", False)):
        sample = draw(task, 256)
        assert more_tasks.right(sample, sample.answer_ids)
        assert more_tasks.right(sample, sample.answer_ids[::-1]) == other_order
        assert not more_tasks.right(sample, sample.answer_ids[:-1])
    sample = draw("mv", 256)
    first, second, third = (sample.answer_ids[at : at + 6] for at in (0, 7, 14))
    comma = [COMMA]
    assert more_tasks.right(sample, [*third, *comma, *first, *comma, *second])
    assert not more_tasks.right(sample, [*first, *comma, *first, *comma, *second])


@pytest.mark.parametrize(
    ("task", "least"), [("mv", 35), ("vt", 20), ("kv", 16), ("cwe", 54), ("niah", 13)]
)
def test_too_short_a_prompt_is_refused_with_the_least_length(task, least):
    assert len(draw(task, least).prompt_ids) == least
    with pytest.raises(ValueError, match=f"needs at least {least} tokens, got {least - 1}"):
        draw(task, least - 1)


def test_unknown_task_is_refused():
    with pytest.raises(ValueError, match=r"unknown task 'needle'; the tasks are niah, .*, fwe"):
        draw("needle", 512)


def test_share_is_that_of_the_items_named():
    sample = draw("cwe", 256)
    listed = sample.answer_ids
    assert more_tasks.share(sample, listed[::-1]) == 1
    assert more_tasks.share(sample, listed[:5]) == pytest.approx(3 / 5)
    twice = [*listed[:3], COMMA, listed[0]]
    assert more_tasks.share(sample, twice) == pytest.approx(2 / 5)
    assert more_tasks.share(sample, []) == 0
    sample = draw("mv", 256)
    assert more_tasks.share(sample, sample.answer_ids[7:]) == pytest.approx(2 / 3)
    sample = draw("kv", 256)
    assert more_tasks.share(sample, [*sample.answer_ids[:2], embedded.DOT]) == pytest.approx(2 / 5)
    assert more_tasks.share(sample, sample.answer_ids) == 1


@pytest.mark.parametrize("length", [64, 300])
@pytest.mark.parametrize("kind", KINDS)
def test_lessons_fit_and_mark_whole_answers(kind, length):
    marked = 0
    for seed in range(20):
        lesson = lessons.lesson(kind, length, np.random.default_rng(seed))
        assert len(lesson.ids) <= length
        for start, stop in lesson.answers:
            assert lesson.ids[start - 1] == embedded.ANSWER
            assert lesson.ids[stop - 1] == embedded.END
            marked += 1
    assert marked >= 3


def test_no_question_comes_twice_in_a_lesson():
    heads = (embedded.ASK, embedded.LIST, embedded_worlds.FOLLOW, more_tasks.BEYOND)
    for kind in (*LISTED, "two hops"):
        lesson = lessons.lesson(kind, 512, np.random.default_rng(0))
        asked = []
        for start, _ in lesson.answers:
            at = max(i for i in range(start) if lesson.ids[i] in heads)
            asked.append(tuple(lesson.ids[at:start]))
        assert len(asked) == len(set(asked)) > 3


@pytest.mark.parametrize("mix", MIXES)
def test_shares_of_a_mix(mix):
    assert sum(mix.values()) == pytest.approx(1)


def also_right_of(kind, seed=0):
    """A lesson, and for each place the set of words that are also right."""
    ids, is_answer = lessons.batch(1, 128, np.random.default_rng(seed), {kind: 1.0})
    also = lessons.also_right(ids, is_answer)[0]
    return ids[0].tolist(), is_answer[0], [{w for w in words if w >= 0} for words in also.tolist()]


@pytest.mark.parametrize(("kind", "count"), [("cwe", 5), ("fwe", 3)])
def test_words_yet_to_be_listed_are_as_right(kind, count):
    ids, is_answer, also = also_right_of(kind)
    places = np.flatnonzero(is_answer)[:-1:2]
    assert len(places) == count
    for turn, at in enumerate(places):
        assert also[at] == {ids[later] for later in places[turn + 1 :]}
    assert not any(words for at, words in enumerate(also) if at not in places)


def test_values_yet_to_be_listed_are_as_right():
    """In every answer on one key, these are the first words of the values listed later."""
    ids, is_answer, also = also_right_of("mv")
    starts = [at for at in np.flatnonzero(is_answer) if not is_answer[at - 1]]
    expected = [set() for _ in ids]
    for start in starts:
        firsts = range(start + 3, ids.index(embedded.END, start), 7)
        for turn, at in enumerate(firsts):
            expected[at] = {ids[later] for later in firsts[turn + 1 :]}
    assert also == expected
    assert any(expected)


@pytest.mark.parametrize("kind", ["several asked", "all facts", "kv", "vt"])
def test_nothing_else_is_right_where_the_order_counts(kind):
    for seed in range(5):
        assert not any(also_right_of(kind, seed)[2])
