"""The task generator: seeded, exact in length, right by an independent reading of the prompt."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tasks
from kvpolicy.evaluation.questions import embedded, embedded_words
from kvpolicy.evaluation.questions.embedded_words import VOCABULARY

LENGTHS = (64, 100, 512, 1024)


def draw(task, length, seed=0):
    return tasks.sample(task, length, np.random.default_rng(seed))


def facts_in(ids):
    """Key -> value, read only from the tokens."""
    found = {}
    for at, token in enumerate(ids):
        if token == embedded.FACT:
            fact = ids[at : at + embedded.FACT_LENGTH]
            assert fact[3] == embedded.IS
            assert fact[7] == embedded.DOT
            assert tuple(fact[1:3]) not in found, "a key is given twice"
            found[tuple(fact[1:3])] = fact[4:7]
    return found


def answer_to(question, facts):
    """The answer to `ask ...` or `list ...`, from the facts."""
    keys = " ".join(map(str, question[1:-1])).split(f" {embedded.COMMA} ")
    keys = [tuple(map(int, key.split())) for key in keys]
    if question[0] == embedded.ASK:
        return facts[keys[0]]
    parts = [[*key, embedded.IS, *facts[key]] for key in keys]
    return [token for part in parts for token in [*part, embedded.COMMA]][:-1]


@pytest.mark.parametrize("task", tasks.TASKS)
def test_samples_depend_on_the_seed_alone(task):
    assert draw(task, 200, 5) == draw(task, 200, 5)
    assert draw(task, 200, 5) != draw(task, 200, 6)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("task", tasks.TASKS)
def test_prompts_have_the_length_asked_for_and_the_answer_is_right(task, length):
    for seed in range(10):
        sample = draw(task, length, seed)
        ids = sample.prompt_ids
        assert len(ids) == length
        assert ids[0] == embedded.BOS
        assert ids[-1] == embedded.ANSWER
        asked = tasks.TASKS[task].asked
        at = length - embedded.question_length(asked)
        facts = facts_in(ids[:at])
        assert sample.answer_ids == answer_to(ids[at:], facts)
        assert len(sample.needles) == asked
        for start, stop in sample.needles:
            assert ids[start] == embedded.FACT
            assert ids[stop - 1] == embedded.DOT


def test_number_of_facts():
    for task, count in {"niah": 1, "distractors": 8, "mk": 503 // 8, "mq": 24}.items():
        assert len(facts_in(draw(task, 508).prompt_ids)) == count


def test_needles_lie_anywhere_in_the_context():
    starts = [draw("niah", 512, seed).needles[0][0] for seed in range(200)]
    counts, _ = np.histogram(starts, bins=4, range=(0, 512))
    assert counts.min() > 25


def test_keys_share_words_in_hard_samples():
    shared = 0
    for seed in range(20):
        keys = list(facts_in(draw("mk", 512, seed).prompt_ids))
        shared += len({first for first, _ in keys}) < len(keys) / 3
    assert 3 < shared < 17


@pytest.mark.parametrize(("task", "least"), [("niah", 13), ("mq", 35)])
def test_too_short_a_prompt_is_refused_with_the_least_length(task, least):
    assert len(draw(task, least).prompt_ids) == least
    with pytest.raises(ValueError, match=f"needs at least {least} tokens, got {least - 1}"):
        draw(task, least - 1)


def test_unknown_task_is_refused():
    with pytest.raises(ValueError, match="unknown task 'needle'; the tasks are niah, "):
        draw("needle", 512)


def test_text_is_one_word_per_token():
    sample = draw("mk", 128)
    ids = [VOCABULARY.index(word) for word in sample.text.split()]
    assert ids == sample.prompt_ids[1:]


def test_vocabulary_fills_its_ranges():
    assert len(set(VOCABULARY)) == len(VOCABULARY) == 512
    words = embedded_words
    for ids, listed in ((embedded.KEYS, words.KEYS), (embedded.VALUES, words.VALUES)):
        assert [VOCABULARY[i] for i in ids] == listed
    assert [VOCABULARY[i] for i in embedded.FILLER] == words.FILLER
    assert VOCABULARY[embedded.END] == "<end>"
    assert VOCABULARY[embedded.ANSWER] == "answer"


@pytest.mark.parametrize("length", [64, 300])
@pytest.mark.parametrize("kind", [kind for kind in tasks.MIX if kind != "copy"])
def test_lessons_ask_what_their_context_answers(kind, length):
    asked = 0
    for seed in range(10):
        lesson = tasks.lesson(kind, length, np.random.default_rng(seed))
        assert len(lesson.ids) <= length
        facts = facts_in(lesson.ids)
        for start, stop in lesson.answers:
            heads = (embedded.ASK, embedded.LIST)
            at = max(i for i in range(start) if lesson.ids[i] in heads)
            answer = answer_to(lesson.ids[at:start], facts)
            assert lesson.ids[start:stop] == [*answer, embedded.END]
            asked += 1
    assert asked >= 10


def test_copy_lessons_repeat_the_segment():
    lesson = tasks.lesson("copy", 200, np.random.default_rng(0))
    segment = lesson.ids[1 : lesson.ids.index(embedded.COMMA)]
    for start, stop in lesson.answers:
        part = lesson.ids[start:stop]
        assert any(segment[i : i + len(part)] == part for i in range(len(segment)))


def test_batches_mark_the_answers():
    ids, is_answer = tasks.batch(8, 128, np.random.default_rng(0))
    assert ids.shape == is_answer.shape == (8, 128)
    assert (ids[is_answer] != embedded.PAD).all()
    assert is_answer.any(1).all()


def test_generator_imports_without_torch():
    folder = Path(tasks.__file__).parent
    code = """if True:
        import sys
        sys.path.insert(0, sys.argv[1])
        import tasks
        assert "torch" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", code, folder], check=True)
