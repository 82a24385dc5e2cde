"""Models and options with which the servers of the GPU benchmarks start.

A model is the name of a configuration, which gets random weights, or a checkpoint's folder;
`NAME@2` is the configuration with two layers.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
from dataclasses import dataclass
from pathlib import Path

import report

_DENSE = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    # Prompts of 131,072 tokens and answers; the weights are random, so no position is trained.
    "max_position_embeddings": 133_120,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
CONFIGURATIONS = {
    "llama-3.1-8b": {
        **_DENSE,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    "qwen3-8b": {
        **_DENSE,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    },
}
EMBEDDED = str(report.ROOT / "examples" / "model-tiny")
# For SGLang without FlashAttention 3, which it takes on an H100 or H200 unless told otherwise.
WITHOUT_FA3: dict[str, object] = {
    "attention_backend": "flashinfer",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_flashinfer_autotune": True,
}
# SGLang loads only the plugins named here; without the variable, all. `cpu_torch`, if installed,
# lets it run without a GPU.
NO_PLUGIN = {"SGLANG_PLUGINS": "cpu_torch"}


@dataclass(frozen=True)
class Model:
    """A model to serve.

    Attributes:
        name: name in reports.
        folder: folder with config.json.
        flags: server options for its weights; empty for a checkpoint.
        highest: bound of token ids in random prompts, exclusive.
    """

    name: str
    folder: Path
    flags: dict[str, object]
    highest: int

    @property
    def words(self) -> str:
        """The model in words, for reports."""
        return f"{self.name}, random weights" if self.flags else self.name


def model_of(name: str, folder: Path) -> Model:
    """The model of that name; config.json of a configuration is written into the folder.

    Raises:
        SystemExit: there is no such configuration or checkpoint.
    """
    known, _, layers = name.partition("@")
    flags: dict[str, object] = {}
    if known in CONFIGURATIONS:
        config = CONFIGURATIONS[known]
        if layers:
            config = {**config, "num_hidden_layers": int(layers)}
        place = folder / name
        place.mkdir(exist_ok=True)
        (place / "config.json").write_text(json.dumps(config), encoding="utf-8")
        flags["load_format"] = "dummy"
    else:
        place = Path(name)
        if not (place / "config.json").exists():
            names = ", ".join(CONFIGURATIONS)
            raise SystemExit(f"--model: {name} is neither a checkpoint's folder nor one of {names}")
        config = json.loads((place / "config.json").read_text(encoding="utf-8"))
        name = place.resolve().name
    return Model(name, place, flags, min(config["vocab_size"] - 12, 100_000))


def gpu_flags(at_once: int) -> dict[str, object]:
    """Server options on a GPU: stock defaults instead of those of tests, `at_once` requests."""
    return {
        "attention_backend": None,
        "dtype": None,
        "disable_cuda_graph": None,
        "max_running_requests": at_once,
        "cuda_graph_max_bs_decode": at_once,
        **({} if has_fa3() else WITHOUT_FA3),
    }


def has_fa3() -> bool:
    """Whether the installed kernels of SGLang include FlashAttention 3."""
    found = importlib.util.find_spec("sgl_kernel")
    places = (found and found.submodule_search_locations) or ()
    return any(True for place in places for _ in Path(place).rglob("flash_ops*"))


def flags_of(text: str) -> dict[str, object]:
    """`--a b --c` -> {"a": "b", "c": True}."""
    made: dict[str, object] = {}
    name = None
    for word in shlex.split(text):
        if word.startswith("--"):
            name = word[2:].replace("-", "_")
            made[name] = True
        elif name is None:
            raise SystemExit(f"--server-args: `{word}` follows no option")
        else:
            made[name] = word
    return made
