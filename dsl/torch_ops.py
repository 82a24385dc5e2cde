"""The operations of the torch program by name, and those that read the model's tensors."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from kvpolicy.dsl import counts, torch_layers, torch_select
from kvpolicy.dsl.ir import Node
from kvpolicy.dsl.torch_elementwise import (
    binary,
    choose,
    compare,
    divide,
    elementwise,
    logic,
    mask,
    reduce,
)
from kvpolicy.dsl.torch_values import Frame, Value, filled, snapped

# Leaves that hold no data of the model.


def position(node: Node, frame: Frame) -> Value:
    """Original positions; all tokens are there, so the index is the position."""
    data = torch.arange(frame.tokens, dtype=torch.float64, device=frame.device)
    return Value(data, ("token",), finite=True)


def everything(node: Node, frame: Frame) -> Value:
    """Every candidate."""
    return Value(torch.ones(frame.tokens, dtype=torch.bool, device=frame.device), ("token",))


def distance(node: Node, frame: Frame) -> Value:
    """Position of the query minus position of the token."""
    window = frame.bound.window(node, frame.tokens, frame.layer)
    tokens = torch.arange(frame.tokens, device=frame.device)
    data = tokens[frame.tokens - window :, None] - tokens
    axes = ("query", "token")
    return Value(data.double(), axes, data >= 0, axes, finite=True)


def uniform(node: Node, frame: Frame, seed: Value) -> Value:
    """Counter-based random numbers per KV head and token."""
    kv = torch.arange(frame.bound.shape.kv_heads, device=frame.device)[:, None]
    token = torch.arange(frame.tokens, device=frame.device)
    data = counts.hashed(math.floor(seed.data), frame.layer, kv, token)
    return Value(data.double(), ("kv", "token"), finite=True)


# Data of the model.


def cached(node: Node, frame: Frame) -> Value:
    """Keys or values in float64."""
    data = (frame.k if node.op == "key" else frame.v).double()
    frame.checks.append(data.sum().isfinite())
    return Value(data, ("kv", "token", "dim"), finite=True)


def _window_logits(node: Node, frame: Frame) -> tuple[torch.Tensor, torch.Tensor]:
    """q.k / sqrt(D), [G, H/G, W, N], and where the token is not after the query, [W, N]."""
    window = frame.bound.window(node, frame.tokens, frame.layer)
    kv, tokens, size = frame.k.shape
    q = frame.q[:, frame.q.shape[1] - window :].double()
    group = q.shape[0] // kv
    q = q.reshape(kv, group * window, size) * size**-0.5
    logits = torch.matmul(q, frame.k.double().transpose(1, 2)).view(kv, group, window, tokens)

    def make() -> torch.Tensor:
        order = torch.arange(tokens, device=frame.device)
        return order <= order[tokens - window :, None]

    seen = frame.once(("seen", window), (), make)
    # Only the window's own columns can lie after a query.
    logits[..., tokens - window :].masked_fill_(~seen[:, tokens - window :], -math.inf)
    return logits, seen


_ATTENTION_AXES = ("kv", "group", "query", "token")


def logits(node: Node, frame: Frame) -> Value:
    """Attention before the softmax."""
    data, seen = _window_logits(node, frame)
    frame.checks.append(
        filled(Value(data, _ATTENTION_AXES, seen, ("query", "token")), 0.0).sum().isfinite()
    )
    return Value(data, _ATTENTION_AXES, seen, ("query", "token"), finite=True)


def attn(node: Node, frame: Frame) -> Value:
    """Attention of the window's queries over all tokens."""
    data, seen = _window_logits(node, frame)
    data = torch.softmax(data, dim=-1)
    # A NaN or infinity anywhere makes its whole row NaN.
    frame.checks.append(data[..., 0].isfinite().all())
    return Value(data, _ATTENTION_AXES, seen, ("query", "token"), zero=True, finite=True)


# Along tokens.


def pool(node: Node, frame: Frame, x: Value, width: Value) -> Value:
    """Maximum, or sum divided by the width, of the present neighbours, centred."""
    size = max(1, counts.whole(float(width.data), 2**31))
    largest = node.op == "maxpool"
    data = filled(x, -math.inf if largest else 0.0)
    dim = x.axes.index("token")
    data = data.transpose(-1, dim)
    shape = data.shape
    # Beyond the ends there is nothing, however wide the pool.
    before, after = min((size - 1) // 2, shape[-1]), min(size // 2, shape[-1])
    flat = F.pad(
        data.reshape(1, -1, shape[-1]), (before, after), value=-math.inf if largest else 0.0
    )
    reach = before + after + 1
    pooled = F.max_pool1d(flat, reach, 1) if largest else F.avg_pool1d(flat, reach, 1)
    if not largest and reach != size:
        pooled = pooled * (reach / size)
    pooled = pooled.reshape(shape).transpose(-1, dim)
    return Value(pooled, x.axes, x.mask, x.mask_axes, finite=x.finite)


def _floor_divide(a, b) -> torch.Tensor:
    return snapped(a / (b + 0.0)).floor()  # -0 is 0


OPERATIONS: dict[str, Callable[..., Value]] = {
    "position": position,
    "all": everything,
    "distance": distance,
    "uniform": uniform,
    "key": cached,
    "value": cached,
    "logits": logits,
    "attn": attn,
    "add": elementwise(binary(torch.add)),
    "subtract": elementwise(binary(torch.subtract)),
    "multiply": elementwise(binary(torch.multiply)),
    "divide": divide,
    "floor_divide": elementwise(binary(_floor_divide), nan=True, stays_finite=False),
    "modulo": elementwise(
        binary(lambda a, b: a - b * _floor_divide(a, b)), nan=True, stays_finite=False
    ),
    "power": elementwise(binary(lambda a, b: torch.pow(a + 0.0, b)), nan=True, stays_finite=False),
    "negate": elementwise(torch.neg),
    "abs": elementwise(torch.abs),
    "exp": elementwise(torch.exp, stays_finite=False),
    "log": elementwise(torch.log, nan=True, stays_finite=False),
    "sqrt": elementwise(torch.sqrt, nan=True),
    "cos": elementwise(torch.cos),
    "sin": elementwise(torch.sin),
    "acos": elementwise(torch.acos, nan=True),
    "floor": elementwise(lambda x: snapped(x).floor()),
    "ceil": elementwise(lambda x: snapped(x).ceil()),
    "round": elementwise(lambda x: snapped(x).round()),
    "minimum": elementwise(binary(torch.minimum)),
    "maximum": elementwise(binary(torch.maximum)),
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
    "avgpool": pool,
    "maxpool": pool,
    "past": torch_layers.past,
    "at": torch_layers.at,
    "split": torch_layers.split,
    "cluster": torch_layers.cluster,
}
