"""What a torch program computes from the prompt's length alone, and how it calls operations.

Dimensions: L layers, G KV heads, N cached tokens, W window.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.execute.entropy import distribution, entropy
from kvpolicy.dsl.execute.kernels import NONE, Kernels
from kvpolicy.dsl.execute.ops import OPERATIONS
from kvpolicy.dsl.execute.values import HOST, Frame, Value, aligned, constant, of_layer, sent, union
from kvpolicy.dsl.ir.nodes import Node
from kvpolicy.dsl.ops.operations import Kind


@dataclass
class Plan:
    """Values that only the prompt's length decides: one for all layers, or one per layer."""

    frame: Frame
    values: list[dict[int, Value]]  # per layer, by id of node
    at_end: dict[int, Value]  # with the axis `layer` where layers differ

    @classmethod
    def make(
        cls,
        bound: Bound,
        nodes: list[Node],
        used: set[int],
        prompt: int,
        device: torch.device,
        kernels: Kernels = NONE,
    ) -> Plan:
        """Computes `nodes`, in order, and keeps those in `used`."""
        maker = _Maker(bound, prompt, device, kernels)
        for node in nodes:
            maker.add(node)
        values = [{name: x for name, x in own.items() if name in used} for own in maker.values]
        at_end = {name: x for name, x in maker.at_end.items() if name in used}
        frame = maker.frame
        *values, at_end = _on_device([*values, at_end], frame)
        for value in [x for own in (*values, at_end) for x in own.values()]:
            for tensor in (value.data, value.mask):
                if isinstance(tensor, torch.Tensor):
                    frame.fixed[id(tensor)] = tensor
        return cls(frame, values, at_end)


def _on_device(parts: list[dict[int, Value]], frame: Frame) -> list[dict[int, Value]]:
    """The values with their tensors on the frame's device; a tensor is copied once."""
    copied: dict[int, torch.Tensor] = {}

    def copy(x: torch.Tensor | float | None) -> torch.Tensor | float | None:
        if not isinstance(x, torch.Tensor):
            return x
        if id(x) not in copied:
            copied[id(x)] = sent(x, frame.device)
        return copied[id(x)]

    return [
        {name: replace(x, data=copy(x.data), mask=copy(x.mask)) for name, x in own.items()}
        for own in parts
    ]


class _Maker:
    """Computes the nodes of a plan for all layers, once where layers do not differ.

    What has a number for every token and query or KV head is computed on the device, all else on
    the host: numbers come out of sets of tokens, and are needed there.
    """

    def __init__(self, bound: Bound, prompt: int, device: torch.device, kernels: Kernels) -> None:
        self.bound = bound
        self.prompt, self.device = prompt, device
        self.layers = range(bound.shape.layers)
        self.frame = Frame(bound, prompt, device, bound.shape.kv_heads, kernels=kernels)
        self._host = replace(self.frame, device=HOST, kernels=NONE)
        self.values: list[dict[int, Value]] = [{} for _ in self.layers]
        self.at_end: dict[int, Value] = {}
        self._varies: set[int] = set()

    def add(self, node: Node) -> None:
        """Computes one node, whose arguments have been added."""
        if node.across_layers:
            whole = self._call(node, None, [self.at_end[id(x)] for x in operands(node)])
            differs = "layer" in whole.axes
            own_values = [_number(of_layer(whole, layer)) for layer in self.layers]
        else:
            differs = self._differs(node)
            count = len(self.layers) if differs else 1
            own_values = [self._value(node, layer) for layer in range(count)]
            if not differs:
                own_values = own_values * len(self.layers)
        if differs:
            self._varies.add(id(node))
        for layer in self.layers:
            self.values[layer][id(node)] = own_values[layer]
        devices = {x.data.device for x in own_values if isinstance(x.data, torch.Tensor)}
        where = devices.pop() if devices else HOST
        self.at_end[id(node)] = stacked(own_values, where) if differs else own_values[0]

    def _value(self, node: Node, layer: int) -> Value:
        if self.bound.static.needs(node) is not None:
            return scalar(self.bound.number(node, self.prompt, layer))
        arguments = [self.values[layer][id(x)] for x in operands(node)]
        return _number(self._call(node, layer, arguments))

    def _call(self, node: Node, layer: int | None, arguments: list[Value]) -> Value:
        """Computes a node where its tensors belong."""
        wide = "token" in node.type.axes and len(node.type.axes) > 1
        tensors = [x for each in arguments for x in (each.data, each.mask)]
        wide |= any(isinstance(x, torch.Tensor) and x.device != HOST for x in tensors)
        frame = self.frame if wide else self._host
        arguments = [
            replace(x, **{name: sent(t, frame.device) for name, t in _tensors(x)})
            for x in arguments
        ]
        return call(node, replace(frame, layer=layer), arguments)

    def _differs(self, node: Node) -> bool:
        """Whether a node has another value at each layer."""
        needs = self.bound.static.needs(node)
        if needs is not None:
            return "layer" in needs
        if node.op == "distance" and node.args:
            return "layer" in (self.bound.static.needs(node.args[0]) or ())
        return node.op == "uniform" or any(id(x) in self._varies for x in operands(node))


def _tensors(x: Value) -> list[tuple[str, torch.Tensor]]:
    both = (("data", x.data), ("mask", x.mask))
    return [(name, each) for name, each in both if isinstance(each, torch.Tensor)]


def _number(x: Value) -> Value:
    """Numbers of a plan are the host's, so that no later step waits for the device."""
    if isinstance(x.data, torch.Tensor) and not x.data.ndim and x.mask is None:
        return replace(x, data=x.data.item())
    return x


def operands(node: Node) -> tuple[Node, ...]:
    """What a step reads; a window is a number that `bind` already knows, an entropy one step."""
    if node.operation.is_window:
        return ()
    x = distribution(node)
    return node.args if x is None else (x,)


def operation(node: Node) -> Callable[..., Value]:
    """What computes a node of its operands."""
    return OPERATIONS[node.op] if distribution(node) is None else entropy


def scalar(value) -> Value:
    """A number of the host."""
    if isinstance(value, bool):
        return Value(value, finite=True)
    number = float(value)
    return Value(number, finite=abs(number) < float("inf"))


def call(node: Node, frame: Frame, arguments: list[Value]) -> Value:
    """Computes one node; what looks across layers gets its operand with the axis `layer`."""
    if node.across_layers and node.operation.kind is not Kind.PARTITION:
        place = 1 if node.op == "at" else 0
        arguments = list(arguments)
        arguments[place] = _over_layers(arguments[place], frame)
    return operation(node)(node, frame, *arguments)


def _over_layers(x: Value, frame: Frame) -> Value:
    """The value with the axis `layer`, repeated if all layers have the same."""
    if "layer" in x.axes:
        return x
    data = x.data
    if not isinstance(data, torch.Tensor):
        data = constant(data, frame.device)
    data = data.expand(frame.bound.shape.layers, *data.shape)
    return replace(x, data=data, axes=("layer", *x.axes))


def stacked(values: list[Value], device: torch.device) -> Value:
    """The values of all layers as one, with the axis `layer` in front."""
    axes = union(*(x.axes for x in values))
    sizes = {a: n for x in values if x.axes for a, n in zip(x.axes, x.data.shape, strict=True)}
    shape = [sizes[axis] for axis in axes]

    def spread(data: torch.Tensor | float | bool, own: tuple[str, ...]) -> torch.Tensor:
        if not isinstance(data, torch.Tensor):
            data = constant(data, device)
        return aligned(data, own, axes).expand(shape)

    data = [spread(x.data, x.axes) for x in values]
    mask, mask_axes = values[0].mask, values[0].mask_axes
    if any(x.mask is not mask for x in values):
        masks = [spread(True if x.mask is None else x.mask, x.mask_axes) for x in values]
        mask, mask_axes = torch.stack(masks), ("layer", *axes)
    return Value(
        torch.stack(data),
        ("layer", *axes),
        mask,
        mask_axes,
        zero=all(x.zero for x in values),
        finite=all(x.finite for x in values),
    )
