"""Makes the plain model importable by its tests, and models to compare with."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))


@pytest.fixture(scope="session")
def random_model(tmp_path_factory):
    """Folder of a Llama checkpoint with random weights: 5 layers, 4 heads, 2 KV heads of 16.

    The weights are large enough that greedy answers depend on every entry that is kept.
    """
    pytest.importorskip("sglang", reason="SGLang is an extra; authors check policies without it")
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("random")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        initializer_range=0.2,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def embedded():
    """Folder of the model in this repository."""
    pytest.importorskip("torch", reason="the plain model needs torch")
    pytest.importorskip("safetensors", reason="checkpoints are read with safetensors")
    return str(ROOT / "examples" / "model-tiny")


@pytest.fixture
def serve(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """`scenario.run`, with an output file in the test's folder."""
    import scenario

    return partial(scenario.run, tmp_path / "out.json")
