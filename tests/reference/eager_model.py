"""A model of any class of transformers, layer by layer in float64; attention is passed in.

The computation is transformers' own and shares no code with SGLang, `sglang_ext` or `kernels`. It
is slow, and meant for small checkpoints.

Dimensions: H query heads, G KV heads, N cached tokens, T new tokens, D head size, C hidden size,
R rotated dimensions.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from kvpolicy.dsl.ir.nodes import ModelShape
from torch import Tensor

# From queries [H, T, D], keys and values [G, T, D] to the attention output [H, T, D].
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
GIVEN = "given"  # transformers' name of the attention that is passed in


class Model:
    """The model of one checkpoint.

    Args:
        folder: checkpoint, as `save_pretrained` writes it, with or without rotary embeddings.

    Attributes:
        order: int64 [D]: order of a head's dimensions in which attention gets queries and keys.
        frequencies: float64 [D / 2]: angle per position by which dimensions i and i + D / 2 in
            that order rotate; 0 for those that do not.
    """

    def __init__(self, folder: str) -> None:
        from transformers import AttentionInterface, AutoModelForCausalLM

        AttentionInterface.register(GIVEN, _given)
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation=GIVEN, experts_implementation="eager"
        ).eval()
        self._base = self._model.base_model
        self._layers = self._base.layers
        self._stand_in = _StandIn()
        self._base.layers = torch.nn.ModuleList([self._stand_in])
        config = self._model.config
        heads = config.num_attention_heads
        self.shape = ModelShape(
            layers=config.num_hidden_layers,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        )
        self.order, self.frequencies = self._rotation()

    def _rotation(self) -> tuple[Tensor, Tensor]:
        """`order` and `frequencies`: dimensions i and i + D / 2 of the order rotate together.

        Models pair dimensions differently, and some rotate only the first R: the others form pairs
        of frequency 0. Scores and distances are the same in any order.
        """
        size = self.shape.head_dim
        turns = getattr(self._base, "rotary_emb", None)
        inverse = torch.zeros(0) if turns is None else turns.inv_freq.detach().cpu()
        rotated = 2 * len(inverse)
        first = torch.zeros(0, dtype=torch.long)
        second = first
        if rotated:
            halves = sys.modules[type(self._base).__module__].rotate_half
            partner = halves(torch.arange(1, rotated + 1))  # -(j + 1) at i: (i, j) rotate together
            first = (partner < 0).nonzero()[:, 0]
            second = -partner[first] - 1
        rest = torch.arange(rotated, size)
        first, second = torch.cat([first, rest[::2]]), torch.cat([second, rest[1::2]])
        return torch.cat([first, second]), torch.cat(
            [inverse.double(), torch.zeros(size // 2 - len(inverse), dtype=torch.float64)]
        )

    @torch.no_grad()
    def embed(self, ids: Tensor) -> Tensor:
        """Hidden states [T, C] before the first layer, from token ids [T]."""
        self._stand_in.returned = None
        self._base(input_ids=ids[None], use_cache=False)
        return self._stand_in.entered[0]

    @torch.no_grad()
    def layer(self, number: int, x: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Hidden states [T, C] after a layer.

        Args:
            x: hidden states [T, C] before the layer.
            positions: int64 [T].
            attention: gets queries, keys and values after their norms and rotations, rounded to
                float32, as a server caches and a policy sees them. Queries are scaled so that
                softmax(q k / sqrt(D)) is the model's attention.
        """
        layer = self._layers[number]
        scale = math.sqrt(self.shape.head_dim)

        def given(q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
            q = q[..., self.order] * (scaling * scale)
            return attention(q.float(), k[..., self.order].float(), v.float())

        layer.self_attn.given = given
        embeddings = self._base.rotary_emb(x[None], positions[None])
        after = layer(
            x[None],
            attention_mask=None,
            position_ids=positions[None],
            position_embeddings=embeddings,
            past_key_values=None,
            use_cache=False,
        )
        return (after[0] if isinstance(after, tuple) else after)[0]

    @torch.no_grad()
    def final(self, x: Tensor) -> Tensor:
        """Input [T, C] of the output head, from the last layer's hidden states [T, C]."""
        return self._through(self._base, x).last_hidden_state[0]

    @torch.no_grad()
    def logits(self, x: Tensor) -> Tensor:
        """Logits [T, vocabulary] of the last layer's hidden states [T, C]."""
        return self._through(self._model, x).logits[0]

    def _through(self, model: torch.nn.Module, x: Tensor) -> Any:
        self._stand_in.returned = x[None]
        return model(input_ids=torch.zeros((1, x.shape[0]), dtype=torch.long), use_cache=False)


class _StandIn(torch.nn.Module):
    """Replaces a model's layers: notes its input and returns `returned`, or else its input."""

    entered: Tensor
    returned: Tensor | None = None

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        self.entered = x
        return x if self.returned is None else self.returned


def _given(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """An attention function for transformers: output [1, T, H, D] of queries [1, H, T, D]."""
    return module.given(q[0], k[0], v[0], scaling).transpose(0, 1)[None].to(q.dtype), None


@lru_cache(maxsize=4)
def checkpoint(folder: str) -> Model:
    """The model of a folder, read once."""
    return Model(folder)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention [H, T, D] of the last T of N tokens: q [H, T, D], k and v [G, N, D]."""
    group = q.shape[0] // k.shape[0]
    k, v = (x.double().repeat_interleave(group, 0) for x in (k, v))
    logits = q.double() @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
    later = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).triu(k.shape[1] - q.shape[1] + 1)
    return logits.masked_fill(later, -math.inf).softmax(-1) @ v
