"""Sharing in the torch program: two layers store one direction per entry.

Dimensions: G KV heads, N tokens, D head size.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.execute.layer.evaluate import Evaluation
from kvpolicy.dsl.execute.tensors.heads import ALL, Heads
from kvpolicy.dsl.execute.tensors.kernels import Kernels
from kvpolicy.dsl.execute.tensors.values import Frame, Value, aligned, as_tensor, filled
from kvpolicy.dsl.ir.inner_products import place
from kvpolicy.dsl.ir.nodes import Node

Pair = tuple[torch.Tensor, torch.Tensor]
_AXES = ("kv", "token")


class Shared(NamedTuple):
    """What two layers store together of their keys, or of their values.

    Attributes:
        direction: float64 [G, N, D].
        excepted: bool [G, N]: entries that keep both vectors.
    """

    direction: torch.Tensor
    excepted: torch.Tensor


def shared(
    bound: Bound,
    prompt: int,
    layer: int,
    below: Pair,
    own: Pair,
    kernels: Kernels,
    heads: Heads = ALL,
) -> dict[str, Shared]:
    """What `key` and `value`, where `apply` names them, share at a layer; empty: nothing.

    Args:
        bound: the policy.
        prompt: N.
        layer: from 0; there is a layer below.
        below, own: keys and values [G, N, D] of the layer below and of this one.
        kernels: by name, see `execute/tensors/kernels.py`.
        heads: the model's KV heads that these are.
    """
    share = bound.lowered.share
    if share is None or prompt == 0 or not bound.number(share.when, prompt, layer):
        return {}
    results = {}
    for name, under, upper in zip(("key", "value"), below, own, strict=True):
        if name not in share.apply:
            continue
        frame = Frame(
            bound, prompt, upper.device, heads.number(bound.shape.kv_heads), prompt, layer=layer,
            vectors={"key": own[0], "value": own[1]}, kernels=kernels, heads=heads,
        )  # fmt: skip
        vectors = {"below": under, "own": upper}
        results[name] = _one(Evaluation(frame), share.direction, share.exceptions, vectors)
    return results


def _one(
    evaluation: Evaluation,
    direction: Node,
    exceptions: Node | None,
    vectors: dict[str, torch.Tensor],
) -> Shared:
    kernels = evaluation.frame.kernels
    products = kernels["gram"](vectors["below"], vectors["own"])
    # NaN or infinity decides nothing: both vectors stay.
    finite = evaluation.frame.heads.per_rank(products.isfinite().all()).all()

    def special(node: Node, _: Evaluation) -> Value:
        return Value(vectors[node.symbol].double(), ("kv", "token", "dim"), finite=True)

    def inner_product(node: Node, _: Evaluation) -> Value:
        return Value(products[place(node)], _AXES)

    own_operations = {"special": special, "inner_product": inner_product}
    evaluation = replace(evaluation, own_operations=own_operations)
    storable = finite
    if direction.op == "blend":
        a, b = (evaluation.tensor(weight, _AXES) for weight in direction.args)
        data = kernels["blend"](vectors["below"], vectors["own"], a, b)
        storable = storable & ~(a.isinf() & b.isinf())  # infinite, or 0, if it is not taken apart
    else:
        x = evaluation.value(direction)
        data = as_tensor(x.data, evaluation.frame.device) if x.mask is None else filled(x, 0.0)
        data = aligned(data, x.axes, (*_AXES, "dim"))
        data = data.double().expand(vectors["own"].shape)
    # Both vectors stay without a direction, and with one that would become infinite by itself or
    # times the longer vector.
    largest = torch.linalg.vector_norm(data, math.inf, dim=-1)
    length = torch.maximum(products[0], products[2]).sqrt().clamp(min=1)
    storable = storable & (largest * length <= torch.finfo(vectors["own"].dtype).max)
    excepted = ~storable | (largest == 0)
    if exceptions is not None:
        excepted = excepted | evaluation.tensor(exceptions, _AXES)
    return Shared(torch.where(storable[..., None], data, 0.0), excepted)
