"""Models with random weights for the tests of the runtime."""

import json
import os
import sys
from pathlib import Path

import forked
import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(Path(__file__).parent)]

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


@pytest.fixture
def unregistered():
    """Removes the Prometheus series that a test has exported."""
    from prometheus_client import REGISTRY

    before = set(REGISTRY._collector_to_names)
    yield
    for each in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(each)


@pytest.fixture(scope="session")
def model(checkpoint):
    """Folder of a Llama checkpoint with random weights and the words w0 to w511."""
    return checkpoint("llama")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A function from a model type to the folder of a checkpoint with random weights.

    It has 4 layers, 4 heads and by default 2 KV heads of 32. Weights are large enough that
    attention is far from uniform and greedy answers depend on the kept entries.
    """
    folders = {}

    def checkpoint(kind, kv_heads=2):
        if (kind, kv_heads) not in folders:
            folder = _make(tmp_path_factory.mktemp(kind), kind, kv_heads)
            folders[kind, kv_heads] = str(folder)
        return folders[kind, kv_heads]

    return checkpoint


def _make(folder, kind, kv_heads):
    torch = pytest.importorskip("torch", reason="the runtime needs torch")
    pytest.importorskip("sglang", reason="SGLang is an extra; authors check policies without it")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(512)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w2")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind,
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=32,
        max_position_embeddings=2048,
        initializer_range=0.2,
        eos_token_id=2,
    )
    if kind == "mistral":
        config.sliding_window = None
    made = AutoModelForCausalLM.from_config(config)
    if kind != "llama":  # untrained biases are zero and untrained norms are one
        for name, weight in made.named_parameters():
            if name.endswith("bias") or "norm" in name:
                torch.nn.init.normal_(weight, mean=float("norm" in name), std=0.3)
    made.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def scenario(model, tmp_path_factory):
    """A function that runs a scenario of a file in its own process and returns its results."""

    def run(file, name, env=None, folder=None, **flags):
        out = tmp_path_factory.mktemp("scenario") / "out.json"
        script, folder = Path(__file__).with_name(file), folder or model
        paths = os.pathsep.join([str(script.parent), str(script.parents[1])])
        done = forked.run(
            [sys.executable, "-P", str(script), name, str(out), folder, json.dumps(flags)],
            timeout=600,
            env={**os.environ, **(env or {}), "PYTHONPATH": paths},
        )
        assert out.exists(), (done.stdout + done.stderr)[-5000:]
        return json.loads(out.read_text())

    return run
