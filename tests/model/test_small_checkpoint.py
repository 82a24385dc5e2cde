"""The larger checkpoint: loadable by transformers, as accurate as its MODEL.md says, spread out."""

import export
import measure
import more_tasks
import pytest
import torch


@pytest.fixture(scope="module")
def folder(model_folder):
    return model_folder.parent / "model-small"


@pytest.fixture(scope="module")
def small(folder):
    return export.read(folder)


def test_folder_is_under_5_mb(folder):
    assert sum(file.stat().st_size for file in folder.iterdir()) < 5_000_000


def test_tokenizer_is_that_of_the_tiny_model(folder, model_folder):
    name = "tokenizer.json"
    assert (folder / name).read_bytes() == (model_folder / name).read_bytes()


def test_transformers_gives_the_same_logits(folder, small):
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    assert reference.dtype == torch.float32
    ids = torch.tensor([measure.questions("kv", 300, 1, seed=0)[0].prompt_ids])
    with torch.no_grad():
        ours, theirs = small.logits(small.hidden(ids)), reference(ids).logits
    torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=1e-4)


@pytest.mark.thorough(every=5)
@pytest.mark.parametrize(
    ("task", "length", "least"),
    [
        ("niah", 512, 0.95),
        ("distractors", 512, 0.9),
        ("mk", 512, 0.9),
        ("mq", 512, 0.85),
        ("vt", 512, 0.85),
        ("kv", 512, 0.6),
        ("mv", 512, 0.55),
        ("cwe", 512, 0.6),
        ("fwe", 512, 0.4),
    ],
)
def test_accuracy(small, task, length, least):
    samples = measure.questions(task, length, 24, seed=1)
    assert measure.right_count(small, samples) >= least * len(samples)


@pytest.mark.parametrize(("task", "least"), [("mv", 0.8), ("cwe", 0.85), ("fwe", 0.75)])
def test_most_items_of_a_list_are_named(small, task, least):
    samples = measure.questions(task, 256, 24, seed=1)
    said = measure.answers(small, samples)
    named = [more_tasks.share(s, a) for s, a in zip(samples, said, strict=True)]
    assert sum(named) >= least * len(samples)


@pytest.mark.parametrize("task", ["mk", "vt"])
def test_several_layers_look_at_the_answer(small, task):
    looks = measure.looks(small, measure.questions(task, 256, 6, seed=1))
    assert (looks.amax(1) > 0.3).sum() >= 4
