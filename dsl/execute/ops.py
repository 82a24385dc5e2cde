"""The operations of the torch program by name, and those that read the model's tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from kvpolicy.dsl.execute import along as torch_along
from kvpolicy.dsl.execute import pool as torch_pool
from kvpolicy.dsl.execute import select as torch_select
from kvpolicy.dsl.execute.elementwise import (
    at_least,
    at_most,
    binary,
    choose,
    compare,
    divide,
    elementwise,
    logic,
    mask,
    reduce,
    repeated,
)
from kvpolicy.dsl.execute.values import Frame, Value, filled, snapped
from kvpolicy.dsl.ir import counts
from kvpolicy.dsl.ir.nodes import Node
from kvpolicy.dsl.ops.operations import Kind

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
    if frame.generated is None:
        return everything(node, frame)
    places = torch.arange(frame.tokens, device=frame.device)
    return frame.present(Value(places == frame.tokens - 1, ("token",), finite=True))


def size(node: Node, frame: Frame) -> Value:
    """The one size that the host does not know: entries of each KV head."""
    number = frame.candidates()
    if isinstance(number.data, torch.Tensor):
        return Value(number.data.double(), number.axes, finite=True)
    data = torch.full((frame.kv,), float(number.data), dtype=torch.float64, device=frame.device)
    return Value(data, ("kv",), finite=True)


def distance(node: Node, frame: Frame) -> Value:
    """Position of the query minus position of the token."""
    _, queries = _queries(frame.window(node), frame)
    data = queries[:, None] - frame.places
    axes = ("query", "token")
    return frame.present(Value(data.double(), axes, data >= 0, axes, finite=True))


def uniform(node: Node, frame: Frame, _: Value) -> Value:
    """Counter-based random numbers per KV head, position and decode step."""
    seed = counts.seed(frame.number(node.args[0]))  # exact, also beyond what float64 holds
    kv = torch.arange(frame.kv_start, frame.kv_start + frame.kv, device=frame.device)[:, None]
    step = frame.generated or 0
    data = counts.hashed(seed, frame.here, kv, frame.places, step)
    return frame.present(Value(data.double() / 2.0**32, ("kv", "token"), finite=True))


# Data of the model.


def cached(node: Node, frame: Frame) -> Value:
    """Keys or values in float64."""
    data = (frame.keys if node.op == "key" else frame.values).double()
    frame.checks.append(data.sum().isfinite())
    return frame.present(Value(data, ("kv", "token", "dim"), finite=True))


def _queries(window: int, frame: Frame) -> tuple[slice, torch.Tensor]:
    """Which of the last queries are computed now, counted from the end, and their positions."""
    rows = range(window)[frame.rows or slice(None)]
    chosen = slice(rows.start - window, rows.stop - window or None)
    positions = frame.query_places
    return chosen, positions[len(positions) - window :][frame.rows or slice(None)]


def _window_logits(node: Node, frame: Frame) -> tuple[torch.Tensor, torch.Tensor, tuple[str, ...]]:
    """q.k / sqrt(D), [G, H/G, W, n]; where there is a value, and the axes of that."""
    window = frame.window(node)
    keys = frame.keys
    kv, tokens, size = keys.shape
    chosen, positions = _queries(window, frame)
    q = frame.queries[:, chosen] if window else frame.queries[:, :0]
    group, rows = q.shape[0] // kv, q.shape[1]
    q = q.double().reshape(kv, group * rows, size) * size**-0.5
    logits = torch.matmul(q, keys.double().transpose(1, 2)).view(kv, group, rows, tokens)

    def make() -> torch.Tensor:
        return frame.places <= positions[:, None]

    if frame.there is not None or frame.query_positions is not None:
        seen = make()
        if frame.there is not None:
            seen = seen & frame.there[:, None]
        axes = ("kv", "query", "token") if seen.ndim == 3 else ("query", "token")
        logits.masked_fill_(~(seen[:, None] if seen.ndim == 3 else seen), -math.inf)
        return logits, seen, axes
    planned = frame.positions is None and frame.rows is None and frame.last is None
    seen = frame.once(("seen", window), (), make) if planned else make()
    # Only the window's own columns can lie after a query.
    logits[..., tokens - window :].masked_fill_(~seen[:, tokens - window :], -math.inf)
    return logits, seen, ("query", "token")


_ATTENTION_AXES = ("kv", "group", "query", "token")


def logits(node: Node, frame: Frame) -> Value:
    """Attention before the softmax."""
    data, seen, axes = _window_logits(node, frame)
    frame.checks.append(filled(Value(data, _ATTENTION_AXES, seen, axes), 0.0).sum().isfinite())
    return Value(data, _ATTENTION_AXES, seen, axes, finite=True)


def attn(node: Node, frame: Frame) -> Value:
    """Attention of the window's queries over all tokens."""
    data, seen, axes = _window_logits(node, frame)
    data = torch.softmax(data, dim=-1)
    # A NaN or infinity anywhere makes its whole row NaN.
    first = data[..., :1].sum(-1).isfinite()
    if frame.query_positions is not None:
        # An older query sees nothing where all entries before it have left.
        empty = ~seen.any(-1)
        empty = empty[:, None] if empty.ndim == 2 else empty
        first = first | empty
        data = data.masked_fill(empty[..., None], 0.0)
    frame.checks.append(first.all())
    return Value(data, _ATTENTION_AXES, seen, axes, zero=True, finite=True)


def _floor_divide(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return snapped(a / (b + 0.0)).floor()  # -0 is 0


def _power(a: Any, b: Any) -> torch.Tensor:
    """Of a negative base only whole powers exist, also of -inf."""
    made = binary(lambda x, y: torch.pow(x + 0.0, y))(a, b)
    if not isinstance(b, torch.Tensor):
        whole = math.isinf(b) or float(b).is_integer()
        return made if whole else made.masked_fill(a < 0, math.nan)
    return torch.where((a < 0) & (b != b.floor()), math.nan, made)


TORCH_FORMS: dict[str, Callable[..., Value]] = {
    "position": position,
    "all": everything,
    "distance": distance,
    "new": newest,
    "size": size,
    "uniform": uniform,
    "key": cached,
    "value": cached,
    "logits": logits,
    "attn": attn,
    "add": elementwise(binary(torch.add)),
    "subtract": elementwise(binary(torch.subtract)),
    "multiply": elementwise(binary(torch.multiply)),
    "divide": divide,
    "floor_divide": elementwise(binary(_floor_divide)),
    "modulo": elementwise(binary(lambda a, b: a - b * _floor_divide(a, b))),
    "power": elementwise(_power),
    "negate": elementwise(torch.neg),
    "abs": elementwise(torch.abs),
    "exp": elementwise(torch.exp),
    "log": elementwise(torch.log),
    "sqrt": elementwise(torch.sqrt),
    "cos": elementwise(torch.cos),
    "sin": elementwise(torch.sin),
    "acos": elementwise(torch.acos),
    "floor": elementwise(lambda x: snapped(x).floor()),
    "ceil": elementwise(lambda x: snapped(x).ceil()),
    "round": elementwise(lambda x: snapped(x).round()),
    "minimum": elementwise(at_most, chooses=True),
    "maximum": elementwise(at_least, chooses=True),
    "less": compare(torch.lt),
    "less_equal": compare(torch.le),
    "greater": compare(torch.gt),
    "greater_equal": compare(torch.ge),
    "equal": compare(torch.eq),
    "not_equal": compare(torch.ne),
    "and": logic(binary(torch.logical_and)),
    "or": logic(binary(torch.logical_or)),
    "not": logic(torch.logical_not),
    "mask": mask,
    "choose": choose,
    "broadcast": repeated,
    "sum": reduce,
    "mean": reduce,
    "max": reduce,
    "min": reduce,
    "var": reduce,
    "any": reduce,
    "count": reduce,
    "top": torch_select.top,
    "rank": torch_select.rank,
    "index": torch_select.index,
    "missing": torch_select.missing,
    "remaining": torch_select.remaining,
    "fill": torch_select.fill,
    "avgpool": torch_pool.pool,
    "maxpool": torch_pool.pool,
    "cumsum": torch_along.cumsum,
    "sort": torch_along.sort,
}

# What is computed where its operands are found: other layers, a merge, what is remembered.
_ELSEWHERE = frozenset((Kind.LOOK, Kind.PARTITION, Kind.MERGE, Kind.REMEMBERED))


def is_computed(node: Node) -> bool:
    """Whether the torch program knows an operation."""
    return node.op in TORCH_FORMS or node.operation.kind in _ELSEWHERE
