"""The measurements: greedy generation with a cache, intervals, attention on the answer's words."""

import evaluate
import measure
import more_tasks
import pytest
import tasks
import torch
from kvpolicy.evaluation.questions import embedded


@pytest.fixture(scope="module")
def samples():
    return measure.questions("mk", 128, 6, seed=3)


def test_generation_takes_the_best_token_each_time(model, samples):
    prompts = torch.tensor([sample.prompt_ids for sample in samples])
    said = measure.generate(model, prompts, 20)
    assert (said == embedded.END).any(1).all()
    assert said.shape[1] < 20
    with torch.no_grad():
        for step in range(said.shape[1]):
            ids = torch.cat([prompts, said[:, :step]], 1)
            best = model.logits(model.hidden(ids)[:, -1]).argmax(-1)
            assert torch.equal(said[:, step], best)


def test_right_answers_are_those_of_the_one_pass_check(model):
    """On questions some of which the model gets wrong."""
    samples = measure.questions("mq", 1536, 6, seed=0)
    right = measure.right_count(model, samples)
    assert right / 6 == pytest.approx(evaluate.accuracy(model, samples)[1])
    assert 0 < right < 6


def test_looks_counts_the_word_in_the_statement_asked_for(model, samples):
    """Compared with attention read directly, for the three words of one answer."""
    sample = samples[0]
    caches, _ = evaluate.prefill(model, sample.prompt_ids + sample.answer_ids)
    start = sample.needles[0][0] + 4
    last = len(sample.prompt_ids) - 1
    assert len(set(sample.answer_ids)) == 3
    mean = sum(caches[1].attention[:, last + i, start + i] for i in range(3)) / 3
    looks = measure.looks(model, [sample])
    assert looks.shape == (4, 4)
    torch.testing.assert_close(looks[1], mean)


def test_a_layer_left_out_adds_nothing(model, samples):
    ids = torch.tensor([samples[0].prompt_ids])
    with torch.no_grad():
        changed = measure.without(model, [1, 3])
        skipped = model.hidden(ids, attended=torch.tensor([[1.0], [0.0], [1.0], [0.0]]))
        torch.testing.assert_close(changed.hidden(ids), skipped)
        assert not torch.allclose(changed.hidden(ids), model.hidden(ids), atol=1e-2)


def test_left_out_report(model):
    table = measure.left_out_report(model, 64, 2).splitlines()
    assert [row.split("|")[1].strip() for row in table[2:]] == [
        "none",
        "1",
        "2",
        "3",
        "1, 2",
        "1, 2, 3",
        "2, 3",
    ]


def test_lists_are_reported_with_the_share_that_was_named(model):
    """model-tiny names no list; an answer with one item of three counts a third."""
    samples = measure.questions("fwe", 64, 2, seed=0)
    assert measure.cell(model, samples).startswith("0 (0-66); ")
    assert ";" not in measure.cell(model, measure.questions("mk", 64, 2, seed=0))


def test_report_has_a_row_per_task(model):
    table = measure.report(model, (64,), 2).splitlines()
    assert len(table) == 2 + len(more_tasks.TITLES)
    assert all(f"(`{name}`)" in row for name, row in zip(more_tasks.TITLES, table[2:], strict=True))
    assert tasks.TASKS["niah"].title in table[2]
