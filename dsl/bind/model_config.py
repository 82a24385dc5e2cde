"""The sizes of a model, from its `config.json` (Hugging Face format)."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvpolicy.dsl.bind.work import SOFTMAX, Work
from kvpolicy.dsl.ir.nodes import ModelShape
from kvpolicy.dsl.syntax.diagnostics import did_you_mean, refused, why

# Llama 3.1 8B, where a model is needed and none is given.
USUAL = ModelShape(layers=32, heads=32, kv_heads=8, head_dim=128)
_VOCABULARY = 128_256  # where a config does not say it
# Other keys under which a config may give a size.
_KEYS = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "multi_query_group_num"),
    "hidden_size": ("n_embd", "d_model"),
    "intermediate_size": ("n_inner", "ffn_hidden_size", "ffn_dim"),
    "vocab_size": ("padded_vocab_size",),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("moe_k", "moe_topk"),
    "n_shared_experts": ("num_shared_experts", "moe_num_shared_experts", "num_shared_expert"),
}
# Model types whose MLPs have no gate; prefixes of those that tie embedding and head by default.
_NO_GATE = (
    "apertus", "arcee", "bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "nemotron", "opt",
    "phi", "starcoder2",
)  # fmt: skip
_TIED = ("cohere", "gemma", "gpt2", "gpt_bigcode", "opt", "starcoder2")
# Bits of a weight by `quant_method` or `quant_algo` of `quantization_config`, where that says none.
_QUANTIZED = {"fp8": 8, "fbgemm_fp8": 8, "mxfp4": 4, "nvfp4": 4, "int8": 8}
# Models with sliding windows whose configs may not list the layers.
_WINDOWED = ("cohere2", "gemma2", "gemma3", "gpt_oss")
_BYTES = {"bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


@dataclass(frozen=True)
class ModelConfig:
    """What `explain` and `diff` need to know of a model.

    Attributes:
        name: the folder or file that it was read from.
        hidden, used_mlp_width: widths of the residual stream and of the MLP (for a mixture of
            experts: summed over the experts that one token uses).
        total_mlp_width: that width summed over all experts of a layer; without a mixture, the same.
        embeddings: weights of the embedding and of the output head, counted once if tied.
        vocabulary: number of tokens.
        dtype: as SGLang serves it by default.
        element_bytes: bytes of one number of the cache, the activations and the embeddings.
        weight_bytes: bytes of one number of the layers' matrices; fewer if they are quantized.
        matrices: number of matrices of an MLP: 3 with a gate, else 2.
        unserved: why no policy is served with the model; empty if one may be.
    """

    name: str
    shape: ModelShape
    hidden: int
    used_mlp_width: int
    total_mlp_width: int
    embeddings: int
    vocabulary: int
    dtype: str
    element_bytes: int
    weight_bytes: float
    matrices: int = 3
    unserved: str = ""

    @property
    def _attention(self) -> int:
        """Number of weights of a layer's attention projections."""
        heads, kv = self.shape.heads, self.shape.kv_heads
        return self.hidden * (2 * heads + 2 * kv) * self.shape.head_dim

    def _used(self) -> int:
        """Number of weights of a layer that one token is multiplied by."""
        return self._attention + self.matrices * self.hidden * self.used_mlp_width

    def _read(self, tokens: int) -> float:
        """Expected number of weights of a layer that tokens read, each with random experts."""
        missed = (1 - self.used_mlp_width / self.total_mlp_width) ** tokens
        return self._attention + self.matrices * self.hidden * self.total_mlp_width * (1 - missed)

    @property
    def weights_size(self) -> int:
        """Bytes of all weights."""
        layer = self._attention + self.matrices * self.hidden * self.total_mlp_width
        matrices = self.weight_bytes * self.shape.layers * layer
        return int(matrices) + self.element_bytes * self.embeddings

    def layer_work(self, tokens: int) -> Work:
        """Work of a layer of a prefill: matrices, causal attention, weights read once."""
        pairs = self.shape.heads * tokens * (tokens + 1) / 2
        return Work(
            matrix=2.0 * tokens * self._used() + 4.0 * self.shape.head_dim * pairs,
            vector=SOFTMAX * pairs,
            moved=float(self._read(tokens) * self.weight_bytes),
        )

    def prefill_work(self, tokens: int) -> Work:
        """Work of all layers of a prefill."""
        return sum((self.layer_work(tokens) for _ in range(self.shape.layers)), Work())

    def decode_work(self, requests: int, entries: float) -> Work:
        """Work of a decode step: weights read once, and the entries of every request.

        Args:
            requests: B.
            entries: entries of one request, summed over layers and KV heads.
        """
        shape, head = self.shape, self.hidden * self.vocabulary
        pairs = requests * entries * shape.group
        return Work(
            matrix=2.0 * requests * (shape.layers * self._used() + head)
            + 4.0 * shape.head_dim * pairs,
            vector=SOFTMAX * pairs,
            moved=self.weight_bytes * shape.layers * self._read(requests)
            + self.element_bytes * head
            + requests * entries * self.kv_size(1),
        )

    def kv_size(self, entries: int) -> int:
        """Bytes of `entries` entries, each a key and a value of one layer and KV head."""
        return entries * 2 * self.shape.head_dim * self.element_bytes


def read_config(path: str | Path) -> ModelConfig:
    """A model's sizes.

    Args:
        path: a `config.json` or its folder.

    Raises:
        PolicyError: the file cannot be used.
    """
    file = Path(path)
    file = file / "config.json" if os.path.isdir(file) else file
    try:
        config = json.loads(file.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise refused(str(file), "file", "there is no such file") from None
    except OSError as error:
        raise refused(str(file), "file", why(error, "cannot be read")) from None
    except (ValueError, RecursionError):
        raise refused(str(file), "file", "this is not JSON") from None
    if not isinstance(config, dict):
        raise refused(str(file), "file", "a model's config is a JSON object")
    name = file.parent.name if file.name == "config.json" else file.stem
    return replace(config_of(str(file), config), name=name or "model")


def config_of(name: str, values: Mapping[str, Any]) -> ModelConfig:
    """A model's sizes, from the values of its `config.json`.

    Args:
        name: of the model, for messages.
        values: by key, also as transformers' `PretrainedConfig.to_dict()` gives them.

    Raises:
        PolicyError: a size is missing, or is not accepted.
    """
    text = values.get("text_config")
    config = text if isinstance(text, Mapping) else values
    heads = _size(name, config, "num_attention_heads")
    hidden = _size(name, config, "hidden_size")
    shape = ModelShape(
        layers=_size(name, config, "num_hidden_layers"),
        heads=heads,
        kv_heads=_kv_heads(name, config, heads),
        head_dim=_size(name, config, "head_dim", max(1, hidden // heads)),
    )
    if shape.heads % shape.kv_heads:
        message = f"{shape.heads} heads cannot share {shape.kv_heads} KV heads"
        raise refused(name, "file", message)
    used, experts = _widths(name, config, _size(name, config, "intermediate_size", 4 * hidden))
    vocabulary = _size(name, config, "vocab_size", _VOCABULARY)
    kind = str(config.get("model_type", ""))
    tied = config.get("tie_word_embeddings", kind.startswith(_TIED))
    embeddings = hidden * vocabulary * (1 if tied is True else 2)
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    dtype = dtype.removeprefix("torch.")
    if dtype == "float32":  # SGLang serves these as float16, unless given `--dtype`
        dtype = "float16"
    element_bytes = _BYTES.get(dtype, 2)
    return ModelConfig(
        name, shape, hidden, used, experts, embeddings, vocabulary, dtype, element_bytes,
        min(element_bytes, _weight_bits(values, config) / 8), matrices=2 if kind in _NO_GATE else 3,
        unserved=_unserved(config),
    )  # fmt: skip


def _weight_bits(values: Mapping[str, Any], config: Mapping[str, Any]) -> float:
    """Bits of a weight of the layers, as quantized; infinite if they are not, or that is unknown.

    Scales and layers that are left as they are do not count.
    """
    quantized = values.get("quantization_config") or config.get("quantization_config")
    if not isinstance(quantized, Mapping):
        return math.inf
    groups = quantized.get("config_groups")  # of compressed-tensors and ModelOpt
    parts = [quantized, *(groups.values() if isinstance(groups, Mapping) else ())]
    parts += [part["weights"] for part in parts if isinstance(part, Mapping) and "weights" in part]
    found = [
        part[key]
        for part in parts
        if isinstance(part, Mapping)
        for key in ("bits", "num_bits", "w_bit", "weight_bits")
        if type(part.get(key)) is int and 1 <= part[key] <= 16
    ]
    if not found:
        names = (str(quantized.get(key, "")).lower() for key in ("quant_algo", "quant_method"))
        found = [_QUANTIZED[name] for name in names if name in _QUANTIZED][:1]
    if not found:
        loads = (4, "load_in_4bit"), (8, "load_in_8bit")
        found = [bits for bits, key in loads if quantized.get(key) is True]
    return min(found, default=math.inf)


def _unserved(config: Mapping[str, Any]) -> str:
    """Why no policy is served with a model, as far as its config says it; empty if one may be."""
    if config.get("kv_lora_rank") is not None:
        return "the model has latent attention (MLA), whose entries are not keys and values"
    kinds = config.get("layer_types")
    others = [str(x) for x in kinds if x != "full_attention"] if isinstance(kinds, list) else []
    if any("linear" in kind or "mamba" in kind for kind in others):
        return "the model has recurrent layers, whose state has no entries"
    windowed = str(config.get("model_type", "")).startswith(_WINDOWED)
    if others or (windowed and config.get("sliding_window") is not None):
        return "the model has sliding-window layers, which free keys outside the window already"
    return ""


def _kv_heads(name: str, config: Mapping[str, Any], heads: int) -> int:
    """Number of KV heads; 1 with `multi_query` (Falcon, GPTBigCode), whatever else is given."""
    if config.get("multi_query") is True and config.get("new_decoder_architecture") is not True:
        return 1
    return _size(name, config, "num_key_value_heads", heads)


def _widths(name: str, config: Mapping[str, Any], mlp: int) -> tuple[int, int]:
    """Widths of a layer's MLP, summed over the experts that one token uses and over all experts.

    Args:
        mlp: width of an MLP without experts.
    """
    total, per_token = _given(config, "num_experts"), _given(config, "num_experts_per_tok")
    # Dense models of a class that may have experts give 0.
    if total == 0 or per_token == 0 or (total is None and per_token is None):
        return mlp, mlp
    width = _size(name, config, "moe_intermediate_size", mlp)
    used = _size(name, config, "num_experts_per_tok", 1)
    experts = max(used, _size(name, config, "num_experts", used))
    shared = config.get("shared_expert_intermediate_size") or 0
    if not shared and _given(config, "n_shared_experts"):
        shared = width * _size(name, config, "n_shared_experts")
    return width * used + shared, width * experts + shared


def _given(config: Mapping[str, Any], key: str) -> Any:
    """The value of a size under its key or another one of `_KEYS`; None: not given."""
    names = (key, *_KEYS.get(key, ()))
    return next((config[name] for name in names if config.get(name) is not None), None)


def _size(name: str, config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = _given(config, key)
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        value = max(value)  # one per layer
    if value is None:
        value = default
    if value is None:
        help_ = did_you_mean(key, config) or "is this the config.json of a language model?"
        raise refused(name, "file", f"the key `{key}` is missing", help_)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 10**7:
        raise refused(name, "file", f"`{key}` is {value!r}; it is a positive whole number")
    return value
