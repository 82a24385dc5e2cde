"""Leaves of the torch program: positions of tokens, cached vectors, attention."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from kvpolicy.dsl.execute.tensors.values import Frame, Value, filled, sent
from kvpolicy.dsl.ir import counts
from kvpolicy.dsl.ir.nodes import Node

# Leaves that hold no data of the model.


def position(node: Node, frame: Frame) -> Value:
    """Original positions."""
    return frame.present(Value(frame.places.double(), ("token",), finite=True))


def everything(node: Node, frame: Frame) -> Value:
    """Every candidate."""
    data = torch.ones(frame.tokens, dtype=torch.bool, device=frame.device)
    return frame.present(Value(data, ("token",), finite=True))


def newest(node: Node, frame: Frame) -> Value:
    """The tokens of this step: in the prefill all, in decode the last one."""
    if frame.step is None:
        return everything(node, frame)
    places = torch.arange(frame.tokens, device=frame.device)
    return frame.present(Value(places == frame.tokens - 1, ("token",), finite=True))


def size(node: Node, frame: Frame) -> Value:
    """`cached`, the entries of each KV head: the only size that the host does not know."""
    if frame.held_counts is None and frame.held_mask is not None:
        return Value(frame.held_mask.sum(-1, dtype=torch.float64), ("kv",), finite=True)
    number = frame.candidates()
    if isinstance(number.data, torch.Tensor):
        return Value(number.data.double(), number.axes, finite=True)
    data = torch.full((frame.kv,), float(number.data), dtype=torch.float64, device=frame.device)
    return Value(data, ("kv",), finite=True)


def head_table(node: Node, frame: Frame) -> Value:
    """What tensors of the model decide, for the KV heads of the layer or layers at hand."""
    if frame.layered:
        number = frame.kv // frame.heads.number(frame.bound.shape.kv_heads)
        return table_of_layers(node, range(frame.layer, frame.layer + number), frame)
    x, axes = table_of_layers(node, [frame.layer], frame), node.type.axes
    if "kv" in axes:
        return x.along("kv", lambda data, dim: data.narrow(dim, frame.kv_start, frame.kv))
    if x.mask is None:
        return Value(x.tensor[0], axes, finite=x.finite)
    return Value(x.tensor[0], axes, x.mask[0], axes, finite=x.finite)


def table_of_layers(node: Node, layers: Sequence[int], frame: Frame) -> Value:
    """A head table with the axis `kv`: the KV heads here of each of some layers."""
    shape, axes = frame.bound.shape, node.type.axes
    repeats = 1 if "kv" in axes else shape.kv_heads
    numbers = [x for layer in layers for x in node.head_table.layers[layer] * repeats]
    known = [0.0 if x is None else float(x) for x in numbers]
    sizes = [len(layers) * shape.kv_heads, *([shape.group] if "group" in axes else [])]
    axes = ("kv", *(axis for axis in axes if axis != "kv"))

    def part(values: Sequence[float | bool], kind: torch.dtype) -> torch.Tensor:
        x = torch.tensor(values, dtype=torch.float64).to(kind).view(sizes)
        return sent(frame.heads.part(x, 0), frame.device)

    data = part(known, torch.bool if node.type.kind == "truth" else torch.float64)
    finite = all(map(math.isfinite, known))
    if None not in numbers:
        return Value(data, axes, finite=finite)
    present = part([x is not None for x in numbers], torch.bool)
    return Value(data, axes, present, axes, finite=finite)


def distance(node: Node, frame: Frame) -> Value:
    """Position of the query minus position of the token."""
    _, queries = _queries(frame.window(node), frame)
    data = queries[:, None] - frame.places
    axes = ("query", "token")
    return frame.present(Value(data.double(), axes, data >= 0, axes, finite=True))


def uniform(node: Node, frame: Frame, _: Value) -> Value:
    """Counter-based random numbers per KV head, position and decode step."""
    seed = counts.seed(frame.number(node.args[0]))  # exact, also beyond what float64 holds
    first_head = frame.heads.first + frame.kv_start
    kv = torch.arange(first_head, first_head + frame.kv, device=frame.device)[:, None]
    step = 0 if frame.step is None else frame.step.generated
    data = counts.hashed(seed, frame.layer, kv, frame.places, step)
    return frame.present(Value(data.double() / 2.0**32, ("kv", "token"), finite=True))


# Data of the model.


def key(node: Node, frame: Frame) -> Value:
    """Keys in float64."""
    return _cached(frame.read("key"), frame)


def value(node: Node, frame: Frame) -> Value:
    """Values in float64."""
    return _cached(frame.read("value"), frame)


def _cached(vectors: torch.Tensor, frame: Frame) -> Value:
    data = vectors.double()
    frame.finite_checks.extend([data.sum()])
    return frame.present(Value(data, ("kv", "token", "dim"), finite=True))


def _queries(window: int, frame: Frame) -> tuple[slice, torch.Tensor]:
    """The window's queries that are computed now, as a slice from the end, and their positions."""
    rows = range(window)[frame.rows or slice(None)]
    window_slice = slice(rows.start - window, rows.stop - window or None)
    positions = frame.query_places
    return window_slice, positions[len(positions) - window :][frame.rows or slice(None)]


def _window_logits(node: Node, frame: Frame) -> tuple[torch.Tensor, torch.Tensor, tuple[str, ...]]:
    """q.k / sqrt(D), float64 [G, H/G, W, n]; the mask of present values, and its axes."""
    window = frame.window(node)
    keys, queries = frame.read("key"), frame.read("query")
    kv, tokens, size = keys.shape
    window_slice, positions = _queries(window, frame)
    q = queries[:, window_slice] if window else queries[:, :0]
    group, rows = q.shape[0] // kv, q.shape[1]
    q = q.double().reshape(kv, group * rows, size) * size**-0.5
    logits = torch.matmul(q, keys.double().transpose(1, 2)).view(kv, group, rows, tokens)
    seen = frame.places <= positions[:, None]
    if frame.held_mask is not None or frame.step is not None:
        if frame.held_mask is not None:
            seen = seen & frame.held_mask[:, None]
        axes = ("kv", "query", "token") if seen.ndim == 3 else ("query", "token")
        logits.masked_fill_(~(seen[:, None] if seen.ndim == 3 else seen), -math.inf)
        return logits, seen, axes
    # Only the window's own columns can lie after a query.
    logits[..., tokens - window :].masked_fill_(~seen[:, tokens - window :], -math.inf)
    return logits, seen, ("query", "token")


_ATTENTION_AXES = ("kv", "group", "query", "token")


def logits(node: Node, frame: Frame) -> Value:
    """Attention before the softmax."""
    data, seen, axes = _window_logits(node, frame)
    frame.finite_checks.extend([filled(Value(data, _ATTENTION_AXES, seen, axes), 0.0).sum()])
    return Value(data, _ATTENTION_AXES, seen, axes, finite=True)


def attn(node: Node, frame: Frame) -> Value:
    """Attention of the window's queries over all tokens."""
    data, seen, axes = _window_logits(node, frame)
    data = torch.softmax(data, dim=-1)
    # A NaN or infinity anywhere makes its whole row NaN.
    finite = data[..., :1].sum(-1).isfinite()
    if frame.step is not None:
        # An older query sees nothing where all entries before it have left.
        empty = ~seen.any(-1)
        empty = empty[:, None] if empty.ndim == 2 else empty
        finite = finite | empty
        data = data.masked_fill(empty[..., None], 0.0)
    frame.finite_checks.extend([finite.all()])
    return Value(data, _ATTENTION_AXES, seen, axes, zero_where_absent=True, finite=True)
