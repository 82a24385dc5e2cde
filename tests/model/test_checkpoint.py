"""The checkpoint in the tree: small, loadable by transformers, and as accurate as MODEL.md says."""

import evaluate
import numpy as np
import pytest
import tasks
import torch
from kvpolicy.evaluation.questions import embedded


@pytest.fixture(scope="module")
def reference(model_folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_folder, local_files_only=True).eval()


def test_folder_is_under_4_mb(model_folder):
    assert sum(file.stat().st_size for file in model_folder.iterdir()) < 4_000_000


def test_transformers_gives_the_same_logits(model, reference):
    assert reference.dtype == torch.float32
    ids = torch.tensor([tasks.sample("mk", 300, np.random.default_rng(0)).prompt_ids])
    with torch.no_grad():
        ours, theirs = model.logits(model.hidden(ids)), reference(ids).logits
    torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=1e-4)


def test_generation_stops_after_the_answer(reference):
    sample = tasks.sample("niah", 256, np.random.default_rng(0))
    ids = torch.tensor([sample.prompt_ids])
    out = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=10)
    assert out[0, len(sample.prompt_ids) :].tolist() == [*sample.answer_ids, embedded.END]


@pytest.mark.thorough(every=4)
@pytest.mark.parametrize(
    ("task", "length", "least"),
    [("niah", 512, 0.97), ("distractors", 512, 0.94), ("mk", 512, 0.94), ("niah", 1024, 0.9)],
)
def test_accuracy(model, task, length, least):
    right, stops = evaluate.accuracy(model, evaluate.questions(task, length, 50, seed=1))
    assert right >= least
    assert stops >= least


def test_one_pass_accuracy_is_greedy_decoding(model):
    samples = evaluate.questions("mk", 1024, 8, seed=2)
    kept = [torch.ones(2, 1024, dtype=torch.bool)] * 4
    for sample in samples:
        caches, token = evaluate.prefill(model, sample.prompt_ids)
        generated = [token]
        while len(generated) < embedded.VALUE_WORDS:
            generated.append(evaluate.decode(model, generated, caches, kept)[-1])
        right, _ = evaluate.accuracy(model, [sample])
        assert (generated == sample.answer_ids) == bool(right)


@pytest.mark.thorough(besides=["niah"])
@pytest.mark.parametrize("task", ["niah", "mk"])
def test_an_eighth_of_the_cache_is_enough_when_it_is_the_right_eighth(model, task):
    samples = evaluate.questions(task, 512, 30, seed=1)
    right = evaluate.compressed_accuracy(model, samples, 0.125, evaluate.METHODS)
    assert right["attended"] >= right["all"] - 0.04
    assert right["sinks and recent"] < 0.5
