"""Small checkpoints with random weights, one per architecture used in production."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from methods import METHODS, PROPAGATING

SUPPORTED = Path(__file__).parents[2] / "docs" / "supported.md"
SLOTS = ("streamingllm", "cam")  # methods that rotate keys
TOKENS_LEAVE = (*PROPAGATING, "gemfilter")  # between layers, or before a second prefill
SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
NO_WINDOW = {"sliding_window": None}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
HALF = {"partial_rotary_factor": 0.5}
GRANITE = {"embedding_multiplier": 3.0, "attention_multiplier": 0.125, "residual_multiplier": 0.5}


def rope(kind: str, **values: Any) -> dict[str, Any]:
    """The part of a config that scales its rotary embedding."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


def group(heads: int, kv_heads: int) -> dict[str, Any]:
    """The part of a config that sets the numbers of query heads, of size 16, and KV heads."""
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return {**sizes, "hidden_size": 16 * heads}


LLAMA3 = rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=32)
# Name -> (transformers' model type, changes to `SMALL`).
SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "apertus": ("apertus", LLAMA3),
    "arcee": ("arcee", {}),
    "cohere": ("cohere", {}),
    "ernie-4.5": ("ernie4_5", {}),
    # SGLang computes this class with exact GELU, transformers by default with an approximation.
    "gemma": ("gemma", {**group(4, 1), "hidden_act": "gelu_python"}),
    "glm-4": ("glm4", HALF),
    "glm-4-moe": ("glm4_moe", {**HALF, **EXPERTS, "n_routed_experts": 4, "use_qk_norm": True}),
    "granite": ("granite", {**GRANITE, "logits_scaling": 2.0}),
    "llama-biases-tied": (
        "llama",
        {**group(6, 2), "attention_bias": True, "tie_word_embeddings": True},
    ),
    "llama-linear": ("llama", rope("linear", factor=4.0)),
    "llama-llama3": ("llama", {**LLAMA3, **group(5, 1)}),
    "llama-yarn": ("llama", {**YARN, **group(7, 1)}),
    "mistral": ("mistral", {**NO_WINDOW, "head_dim": 32}),
    "mixtral": ("mixtral", {**NO_WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmo-2": ("olmo2", {}),
    "phi-3": ("phi3", {**HALF, **NO_WINDOW}),
    "qwen2": ("qwen2", group(4, 4)),
    "qwen3": ("qwen3", group(8, 1)),
    "qwen3-moe": ("qwen3_moe", {**EXPERTS, **group(6, 1), "num_experts": 4}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 1, 1, 0, 1]}),
    "stablelm": ("stablelm", {**group(4, 2), "partial_rotary_factor": 0.25}),
    "starcoder2": ("starcoder2", NO_WINDOW),
}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", {}),
    "cohere-2": ("cohere2", {"sliding_window": 32}),
    "deepseek-v3": ("deepseek_v3", {}),
    "falcon-h1": ("falcon_h1", {}),
    "gemma-2": ("gemma2", {"sliding_window": 32, "hidden_act": "gelu_pytorch_tanh"}),
    "gemma-3": ("gemma3_text", {"sliding_window": 32}),
    "gpt-oss": ("gpt_oss", {"sliding_window": 32}),
    "llama-4": ("llama4_text", {}),
    "qwen3-next": ("qwen3_next", {}),
}


def rows(title: str) -> dict[str, list[str]]:
    """Rows of a table in docs/supported.md, by their first column."""
    table = SUPPORTED.read_text(encoding="utf-8").split(f"\n| {title} |")[1].split("\n\n")[0]
    cells = [[x.strip(" `") for x in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    return {first: rest for first, *rest in cells}


def served_with(name: str) -> list[str]:
    """Methods that an architecture is served with, by its row in docs/supported.md."""
    *_, propagates, slots = rows("model")[name]
    without = {*(TOKENS_LEAVE if propagates == "no" else ()), *(SLOTS if slots == "no" else ())}
    return [method for method in METHODS if method not in without]


def config_of(name: str) -> Any:
    """The config of an architecture, with the name of its class."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, AutoConfig

    kind, changes = {**SERVED, **REFUSED}[name]
    config = AutoConfig.for_model(kind, **{**SMALL, **changes})
    classes = MODEL_MAPPING if kind == "bert" else MODEL_FOR_CAUSAL_LM_MAPPING
    config.architectures = [classes[type(config)].__name__]
    config.dtype = "float32"
    return config


def make(name: str, folder: Path) -> str:
    """Saves a checkpoint whose greedy answers depend on every kept entry; returns the folder."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(name))
    # Untrained biases are zero and untrained norms change nothing.
    for part, weight in model.named_parameters():
        if part.endswith("bias") or "norm" in part:
            weight.data += 0.3 * torch.randn(weight.shape)
    model.save_pretrained(folder)
    return str(folder)
