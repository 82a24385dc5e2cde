"""Values that the prompt's length alone decides, known before any layer is evaluated.

Dimensions: L layers, G KV heads, N tokens of the prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.execute.layer.across import Layers
from kvpolicy.dsl.execute.layer.evaluate import Evaluation
from kvpolicy.dsl.execute.operations.operands import operands
from kvpolicy.dsl.execute.tensors.heads import Heads
from kvpolicy.dsl.execute.tensors.kernels import Kernels
from kvpolicy.dsl.execute.tensors.values import HOST, Frame, Value, sent
from kvpolicy.dsl.ir.lower import Phase, Phases
from kvpolicy.dsl.ir.nodes import Node
from kvpolicy.dsl.ir.traverse import nodes_of


def plannable(bound: Bound, nodes: Sequence[Node], roots: Iterable[Node]) -> list[Node]:
    """The nodes that a plan holds: roots, and operands of nodes that are not planned.

    They are numbers and values per token; values that differ by query or KV head too are computed
    where they are needed, in blocks.

    Args:
        nodes: all nodes, operands before the nodes that read them.
        roots: the nodes that are asked for.
    """
    phases = Phases(bound.propagates)
    planned: set[Node] = set()
    for node in nodes:
        per_token = not set(node.type.axes) - {"token"}
        if per_token and phases.of(node) == Phase.PLAN and planned.issuperset(operands(node)):
            planned.add(node)
    read_nodes = {operand for node in nodes if node not in planned for operand in operands(node)}
    read_nodes |= {*roots}
    return [node for node in nodes if node in read_nodes & planned]


@dataclass
class Plan:
    """Values that the prompt's length alone decides.

    Attributes:
        frame: from which frames of layers are made; holds what layers have in common.
        values: [L], values by node.
    """

    frame: Frame
    values: list[dict[Node, Value]]

    @classmethod
    def make(
        cls,
        bound: Bound,
        nodes: list[Node],
        prompt: int,
        device: torch.device,
        kernels: Kernels,
        heads: Heads,
    ) -> Plan:
        """Computes `plannable` nodes on the host, since numbers may count sets of tokens."""
        kv = heads.number(bound.shape.kv_heads)
        frame = Frame(bound, prompt, device, kv, prompt, kernels=kernels, heads=heads)
        host = Frame(bound, prompt, HOST, kv, prompt, heads=heads)
        layer_numbers = range(bound.shape.layers)
        layers = Layers([Evaluation(replace(host, layer=layer)) for layer in layer_numbers], prompt)
        values_by_layer: list[dict[Node, Value]] = [{} for _ in layer_numbers]
        planned_nodes = {*nodes}
        per_layer: set[Node] = set()
        for node in nodes_of(nodes):
            needs, inputs = bound.static.needs(node), {*operands(node)}
            differs = node.across_layers or node.op == "head_table" or bool(inputs & per_layer)
            if differs if needs is None else "layer" in needs:
                per_layer.add(node)
            if node not in planned_nodes:
                continue
            if node in per_layer:
                values = [_on(_number(value), frame) for value in layers.of_each(node)]
            else:
                first_value = layers.evaluations[0].value(node)
                values = [_on(_number(first_value), frame)] * len(layer_numbers)
            for known, value in zip(values_by_layer, values, strict=True):
                known[node] = value
        return cls(frame, values_by_layer)


def _on(x: Value, frame: Frame) -> Value:
    """The value on the frame's device, its tensors noted as living as long as the plan."""
    if isinstance(x.data, torch.Tensor):
        x = replace(x, data=sent(x.data, frame.device))
    if x.mask is not None:
        x = replace(x, mask=sent(x.mask, frame.device))
    frame.fixed.update({id(t): t for t in (x.data, x.mask) if isinstance(t, torch.Tensor)})
    return x


def _number(x: Value) -> Value:
    """Numbers of a plan are the host's, so that no later step waits for the device."""
    if isinstance(x.data, torch.Tensor) and not x.data.ndim and x.mask is None:
        return replace(x, data=x.data.item())
    return x
