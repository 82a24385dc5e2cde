"""Starting weights that already look back and match, so that training takes minutes, not days.

From random weights a transformer of this size needs many millions of tokens before it forms the
two-step circuit that retrieval needs (induction heads: Olsson et al. 2022, arXiv:2209.11895). Here
the circuit is written in as a rough start; training does the rest.

- Layer 0: query head h < 4 looks back h + 1 tokens and writes the word it finds into its own
  subspace, so that every position knows the words before it.
- The retrieval layers: one KV head finds the place where the current word occurred before
  (induction), another the place that follows the same *two* words (a fact's key); both copy the
  word found there. The layers use different KV heads for these roles.
- All other output projections start at zero.

Letters: H query heads, G KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from model import Config, Llama, rotary_frequencies
from torch import Tensor

LOOK_BACK_GAIN = 0.8
LOOK_BACK_PAIRS = 5
LOOK_BACK_HEADS = 4
EMBEDDING_SCALE = 0.57
MATCH_GAIN = 2.5
KEY_GAIN = 3.0


@dataclass(frozen=True)
class Roles:
    """The KV heads of a retrieval layer that match a two-word key and a single word."""

    match: int
    induction: int


TINY = {1: Roles(1, 0), 2: Roles(0, 1)}
SMALL = {1: Roles(0, 1), 2: Roles(2, 3), 3: Roles(1, 0), 4: Roles(3, 2)}


class Basis:
    """Random directions that all layers use.

    `common` [hidden] is part of every embedding; `words` [hidden - 1, hidden] are orthonormal rows
    orthogonal to it (a word's content); `look_back[h]` [D, hidden] are the rows of the subspace
    into which head h of layer 0 writes.
    """

    def __init__(self, config: Config, generator: torch.Generator) -> None:
        hidden, size = config.hidden_size, config.head_dim
        self.common = torch.nn.functional.normalize(gauss(generator, hidden), dim=0)
        frame = gauss(generator, hidden, hidden)
        frame[:, 0] = self.common
        self.words = torch.linalg.qr(frame)[0].t()[1:]
        written = torch.linalg.qr(gauss(generator, hidden, hidden))[0]
        self.look_back = [written[:, h * size : (h + 1) * size].t() for h in range(LOOK_BACK_HEADS)]


def gauss(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator)


@torch.no_grad()
def start(model: Llama, seed: int, roles: Mapping[int, Roles] = TINY) -> None:
    """Set all weights of `model`; `roles` has the retrieval layers.

    Raises:
        ValueError: the model lacks these layers, or has fewer than 4 query heads or a hidden size
            below 4 D.
    """
    config = model.config
    if (
        config.num_attention_heads < LOOK_BACK_HEADS
        or config.hidden_size < LOOK_BACK_HEADS * config.head_dim
        or len(model.model.layers) <= max(roles)
    ):
        raise ValueError(
            f"the structured start needs {LOOK_BACK_HEADS} query heads, a hidden size of as many "
            f"heads, and more than {max(roles)} layers"
        )
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.copy_(gauss(generator, *parameter.shape) * parameter.shape[1] ** -0.5)
    basis = Basis(config, generator)
    embed(model, basis, generator)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    look_back(model, basis)
    for index, layer_roles in roles.items():
        retrieve(model, index, basis, layer_roles)


def embed(model: Llama, basis: Basis, generator: torch.Generator) -> None:
    """Set embeddings: the common direction plus random unit vectors orthogonal to it."""
    table = gauss(generator, *model.model.embed_tokens.weight.shape)
    table -= (table @ basis.common)[:, None] * basis.common
    table = torch.nn.functional.normalize(table, dim=1)
    model.model.embed_tokens.weight.copy_(EMBEDDING_SCALE * (table + basis.common))


def look_back(model: Llama, basis: Basis) -> None:
    """Set layer 0: keys are equal, and head h's query is the key turned back h + 1 positions."""
    config, attention = model.config, model.model.layers[0].self_attn
    size, frequencies = config.head_dim, rotary_frequencies(config)
    # The fast pairs of dimensions tell neighbouring positions apart.
    pairs = torch.arange(LOOK_BACK_PAIRS)
    attention.q_proj.weight.mul_(0.1)
    attention.k_proj.weight.mul_(0.1)
    group = config.num_attention_heads // config.num_key_value_heads
    for g in range(LOOK_BACK_HEADS // group):
        attention.k_proj.weight[g * size + pairs] += LOOK_BACK_GAIN * basis.common
        attention.v_proj.weight[g * size : (g + 1) * size] = basis.words[:size]
    for h in range(LOOK_BACK_HEADS):
        angle = (h + 1) * frequencies[:LOOK_BACK_PAIRS, None]
        first, second = h * size + pairs, h * size + size // 2 + pairs
        attention.q_proj.weight[first] += LOOK_BACK_GAIN * angle.cos() * basis.common
        attention.q_proj.weight[second] -= LOOK_BACK_GAIN * angle.sin() * basis.common
        attention.o_proj.weight[:, h * size : (h + 1) * size] = 0.1 * basis.look_back[h].t()


def retrieve(model: Llama, index: int, basis: Basis, roles: Roles) -> None:
    """Set one retrieval layer; only the heads with a role write."""
    config, attention = model.config, model.model.layers[index].self_attn
    size, match, induction = config.head_dim, roles.match, roles.induction
    group = config.num_attention_heads // config.num_key_value_heads
    # Slow pairs of dimensions hardly rotate with distance, so they compare content.
    slow = torch.cat([torch.arange(size // 4, size // 2), torch.arange(3 * size // 4, size)])
    near, far = slow.view(2, 2, -1).unbind(1)
    near, far = near.flatten(), far.flatten()
    half = len(near)
    one, two, three = basis.look_back[:3]
    query, key = attention.q_proj.weight, attention.k_proj.weight
    query.mul_(0.2)
    key.mul_(0.2)
    # Induction: the word before a position is the current word.
    key[induction * size + slow] += MATCH_GAIN * one[: len(slow)]
    query[induction * group * size + slow] += MATCH_GAIN * basis.words[: len(slow)]
    # At `answer`, the two words before are the key; in the fact these are 2 and 3 words before
    # the first word of the value.
    key[match * size + near] += KEY_GAIN * two[:half]
    key[match * size + far] += KEY_GAIN * three[:half]
    query[match * group * size + near] += KEY_GAIN * one[:half]
    query[match * group * size + far] += KEY_GAIN * two[:half]
    for g in sorted((match, induction)):
        rows = torch.arange(size * (g + 1), size * (g + 2)) % len(basis.words)
        read = basis.words[rows]
        attention.v_proj.weight[g * size : (g + 1) * size] = read
        for h in range(g * group, (g + 1) * group):
            attention.o_proj.weight[:, h * size : (h + 1) * size] = 0.2 * read.t()
