"""A small Llama: parameter names as in `transformers`' LlamaForCausalLM, tied embeddings.

Letters: L layers, B sequences, T tokens, H query heads, G KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """Sizes, under the names that `config.json` uses."""

    vocab_size: int = 512
    hidden_size: int = 128
    intermediate_size: int = 256
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    rope_theta: float = 500_000.0
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 4096

    def as_dict(self) -> dict:
        return asdict(self)


def rotary_frequencies(config: Config) -> Tensor:
    """Angle per position of each pair of dimensions, [D / 2], float32."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    return config.rope_theta**-exponent


def rotary_tables(config: Config, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [1 or B, 1, T, D] for positions [T] or [B, T]."""
    angles = positions.float()[..., None] * rotary_frequencies(config)
    angles = torch.cat([angles, angles], -1)
    angles = angles.view(-1, 1, *angles.shape[-2:])
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of x [B, heads, T, D], halves convention."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, H, T, D], keys and values [B, G, T, D]; the first two are rotated."""

        def heads(projected: Tensor) -> Tensor:
            return projected.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

        q, k, v = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def merge(self, per_head: Tensor) -> Tensor:
        """Heads [B, H, T, D] back to [B, T, hidden]."""
        return self.o_proj(per_head.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.project(x, cos, sin)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        return self.merge(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class Mlp(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = Mlp(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, attended: Tensor | float = 1.0
    ) -> Tensor:
        x = x + attended * self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)


class Llama(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config)

    def hidden(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        attended: Tensor | None = None,
        read: Tensor | None = None,
        layers: Collection[int] | None = None,
    ) -> Tensor:
        """Final hidden states [B, T, hidden] of ids [B, T]; positions [T] or [B, T].

        `attended` [L, B or 1] scales the attention of each layer. `read` [L, B or 1] scales what
        each layer adds to the final states; later layers see all of it. If `layers` is given, only
        these take part.
        """
        if positions is None:
            positions = torch.arange(ids.shape[1])
        cos, sin = rotary_tables(self.config, positions)
        x = self.model.embed_tokens(ids)
        unread = torch.zeros(())
        for index, layer in enumerate(self.model.layers):
            if layers is not None and index not in layers:
                continue
            before = x
            scale = 1.0 if attended is None else attended[index, :, None, None]
            x = layer(x, cos, sin, scale)
            if read is not None:
                unread = unread + (1 - read[index, :, None, None]) * (x - before)
        return self.model.norm(x - unread)

    def insert(self, index: int, layer: Layer) -> None:
        """Put `layer` before layer `index`."""
        self.model.layers.insert(index, layer)
        self.config = replace(self.config, num_hidden_layers=len(self.model.layers))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocabulary] of hidden states [..., hidden]."""
        return hidden @ self.model.embed_tokens.weight.t()
