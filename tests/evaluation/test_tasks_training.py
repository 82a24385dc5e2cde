"""The embedded tasks equal those that the training code measures, word by word."""

import sys
from pathlib import Path

import numpy as np
import pytest
from kvpolicy.evaluation.questions import catalog
from kvpolicy.evaluation.questions.embedded import END, UNK, to_text

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "train"))
import more_tasks


@pytest.mark.parametrize("length", [64, 200, 512, 2048])
@pytest.mark.parametrize("task", more_tasks.TITLES)
def test_equal_seeds_give_equal_prompts(task, length):
    for index in range(10):
        rng = np.random.default_rng([3, index])
        trained = more_tasks.sample(task, length, rng)
        asked = catalog.sample(task, form="embedded", length=length, index=index, seed=3, count=len)
        turn = asked.turns[0]
        assert asked.context + turn.prompt == trained.text
        assert turn.reference.strip() == trained.answer_text
        starts = [len(to_text(trained.prompt_ids[1:start])) for start, _ in trained.needles]
        assert [start for start, _ in asked.asked] == [at + 1 if at else 0 for at in starts]


@pytest.mark.parametrize("task", more_tasks.TITLES)
def test_an_answer_that_training_calls_right_scores_1(task):
    for index in range(10):
        rng = np.random.default_rng([0, index])
        trained = more_tasks.sample(task, 512, rng)
        turn = catalog.sample(
            task, form="embedded", length=512, index=index, seed=0, count=len
        ).turns[0]
        answer = trained.answer_ids
        assert turn.judge(to_text([*answer, END, *answer])) == 1
        assert len(answer) + 1 == turn.most_tokens
        # One wrong word costs: all of a single answer, its share of a list.
        for at in range(len(answer)):
            spoiled = [*answer[:at], UNK, *answer[at + 1 :]]
            score = turn.judge(to_text(spoiled))
            given = task == "vt" and at == 0
            assert score == 1 if given else score <= 1 - 1 / len(turn.expected)
            assert more_tasks.right(trained, spoiled) is False
