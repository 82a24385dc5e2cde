"""Training: runs from nothing, and an interrupted run gives the same bits."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import evaluate
import export
import pytest
import structured_start
import tasks
import torch
import train
from model import Config, Llama
from optimizer import orthogonalize

STAGES = (train.Stage(32, 256, 3), train.Stage(64, 256, 3))
SCRIPT = Path(train.__file__)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def interrupt_after(run, steps):
    """Let Ctrl-C arrive while the step number `steps` runs."""
    advance = run.advance

    def advance_and_interrupt():
        result = advance()
        if run.step == steps:
            signal.raise_signal(signal.SIGINT)
        return result

    run.advance = advance_and_interrupt


def test_a_resumed_run_gives_the_same_bits(tmp_path):
    whole = train.Run(STAGES, seed=3)
    assert train.train(whole, tmp_path / "whole.pt", every=100)

    first = train.Run(STAGES, seed=3)
    interrupt_after(first, 2)
    assert not train.train(first, tmp_path / "part.pt", every=100)
    assert first.step == 2
    second = train.Run(STAGES, seed=3)
    second.load(tmp_path / "part.pt")
    assert train.train(second, tmp_path / "part.pt", every=100)

    assert second.step == whole.step == 6
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, second.model.state_dict()[name]), name


def test_seeds_differ():
    first, second = (train.Run(STAGES, seed=seed).model.state_dict() for seed in (0, 1))
    assert not torch.equal(first["model.embed_tokens.weight"], second["model.embed_tokens.weight"])


def test_resume_refuses_another_plan_and_a_missing_state(tmp_path):
    train.Run(STAGES, seed=3).save(tmp_path / "state.pt")
    with pytest.raises(SystemExit, match="another plan or seed"):
        train.Run(STAGES, seed=4).load(tmp_path / "state.pt")
    with pytest.raises(SystemExit, match="does not exist; start without --resume"):
        train.Run(STAGES, seed=4).load(tmp_path / "other.pt")


def test_the_script_trains_from_nothing_and_writes_a_model(tmp_path):
    arguments = ["--out", tmp_path / "model", "--state", tmp_path / "state.pt", "--scale", "0.001"]
    result = subprocess.run(
        [sys.executable, SCRIPT, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    assert "5 steps" in result.stderr
    assert "single needle" in result.stdout
    written = export.read(tmp_path / "model").state_dict()
    trained = torch.load(tmp_path / "state.pt", weights_only=True)["model"]
    for name, tensor in trained.items():
        torch.testing.assert_close(written[name], tensor, atol=1e-3, rtol=1e-3)


def test_the_start_looks_back_and_matches():
    """Before any training, both retrieval layers look at the answer's first word."""
    model = Llama(Config())
    structured_start.start(model, seed=0)
    attention = []
    for sample in evaluate.questions("mk", 128, 8, seed=0):
        caches, _ = evaluate.prefill(model, sample.prompt_ids)
        value = sample.needles[0][0] + tasks.FACT_LENGTH - 1 - tasks.VALUE_WORDS
        attention.append([cache.attention[:, -1, value] for cache in caches])
    mean = torch.stack([torch.stack(layers) for layers in attention]).mean(0)
    even = 1 / 128
    assert mean[1].max() > 20 * even
    assert mean[2].max() > 5 * even
    assert mean[0].max() < 2 * even


def test_orthogonalize():
    stack = torch.randn(3, 16, 48, generator=torch.Generator().manual_seed(0))
    for x in (stack, stack.transpose(1, 2)):
        singular = torch.linalg.svdvals(orthogonalize(x))
        assert singular.min() > 0.5
        assert singular.max() < 1.5
