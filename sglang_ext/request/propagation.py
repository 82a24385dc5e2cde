"""What is known of a request whose tokens leave the prefill, before and between its forwards."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.bind.bounds import Bounds
from kvpolicy.dsl.ir.counts import whole
from kvpolicy.dsl.ir.nodes import Node

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class PropagationPlan:
    """How a policy propagates a prompt of N tokens.

    Attributes:
        layer: the one layer after which tokens leave; None if data decide it or there are several.
            Then the prompt has to be prefilled in one piece.
        restarts: whether the chosen tokens are prefilled again at positions 0, 1, ...
        most_prefix: most tokens that may be taken from the radix cache.
    """

    layer: int | None
    restarts: bool
    most_prefix: int


def plan(bound: Bound, prompt: int) -> PropagationPlan | None:
    """The plan for a prompt of N tokens; None if every layer is certain to see all of them."""
    lowered = bound.lowered.propagate
    if lowered is None:
        return None
    layer, deepest = bound.propagation_layer(prompt), bound.shape.layers - 1
    if layer is not None and layer >= deepest + bound.restarts:
        return None
    return PropagationPlan(layer, bound.restarts, _most_prefix(bound, lowered.tokens, prompt))


def _most_prefix(bound: Bound, tokens: Node, prompt: int) -> int:
    """Most cached tokens that a propagating prompt may use.

    Cached tokens have no rows: deeper layers read their entries, but nothing is computed for them.
    So the last queries of every layer, the prompt's last token included, must be of other tokens.
    And a second prefill writes its entries to slots that the request owns, one per chosen token.

    Args:
        tokens: the lowered section's set of tokens that go deeper.
    """
    if bound.restarts:
        return prompt - max(Bounds(bound, prompt).size(tokens).head)
    window = max(bound.queries(prompt), 1)
    layers = range(bound.shape.layers)
    last_chosen = min(_last_chosen(bound, tokens, prompt, layer) for layer in layers)
    return prompt - window if last_chosen >= min(window, prompt) else 0


def _last_chosen(bound: Bound, node: Node, prompt: int, layer: int) -> int:
    """Number of a prompt's last tokens that a token set holds whatever the data."""
    if node.op == "all":
        return prompt
    if node.op == "or":
        return max(_last_chosen(bound, arg, prompt, layer) for arg in node.args)
    if node.op == "fill":
        return _last_chosen(bound, node.args[1], prompt, layer)
    if node.op == "choose":
        return min(_last_chosen(bound, arg, prompt, layer) for arg in node.args[::2])
    if node.op == "top" and node.args[0].op == "position":
        needs = bound.static.needs(node.args[1])
        if needs is not None and "length" not in needs:
            return whole(bound.number(node.args[1], prompt, layer), prompt)
    return 0


class LayerRows(NamedTuple):
    """Rows that enter a layer, T of one or several requests.

    Attributes:
        hidden, residual: [T, hidden] output of the layer before and the residual stream beside it.
        ids, positions, slots: [T] int64 tokens, their positions and where their entries go.
    """

    hidden: torch.Tensor
    residual: torch.Tensor
    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor

    def take(self, rows: slice) -> LayerRows:
        """Some of the rows, not copied."""
        return LayerRows(*(tensor[rows] for tensor in self))

    @staticmethod
    def cat(parts: Sequence[LayerRows]) -> LayerRows:
        """The rows of all parts, in order; those of a single part are not copied."""
        if len(parts) == 1:
            return parts[0]
        return LayerRows(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


@dataclass
class Progress:
    """How far a request's propagation has come.

    Attributes:
        stopped: whether earlier chunks ended after the acting layer.
        held: their rows, which wait for the last chunk; empty if the policy restarts.
        layer: first layer after which tokens left; None if none did so far.
        tokens: tokens that the last layer saw; None if none left.
        shift: by how much positions of output tokens are smaller than their places in the request:
            N - m after a second prefill of m tokens, else 0.
        barred: whether the request is kept out of the radix cache for its policy.
    """

    stopped: bool = False
    held: list[LayerRows] = field(default_factory=list)
    layer: int | None = None
    tokens: int | None = None
    shift: int = 0
    barred: bool = False

    def facts(self, prompt: int) -> dict[str, int | None]:
        """What an answer reports of the propagation of a prompt of N tokens."""
        tokens = prompt if self.tokens is None else self.tokens
        return {"selected_layer": self.layer, "propagated_tokens": tokens}
