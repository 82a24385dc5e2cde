"""What the stages of a model tell each other at a prompt's end, where a policy compares layers.

Each sends a few numbers of its layers (`bind/stages.py`). With the numbers of all layers, every
stage compares layers as one process would, and knows how many entries each layer keeps.

Dimensions: L layers of the model, l layers here, S numbers of a layer, N tokens of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.bind.entries import deciding_numbers, entries_kept
from kvpolicy.dsl.bind.kept import keep_of
from kvpolicy.dsl.execute.layer.across import Layers
from kvpolicy.dsl.execute.layer.evaluate import Evaluation
from kvpolicy.dsl.execute.tensors.values import Value, as_tensor
from kvpolicy.dsl.ir.nodes import Node

PARTS = 3  # integers for a number: whether it is present, and the halves of its 64 bits
_HALF = 32
_LOW = 2**_HALF - 1


def encoded(nodes: Sequence[Node], here: Sequence[Evaluation]) -> torch.Tensor:
    """The numbers of the layers here as int64 [l, S, PARTS], none negative."""
    rows = [torch.stack([_bits(x.value(node), x) for node in nodes]) for x in here]
    return torch.stack(rows)


def _bits(x: Value, evaluation: Evaluation) -> torch.Tensor:
    number = as_tensor(x.data, evaluation.frame.device).double()
    present = torch.ones_like(number, dtype=torch.bool) if x.mask is None else x.mask
    bits = number.contiguous().view(torch.int64)
    return torch.stack([present.long(), (bits >> _HALF) & _LOW, bits & _LOW])


def decoded(
    nodes: Sequence[Node], numbers: torch.Tensor, own: Evaluation
) -> list[dict[Node, Value]]:
    """The numbers of every layer, by node.

    Args:
        numbers: int64 [L, S, PARTS], from `encoded` of all stages.
        own: evaluation of a layer here, for axes and masks.
    """
    numbers = numbers.to(own.frame.device)
    present = numbers[..., 0].bool()
    data = ((numbers[..., 1] << _HALF) | numbers[..., 2]).contiguous().view(torch.float64)
    values: list[dict[Node, Value]] = [{} for _ in numbers]
    for place, node in enumerate(nodes):
        like = own.value(node)
        mask = like.mask is not None
        column = data[:, place].bool() if node.type.kind == "truth" else data[:, place]
        for layer, known in enumerate(values):
            known[node] = replace(
                like, data=column[layer], mask=present[layer, place] if mask else None
            )
    return values


def entries_of_layers(bound: Bound, prompt: int, model: Layers) -> list[int]:
    """[L], number of entries that each list of a layer keeps if all is finite.

    Args:
        prompt: N.
        model: all layers, of a policy for which `why_not_apart` of `bind/stages.py` gives None.
    """
    keep = keep_of(bound.lowered.prefill)
    numbers = {node: model.numbers(node) for node in deciding_numbers(keep) or ()}

    def of_layer(layer: int) -> int:
        return entries_kept(keep, prompt, lambda node: numbers[node][layer])

    return [of_layer(layer) for layer in range(bound.shape.layers)]
