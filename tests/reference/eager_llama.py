"""A plain Llama, Mistral, Qwen2 or Qwen3, one tensor operation after the other, in float64.

Independent of everything that is served: it reads `config.json` and `model.safetensors` itself and
shares no code with `sglang_ext`, `kernels` or `examples`. Slow, and meant for small checkpoints.

Dimensions: H query heads, G KV heads, N cached tokens, T new tokens, D head size, C hidden size.
"""

from __future__ import annotations

import json
import math
from functools import lru_cache
from pathlib import Path

import torch
from kvpolicy.dsl.ir.nodes import ModelShape
from safetensors.torch import load_file
from torch import Tensor


class Llama:
    """The weights of one checkpoint.

    Args:
        folder: of such a checkpoint in one file, with plain RoPE.
    """

    def __init__(self, folder: str | Path) -> None:
        config = json.loads((Path(folder) / "config.json").read_text())
        stored = load_file(Path(folder) / "model.safetensors")
        self.weights = {name: tensor.double() for name, tensor in stored.items()}
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        self.shape = ModelShape(
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
        )
        self.epsilon = config["rms_norm_eps"]
        base = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
        pairs = torch.arange(0, self.shape.head_dim, 2, dtype=torch.float64)
        self.frequencies = base ** -(pairs / self.shape.head_dim)  # [D / 2]

    def embed(self, ids: Tensor) -> Tensor:
        """Hidden states [T, C] that enter the first layer, of token ids [T]."""
        return self.weights["model.embed_tokens.weight"][ids]

    def project(self, layer: int, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [H, T, D], keys and values [G, T, D] of hidden states [T, C], after RoPE.

        They are rounded to float32, which is what a server caches and a policy sees.
        """
        x = self.normed(x, f"model.layers.{layer}.input_layernorm")

        def heads(name: str) -> Tensor:
            prefix = f"model.layers.{layer}.self_attn.{name}"
            projected = x @ self.weights[f"{prefix}.weight"].T
            projected = projected + self.weights.get(f"{prefix}.bias", 0)
            parts = projected.unflatten(-1, (-1, self.shape.head_dim))
            norm = f"{prefix[:-5]}_norm"  # of q_proj: q_norm
            if f"{norm}.weight" in self.weights:
                parts = self.normed(parts, norm)
            return parts.transpose(0, 1)

        angles = positions.double()[:, None] * self.frequencies
        q, k = rotate(heads("q_proj"), angles), rotate(heads("k_proj"), angles)
        return q.float(), k.float(), heads("v_proj").float()

    def leave(self, layer: int, x: Tensor, attended: Tensor) -> Tensor:
        """Hidden states [T, C] after the layer; `attended` [H, T, D] is what attention read."""
        prefix = f"model.layers.{layer}"
        joined = attended.transpose(0, 1).flatten(1)
        x = x + joined @ self.weights[f"{prefix}.self_attn.o_proj.weight"].T
        y = self.normed(x, f"{prefix}.post_attention_layernorm")
        gate = torch.nn.functional.silu(y @ self.weights[f"{prefix}.mlp.gate_proj.weight"].T)
        up = y @ self.weights[f"{prefix}.mlp.up_proj.weight"].T
        return x + (gate * up) @ self.weights[f"{prefix}.mlp.down_proj.weight"].T

    def logits(self, x: Tensor) -> Tensor:
        """Logits [T, vocabulary] of the last layer's hidden states [T, C]."""
        embedding = self.weights["model.embed_tokens.weight"]
        return self.normed(x, "model.norm") @ self.weights.get("lm_head.weight", embedding).T

    def normed(self, x: Tensor, name: str) -> Tensor:
        size = x.pow(2).mean(-1, keepdim=True) + self.epsilon
        return x * torch.rsqrt(size) * self.weights[f"{name}.weight"]


@lru_cache(maxsize=4)
def checkpoint(folder: str) -> Llama:
    """The model of a folder, read once."""
    return Llama(folder)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """x [..., T, D] with dimensions i and i + D / 2 rotated by angles [..., T, D / 2]."""
    first, second = x.double().chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention [H, T, D] of the last T of N tokens: q [H, T, D], k and v [G, N, D]."""
    group = q.shape[0] // k.shape[0]
    k, v = (x.double().repeat_interleave(group, 0) for x in (k, v))
    logits = q.double() @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
    later = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).triu(k.shape[1] - q.shape[1] + 1)
    return logits.masked_fill(later, -math.inf).softmax(-1) @ v
