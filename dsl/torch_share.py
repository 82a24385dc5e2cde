"""Two layers that store one direction per entry: what a torch program computes for it.

Dimensions: G KV heads, N tokens, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from kvpolicy.dsl.bind import Bound
from kvpolicy.dsl.ir import Node
from kvpolicy.dsl.torch_combination import Combinations
from kvpolicy.dsl.torch_evaluate import Evaluation, spread
from kvpolicy.dsl.torch_kernels import NONE, Kernels
from kvpolicy.dsl.torch_values import Frame, Value, filled

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Shared:
    """What two layers store together.

    Attributes:
        direction_k, direction_v: float64 [G, N, D]; None where `apply` leaves it out.
        except_k, except_v: bool [G, N]: entries that keep both vectors.
    """

    direction_k: torch.Tensor | None
    direction_v: torch.Tensor | None
    except_k: torch.Tensor | None
    except_v: torch.Tensor | None


def shared(
    bound: Bound, prompt: int, layer: int, below: Pair, own: Pair, kernels: Kernels = NONE
) -> Shared | None:
    """Directions and exceptions at a layer; None where `share.when` does not hold.

    Args:
        bound: the policy.
        prompt: N.
        layer: from 0; there is a layer below.
        below, own: keys and values [G, N, D] of the layer below and of this one.
        kernels: by name, see `torch_kernels`.
    """
    share = bound.share
    if share is None or prompt == 0 or not bound.number(share.when, prompt, layer):
        return None
    made: dict[str, tuple[torch.Tensor | None, torch.Tensor | None]] = {}
    for name, under, upper in zip(("key", "value"), below, own, strict=True):
        made[name] = (None, None)
        if name not in share.apply:
            continue
        frame = Frame(
            bound, prompt, upper.device, bound.shape.kv_heads, prompt=prompt, layer=layer,
            k=own[0], v=own[1], kernels=kernels,
        )  # fmt: skip
        vectors = {"below": under, "own": upper}
        made[name] = _one(Evaluation(frame), share.direction, share.exceptions, vectors)
    return Shared(made["key"][0], made["value"][0], made["key"][1], made["value"][1])


def _one(
    evaluation: Evaluation,
    direction: Node,
    exceptions: Node | None,
    vectors: dict[str, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    def special(node: Node, _: Evaluation) -> Value:
        return Value(vectors[node.value].double(), ("kv", "token", "dim"), finite=True)

    evaluation = replace(evaluation, extra={"special": special})
    kernels, weights = evaluation.frame.kernels, None
    # NaN or infinity decides nothing: both vectors stay.
    if "gram" in kernels:
        inner = kernels["gram"](vectors["below"], vectors["own"])
        finite = inner.isfinite().all()
        combinations = Combinations(evaluation, inner)
        combinations.prepare(direction)
        if exceptions is not None:
            combinations.prepare(exceptions)
        weights = combinations.weights(direction)
    else:
        finite = torch.stack([x.isfinite().all() for x in vectors.values()]).all()
    if weights is not None:
        data = kernels["blend"](vectors["below"], vectors["own"], *weights)
    else:
        data = filled(evaluation.value(direction), 0.0).expand(vectors["own"].shape)
    apart = torch.zeros(data.shape[:2], dtype=torch.bool, device=data.device)
    if exceptions is not None:
        apart = spread(evaluation.value(exceptions), ("kv", "token"), evaluation.frame)
    return torch.where(finite, data, 0.0), apart | ~finite
