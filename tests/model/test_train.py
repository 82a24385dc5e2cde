"""Training: runs start from nothing, and an interrupted run gives the same bits."""

import copy
import signal
import sys
from pathlib import Path

import evaluate
import export
import forked
import lessons
import listing
import measure
import numpy as np
import pytest
import structured_start
import tasks
import torch
import train
from kvpolicy.evaluation.questions import embedded
from model import Config, Llama
from optimizer import orthogonalize

STAGES = (train.Stage(32, 256, 3), train.Stage(64, 256, 3))
SMALL_STAGES = (train.Stage(64, 128, 4, retrieving=1), train.Stage(96, 192, 2))
LISTING_STAGES = (
    train.Stage(64, 128, 1, lessons.MIX),
    train.Stage(96, 192, 2, lessons.LISTING_MIX, listing=True, any_order=True),
    train.Stage(96, 192, 3, lessons.LISTING_MIX, listing=True, any_order=True),
)
SCRIPT = Path(train.__file__)


def interrupt_after(run, steps):
    """Lets Ctrl-C arrive during step number `steps`."""
    advance = run.advance

    def advance_and_interrupt():
        result = advance()
        if run.step == steps:
            signal.raise_signal(signal.SIGINT)
        return result

    run.advance = advance_and_interrupt


@pytest.mark.thorough(besides=["tiny"])
@pytest.mark.parametrize(
    ("stages", "recipe"),
    [(STAGES, train.TINY), (SMALL_STAGES, train.SMALL), (LISTING_STAGES, train.SMALL)],
    ids=["tiny", "small", "listing"],
)
def test_a_resumed_run_gives_the_same_bits(tmp_path, monkeypatch, stages, recipe):
    monkeypatch.setattr(listing, "SAMPLES", 1)
    whole = train.Run(stages, 3, recipe)
    assert train.train(whole, tmp_path / "whole.pt", every=100)

    first = train.Run(stages, 3, recipe)
    interrupt_after(first, 2)
    assert not train.train(first, tmp_path / "part.pt", every=100)
    assert first.step == 2
    second = train.Run(stages, 3, recipe)
    second.load(tmp_path / "part.pt")
    assert train.train(second, tmp_path / "part.pt", every=100)

    assert second.step == whole.step == 6
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, second.model.state_dict()[name]), name


def test_seeds_differ():
    first, second = (train.Run(STAGES, seed=seed).model.state_dict() for seed in (0, 1))
    assert not torch.equal(first["model.embed_tokens.weight"], second["model.embed_tokens.weight"])


def test_layers_that_take_no_part_keep_their_weights():
    run = train.Run((train.Stage(64, 128, 1, retrieving=1),), 3, train.SMALL)
    before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    run.advance()
    name = "model.layers.{}.self_attn.{}_proj.weight"
    moved = [
        layer
        for layer in range(6)
        if not torch.equal(
            before[name.format(layer, "o")], run.model.state_dict()[name.format(layer, "o")]
        )
    ]
    assert len(moved) == 3
    assert {0, 5} < set(moved)


def test_a_layer_that_is_not_read_is_seen_by_the_next():
    """The final states lack all that the last layer adds; of an earlier layer only its own part."""
    run = train.Run(SMALL_STAGES, 3, train.SMALL)
    ids = torch.from_numpy(train.SMALL.batch(1, 64, np.random.default_rng(0))[0])
    read = torch.ones(6, 1)
    read[1] = 0
    with torch.no_grad():
        model = run.model
        unread = model.hidden(ids, read=read)
        without = model.hidden(ids, layers=[0, 2, 3, 4, 5])
        last = model.hidden(ids, read=read, layers=[0, 1])
        torch.testing.assert_close(last, model.hidden(ids, layers=[0]))
        assert not torch.allclose(unread, without, atol=1e-3)
        assert not torch.allclose(unread, model.hidden(ids), atol=1e-3)


def test_a_sequence_with_few_answer_words_weighs_by_the_root():
    run = train.Run(SMALL_STAGES, 3, train.SMALL)
    asked = torch.zeros(2, 9, dtype=torch.bool)
    asked[0, :1] = asked[1, :4] = True
    weights = run.word_weights(asked)
    torch.testing.assert_close(weights, torch.tensor([2, 1, 1, 1, 1]) / 6)


def test_resume_refuses_another_plan_and_a_missing_state(tmp_path):
    train.Run(STAGES, seed=3).save(tmp_path / "state.pt")
    with pytest.raises(SystemExit, match="another plan or seed"):
        train.Run(STAGES, seed=4).load(tmp_path / "state.pt")
    with pytest.raises(SystemExit, match="does not exist; start without --resume"):
        train.Run(STAGES, seed=4).load(tmp_path / "other.pt")


@pytest.mark.thorough
def test_the_script_trains_from_nothing_and_writes_a_model(tmp_path):
    arguments = ["--out", f"{tmp_path}/model", "--state", f"{tmp_path}/state.pt"]
    command = [sys.executable, str(SCRIPT), *arguments, "--scale", "0.001"]
    result = forked.run(command, timeout=600)
    assert result.returncode == 0, result.stderr
    assert "5 steps" in result.stderr
    assert "single needle" in result.stdout
    written = export.read(tmp_path / "model").state_dict()
    trained = torch.load(tmp_path / "state.pt", weights_only=True)["model"]
    for name, tensor in trained.items():
        torch.testing.assert_close(written[name], tensor, atol=1e-3, rtol=1e-3)


def test_the_start_looks_back_and_matches():
    """Before any training, both retrieval layers attend to the answer's first word."""
    model = Llama(Config())
    structured_start.start(model, seed=0)
    attention = []
    for sample in evaluate.questions("mk", 128, 8, seed=0):
        caches, _ = evaluate.prefill(model, sample.prompt_ids)
        value = sample.needles[0][0] + embedded.FACT_LENGTH - 1 - embedded.VALUE_WORDS
        attention.append([cache.attention[:, -1, value] for cache in caches])
    mean = torch.stack([torch.stack(layers) for layers in attention]).mean(0)
    even = 1 / 128
    assert mean[1].max() > 20 * even
    assert mean[2].max() > 5 * even
    assert mean[0].max() < 2 * even


def test_each_retrieval_layer_of_the_small_start_matches_alone():
    model = Llama(train.SMALL.config)
    structured_start.start(model, 0, structured_start.SMALL)
    samples = evaluate.questions("mk", 128, 8, seed=0)
    layers = list(model.model.layers)
    for index in structured_start.SMALL:
        model.model.layers = torch.nn.ModuleList([layers[0], layers[index]])
        attention = []
        for sample in samples:
            caches, _ = evaluate.prefill(model, sample.prompt_ids)
            value = sample.needles[0][0] + embedded.FACT_LENGTH - 1 - embedded.VALUE_WORDS
            attention.append(caches[1].attention[:, -1, value])
        assert torch.stack(attention).mean(0).max() > 10 / 128


def test_the_listing_layer_stands_before_the_last_and_has_optimizers(monkeypatch):
    monkeypatch.setattr(listing, "SAMPLES", 1)
    run = train.Run(LISTING_STAGES, 3, train.SMALL)
    run.advance()
    before = list(run.model.model.layers)
    run.advance()
    after = list(run.model.model.layers)
    assert (len(before), len(after)) == (6, 7)
    assert after[:5] == before[:5]
    assert after[6] is before[5]
    assert run.model.config.num_hidden_layers == 7
    name = "model.layers.5.self_attn.o_proj.weight"
    weight = run.model.state_dict()[name].clone()
    run.advance()
    assert not torch.equal(run.model.state_dict()[name], weight)


def test_lessons_without_commas_are_not_mixed_into_the_listing_stages(monkeypatch):
    monkeypatch.setattr(listing, "SAMPLES", 1)
    monkeypatch.setattr(train, "SHORTER_SHARE", 1.0)
    run = train.Run(LISTING_STAGES, 3, train.SMALL)
    drawn = []
    monkeypatch.setattr(lessons, "lesson", lambda kind, *_: drawn.append(kind) or tasks.Lesson())
    for run.step in range(1, 6):
        run.next_batch()
    assert set(drawn) <= set(lessons.LISTING_MIX)
    assert drawn


def test_any_word_yet_to_be_listed_costs_nothing(monkeypatch):
    """The loss of a list does not depend on the order of its words."""
    run = train.Run((train.Stage(64, 64, 9, {"cwe": 1.0}, any_order=True),), 3, train.SMALL)
    ids, is_answer = lessons.batch(1, 64, np.random.default_rng(0), {"cwe": 1.0})
    first = int(np.flatnonzero(is_answer)[0])
    words = run.right_words(torch.from_numpy(ids), torch.from_numpy(is_answer))[0]
    assert set(words[first].tolist()) == set(ids[0, first : first + 9 : 2].tolist())
    assert set(words[first + 1].tolist()) == {embedded.COMMA, -1}


def test_the_listing_layer_changes_little_and_looks_at_what_was_said(model, monkeypatch):
    """Put into the trained model-tiny, before any training with it."""
    monkeypatch.setattr(listing, "SAMPLES", 6)
    grown = copy.deepcopy(model)
    listing.put_in(grown, len(grown.model.layers) - 1, seed=0)
    samples = measure.questions("mk", 128, 20, seed=1)
    assert measure.right_count(grown, samples) >= measure.right_count(model, samples) - 1
    looked = []
    for sample in measure.questions("cwe", 128, 6, seed=1):
        ids = sample.prompt_ids + sample.answer_ids
        caches, _ = evaluate.prefill(grown, ids)
        said = len(sample.prompt_ids)
        # At the comma after the first word; heads 1 and 3 leave out.
        looked.append(caches[-2].attention[1::2, said + 1, said].mean())
    assert torch.stack(looked).mean() > 10 / len(ids)


def test_orthogonalize():
    stack = torch.randn(3, 16, 48, generator=torch.Generator().manual_seed(0))
    for x in (stack, stack.transpose(1, 2)):
        singular = torch.linalg.svdvals(orthogonalize(x))
        assert singular.min() > 0.5
        assert singular.max() < 1.5
