"""A further layer for a trained model: it counts words, and leaves out words already said.

Without it, the trained model lists one of several right answers twice, as it does not know what it
has said. The layer is inserted before the last one, with weights that already do the work. Linear
probes (ridge regression on the states of the trained model) find words in lists, words said in an
answer, places where an answer counts or continues, and the word at a place. They give

- counting heads: in an answer that counts, they attend evenly to all words of the context, so that
  a word is written as strongly as it is frequent;
- leaving-out heads: where an answer continues, they attend to the words said in it and write them
  with a negative sign; elsewhere they attend to the first token, which has no effect.

Letters: N tokens of all sequences together, C hidden size, V value words, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import more_tasks
import numpy as np
import torch
from kvpolicy.evaluation.questions.embedded import ANSWER, BOS, COMMA, IS, VALUES
from model import Layer, Llama, rotary_tables
from tasks import Sample
from torch import Tensor

PROBED = ("mv", "cwe", "fwe", "mq", "mk", "kv", "vt")
PROBED_LENGTHS = (128, 384)
SAMPLES = 24
RIDGE = 1.0
# Weights of rare tokens in a regression: those asked for, those said, the first.
ASKED_WEIGHT, SAID_WEIGHT, FIRST_WEIGHT = 10.0, 20.0, 300.0
COUNT_GAIN, SAID_GAIN = 30.0, 150.0
COUNT_SINK, SAID_SINK = 5.0, 6.0
WRITTEN = 1000.0
NOISE = 0.02


@dataclass
class Tokens:
    """States [N, C], ids [N], and marks of tokens [N], 0 or 1; see `marked`."""

    states: Tensor
    ids: Tensor
    in_context: Tensor
    said: Tensor
    counts: Tensor
    goes_on: Tensor
    asked: Tensor


@torch.no_grad()
def put_in(model: Llama, index: int, seed: int) -> None:
    """Insert the layer before layer `index` of `model`."""
    tokens = read_samples(model, index, np.random.default_rng([seed, index]))
    layer = Layer(model.config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        if parameter.dim() == 2:
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(drawn * parameter.shape[1] ** -0.5)
    layer.mlp.down_proj.weight.zero_()
    look(layer, tokens)
    write(layer, tokens, model.model.embed_tokens.weight)
    model.insert(index, layer)


def read_samples(model: Llama, depth: int, rng: np.random.Generator) -> Tokens:
    """States after the first `depth` layers for questions of all kinds, answers included."""
    states, marks = [], []
    for length in PROBED_LENGTHS:
        for task in PROBED:
            for _ in range(SAMPLES):
                sample = more_tasks.sample(task, length, rng)
                ids = torch.tensor(sample.prompt_ids + sample.answer_ids)
                states.append(normalized_states(model, ids, depth))
                marks.append(torch.stack([ids, *marked(sample)]))
    ids, *others = torch.cat(marks, 1)
    return Tokens(torch.cat(states), ids, *(mark.float() for mark in others))


def normalized_states(model: Llama, ids: Tensor, depth: int) -> Tensor:
    """Input [T, C] of layer `depth` for ids [T], after a norm with weights of one."""
    x = model.model.embed_tokens(ids[None])
    cos, sin = rotary_tables(model.config, torch.arange(len(ids)))
    for layer in list(model.model.layers)[:depth]:
        x = layer(x, cos, sin)
    return x[0] * torch.rsqrt(x[0].square().mean(-1, keepdim=True) + model.config.rms_norm_eps)


def marked(sample: Sample) -> Tensor:
    """The marks of `Tokens`, in their order, for prompt and answer of a sample: [5, T]."""
    ids = sample.prompt_ids + sample.answer_ids
    first = len(sample.prompt_ids)
    in_context, said, counts, goes_on, asked = torch.zeros(5, len(ids), dtype=torch.long)
    asked[first - 1 :] = 1
    listed = sample.task in ("mv", "mq", "cwe", "fwe")
    for at, token in enumerate(ids):
        if token in VALUES and (at < first or not listed):
            in_context[at] = 1
        elif token in VALUES:
            said[at] = ids[at - 1] in (COMMA, ANSWER, IS)
        elif at >= first - 1 and sample.task in ("cwe", "fwe"):
            counts[at], goes_on[at] = 1, token == COMMA
        elif at >= first and listed:
            goes_on[at] = token == IS
    return torch.stack([in_context, said, counts, goes_on, asked])


def probe(tokens: Tensor, target: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    """Weights [C, ...] of the ridge regression of `target` [N, ...] on states [N, C]."""
    weighted = (tokens.t() * weight) @ tokens + RIDGE * torch.eye(tokens.shape[1])
    return torch.linalg.solve(weighted, (tokens.t() * weight) @ target)


def look(layer: Layer, tokens: Tokens) -> None:
    """Set queries and keys: a KV head's first query head counts, the second leaves out."""
    states, attention = tokens.states, layer.self_attn
    size = attention.config.head_dim
    # The slowest pairs hardly rotate: 14 is for the first token, 15 and its partner for words.
    sink, place, said = size // 2 - 2, size // 2 - 1, size - 1
    is_first = (tokens.ids == BOS).float()
    first = probe(states, is_first, 1 + FIRST_WEIGHT * is_first)
    everywhere = probe(states, torch.ones(len(states)))
    asked = 1 + ASKED_WEIGHT * tokens.asked
    counts, goes_on = (probe(states, mark, asked) for mark in (tokens.counts, tokens.goes_on))
    query, key = attention.q_proj.weight, attention.k_proj.weight
    query.mul_(NOISE)
    key.mul_(NOISE)
    for g in range(attention.config.num_key_value_heads):
        at, counting, leaving = g * size, 2 * g * size, (2 * g + 1) * size
        key[at + sink] = first
        key[at + place] = probe(states, 2 * tokens.in_context - 1)
        key[at + said] = probe(states, tokens.said, 1 + SAID_WEIGHT * tokens.said)
        query[counting + sink] = COUNT_SINK * size**0.5 * everywhere
        query[leaving + sink] = SAID_SINK * size**0.5 * everywhere
        query[counting + place] = COUNT_GAIN * counts
        query[leaving + said] = SAID_GAIN * goes_on
        balance(query, key, at, (counting, leaving), (sink, place, said))


def balance(
    query: Tensor, key: Tensor, at: int, heads: tuple[int, int], places: tuple[int, ...]
) -> None:
    """Give queries and keys equal norms, as Muon's absolute steps would soon drown the smaller."""
    for place in places:
        asking = max(query[head + place].norm() for head in heads)
        factor = (asking / key[at + place].norm()) ** 0.5
        key[at + place] *= factor
        for head in heads:
            query[head + place] /= factor


def write(layer: Layer, tokens: Tokens, embeddings: Tensor) -> None:
    """Set values and outputs: from a word's state to a vector that raises only its logit."""
    attention = layer.self_attn
    size = attention.config.head_dim
    is_word = tokens.in_context + tokens.said > 0
    target = torch.zeros(len(tokens.ids), len(VALUES))
    target[is_word, tokens.ids[is_word] - VALUES.start] = 1
    words = embeddings[VALUES.start : VALUES.stop]
    others = torch.cat([embeddings[: VALUES.start], embeddings[VALUES.stop :]])
    grams = words.t() @ words + 0.3 * others.t() @ others
    raising = torch.linalg.solve(grams + 1e-3 * torch.eye(len(grams)), words.t())
    left, strength, right = torch.linalg.svd(probe(tokens.states, target) @ raising.t())
    # As in `balance`, the strength is split evenly.
    root = (WRITTEN * strength).sqrt()
    read, written = left * root, root[:, None] * right
    for g in range(attention.config.num_key_value_heads):
        part = slice(g * size, (g + 1) * size)
        attention.v_proj.weight[part] = read.t()[part]
        outputs = attention.o_proj.weight[:, 2 * g * size : 2 * (g + 1) * size]
        outputs[:, :size] = written[part].t()
        outputs[:, size:] = -written[part].t()
