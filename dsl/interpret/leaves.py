"""Leaves of expressions: positions of tokens, cached vectors, attention, states.

Dimensions: H query heads, G KV heads, M candidates of a layer, T queries, D head size.
"""

from __future__ import annotations

import math

import numpy as np
from kvpolicy.dsl.data.arrays import Array
from kvpolicy.dsl.interpret.values import Values, name_of
from kvpolicy.dsl.ir import counts
from kvpolicy.dsl.ir.nodes import Node


def _of_each_head(e: Values, x: Array, layer: int) -> Array:
    """A value; per token, each KV head has its own where they hold different entries."""
    alike = "token" not in x.axes or "kv" in x.axes or not e.layers[layer].ragged
    return x if alike else e.spread(x, ("kv", *x.axes), layer)


def _per_token(e: Values, data: np.ndarray, layer: int) -> Array:
    return _of_each_head(e, Array.of(("token",), data), layer)


def position(e: Values, node: Node, layer: int) -> Array:
    return _per_token(e, e.layers[layer].positions, layer)


def everything(e: Values, node: Node, layer: int) -> Array:
    return _per_token(e, np.ones(e.candidates(layer), dtype=np.bool_), layer)


def newest(e: Values, node: Node, layer: int) -> Array:
    """All tokens of the prompt; in decode the last entry."""
    data = np.ones(e.candidates(layer), dtype=np.bool_)
    if e.generated:
        data[:-1] = False
    return _per_token(e, data, layer)


def size(e: Values, node: Node, layer: int) -> Array:
    """`cached`; all other sizes the host knows."""
    return Array.of(("kv",), e.layers[layer].held.sum(-1))


def key(e: Values, node: Node, layer: int) -> Array:
    return Array.of(("kv", "token", "dim"), e.layers[layer].keys)


def value(e: Values, node: Node, layer: int) -> Array:
    return Array.of(("kv", "token", "dim"), e.layers[layer].values)


def _window(e: Values, node: Node, layer: int) -> int:
    """Number of last queries that `attn`, `logits` or `distance` reads."""
    return e.asking(str(node.value), node.args[0] if node.args else None, layer)


def distance(e: Values, node: Node, layer: int) -> Array:
    entries, window = e.layers[layer], _window(e, node, layer)
    queries = entries.query_positions[len(entries.query_positions) - window :]
    distances = queries[:, None] - entries.positions
    x = Array.of(("query", "token"), distances, distances >= 0)
    if not entries.ragged:
        return x
    shape = (e.kv, *distances.shape)
    data, present = (np.broadcast_to(part, shape) for part in (x.data, x.present))
    return Array.of(("kv", "query", "token"), data, present)


def logits(e: Values, node: Node, layer: int) -> Array:
    """q.k / sqrt(D), absent where the token comes after the query."""
    entries, window = e.layers[layer], _window(e, node, layer)
    heads, total, width = entries.queries.shape
    q = entries.queries[:, total - window :].astype(np.float64)
    q = q.reshape(e.kv, heads // e.kv, window, width)
    data = np.einsum("grwd,gnd->grwn", q, entries.keys.astype(np.float64)) / math.sqrt(width)
    seen = entries.query_positions[total - window :, None] >= entries.positions
    present = seen & entries.held[:, None, None]
    return Array.of(("kv", "group", "query", "token"), data, np.broadcast_to(present, data.shape))


def attn(e: Values, node: Node, layer: int) -> Array:
    scores = logits(e, node, layer)
    data = np.where(scores.present, scores.data, -np.inf)
    highest = data.max(-1, keepdims=True, initial=-np.inf)
    weights = np.exp(data - np.where(np.isfinite(highest), highest, 0.0))
    total = weights.sum(-1, keepdims=True)
    return Array.of(scores.axes, weights / np.where(total > 0, total, 1.0), scores.present)


def uniform(e: Values, node: Node, layer: int) -> Array:
    seed = counts.seed(e.number(node.args[0], layer))
    kv, token = np.arange(e.kv)[:, None], e.layers[layer].positions
    numbers = counts.hashed(seed, layer, kv, token, e.generated or 0)
    return Array.of(("kv", "token"), numbers / 2.0**32)


def state(e: Values, node: Node, layer: int) -> Array:
    """Before this step inside its own `next`, after it elsewhere."""
    name = name_of(node)
    x = e.before(name, layer) if name == e.updating else e.state(name, layer)
    return _of_each_head(e, x, layer)


def data(e: Values, node: Node, layer: int) -> Array:
    """A tensor that comes with the model."""
    tensor = e.bound.tensors[name_of(node)]
    sizes = {"kv": e.kv, "group": e.bound.shape.group}
    numbers = np.array(tensor.layers[layer], np.float64)
    return Array.of(tensor.axes, numbers.reshape([sizes[axis] for axis in tensor.axes]))


def decided(e: Values, node: Node, layer: int) -> Array:
    assert e.decided is not None  # a leaf of the rules of decode
    return e.decided(name_of(node), layer)
