"""Other layers' values where layers have different tokens.

Every layer's values stay on its own tokens. What compares layers sees them at the prompt's N
positions, absent where a token did not reach the layer, and every layer reads its part of the
result at its own tokens.

Dimensions: L layers, G KV heads, N tokens of the prompt, n tokens of one layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from kvpolicy.dsl.execute import layers as torch_layers
from kvpolicy.dsl.execute.evaluate import Evaluation
from kvpolicy.dsl.execute.ops import OPERATIONS
from kvpolicy.dsl.execute.plan import operands, stacked
from kvpolicy.dsl.execute.values import HOST, Frame, Value, aligned, as_tensor, of_layer, sent
from kvpolicy.dsl.ir import counts
from kvpolicy.dsl.ir.nodes import Node, When
from kvpolicy.dsl.ops.operations import Kind


def widened(x: Value, frame: Frame, prompt: int) -> Value:
    """A layer's value at the prompt's positions; absent, or false, where there is no token."""
    if frame.positions is None or "token" not in x.axes:
        return x
    dim = x.axes.index("token")
    shape = list(x.tensor.shape)
    shape[dim] = prompt
    data = x.tensor.new_zeros(shape).index_copy(dim, frame.positions, x.tensor)
    if data.dtype == torch.bool and x.mask is None:
        return Value(data, x.axes, finite=True)
    own = torch.ones((), dtype=torch.bool, device=frame.device) if x.mask is None else x.mask
    own = aligned(own, x.mask_axes, x.axes).expand(x.tensor.shape)
    mask = own.new_zeros(shape).index_copy(dim, frame.positions, own)
    return Value(data, x.axes, mask, x.axes, finite=x.finite)


def narrowed(x: Value, places: torch.Tensor) -> Value:
    """The value at some of its tokens, by index."""
    if "token" not in x.axes:
        return x
    mask = x.mask
    if mask is not None and "token" in x.mask_axes:
        mask = mask.index_select(x.mask_axes.index("token"), places)
    data = x.tensor.index_select(x.axes.index("token"), places)
    return replace(x, data=data, mask=mask)


def nowhere(x: Value, frame: Frame) -> Value:
    """The value, absent everywhere."""
    data = as_tensor(x.data, frame)
    return Value(data, x.axes, torch.zeros_like(data, dtype=torch.bool), x.axes, finite=True)


@dataclass
class History:
    """Values of the layers done so far, for `past` and `at`.

    Attributes:
        values: by id of node and layer, with the positions of that layer's tokens.
    """

    values: dict[int, dict[int, tuple[Value, torch.Tensor | None]]] = field(default_factory=dict)

    def record(self, node: Node, evaluation: Evaluation, layers: int | None) -> None:
        """Notes a node's value at a layer; `layers`: how many are read later, None for all."""
        frame = evaluation.frame
        own = self.values.setdefault(id(node), {})
        own[frame.here] = (evaluation.value(node), frame.positions)
        if layers is not None:
            own.pop(frame.here - layers, None)

    def read(self, node: Node, layer: int, frame: Frame) -> Value:
        """An earlier layer's value at the tokens that are still there."""
        x, positions = self.values[id(node)][layer]
        if "token" not in x.axes or frame.positions is None:
            return x
        places = frame.positions
        if positions is not None:
            places = torch.searchsorted(positions, places)
        return narrowed(x, places)


def look_back(node: Node, evaluation: Evaluation, history: History) -> Value:
    """`past`, a reduction of it, or `at` over the layers done so far."""
    frame, layer = evaluation.frame, evaluation.frame.here
    if node.op != "at":
        x, number = (node if node.op == "past" else node.args[0]).args
        size = counts.whole(evaluation.number(number), frame.bound.shape.layers)
        own = evaluation.value(x)
        values = [
            own if each == layer else history.read(x, each, frame)
            for each in (max(0, layer - i) for i in reversed(range(size)))
        ]
        return _past(node, values, frame)
    wanted, x = node.args
    at = _named(wanted, evaluation, layer + 1)
    if at is None:
        return nowhere(evaluation.value(x), frame)
    return evaluation.value(x) if at == layer else history.read(x, at, frame)


def _named(node: Node, evaluation: Evaluation, size: int) -> int | None:
    """The layer, among the first `size`, that a number names; None if it names none."""
    mask = evaluation.value(node).mask
    if mask is not None and not mask.all():
        return None
    return counts.index(evaluation.number(node), size)


def _past(node: Node, values: list[Value], frame: Frame) -> Value:
    """Values of this layer and those before it along the axis `past`, or what they reduce to."""
    if node.op != "past":
        made = torch_layers.of_layers(node, frame, values, frame.here)
        if made is not None:
            return made
        return OPERATIONS[node.op](node, frame, _stacked(values, frame))
    return _stacked(values, frame)


def _stacked(values: list[Value], frame: Frame) -> Value:
    x = stacked(values, frame.device)
    size = len(values)
    there = torch.arange(size, device=frame.device) >= size - 1 - frame.here
    axes = ("past", *x.axes[1:])
    if x.mask is None:
        return Value(x.data, axes, there, ("past",), finite=x.finite)
    own = x.mask if x.mask_axes[:1] == ("layer",) else x.mask[None]
    mask_axes = ("past", *(axis for axis in x.mask_axes if axis != "layer"))
    return Value(x.data, axes, own & aligned(there, ("past",), mask_axes), mask_axes)


def known_before(node: Node, evaluation: Evaluation) -> Value:
    """A node over `layer` that needs no data, at the evaluation's layer."""
    frame = evaluation.frame
    layers = range(frame.bound.shape.layers)
    each = [replace(evaluation, frame=replace(frame, layer=i), known={}) for i in layers]
    return Layers(each, frame.prompt_tokens).value(node, each[frame.here])


class Layers:
    """All layers of a prefill after the last one.

    Args:
        evaluations: [L], by layer.
        prompt: N.
    """

    def __init__(self, evaluations: list[Evaluation], prompt: int) -> None:
        self.evaluations = evaluations
        self.prompt = prompt
        for each in evaluations:
            each.others = self.value
        first = evaluations[0].frame
        held = [x.frame.tokens for x in evaluations]
        number = sent(torch.tensor(held, device=HOST), first.device)
        self.frame = Frame(
            first.bound, prompt, first.device, first.kv, kernels=first.kernels,
            held=Value(number, ("layer",)),
        )  # fmt: skip
        self._known: dict[tuple, Value] = {}

    def value(self, node: Node, evaluation: Evaluation) -> Value:
        """The part of one layer in a node that looks at other layers."""
        layer = evaluation.frame.here
        if node.operation.kind is Kind.LOOK or torch_layers.over_past(node, self.frame):
            return self._look(node, evaluation)
        arguments = operands(node)
        count: Value | None = None
        if node.op == "top":
            count = evaluation.value(arguments[1])
        varies = count is not None and isinstance(count.data, torch.Tensor)
        key = (id(node), layer if varies else None, None if varies or not count else count.data)
        if key not in self._known:
            self._known[key] = self._find(node, arguments, count)
        x = of_layer(self._known[key], layer)
        positions = evaluation.frame.positions
        return x if positions is None else narrowed(x, positions)

    def _find(self, node: Node, arguments: tuple[Node, ...], count: Value | None) -> Value:
        if node.operation.kind is Kind.PARTITION:
            return Value(self._divided(node, arguments), ("layer",), finite=True)
        if node.op == "top":
            values = [self._all(arguments[0]), count]
        elif node.op == "fill":
            # How many are missing and left over is known of all layers together.
            numbers = [self.evaluations[0].value(x) for x in arguments[2:]]
            values = [*(self._all(x) for x in arguments[:2]), *numbers]
        else:
            values = [self._all(x) for x in arguments]
        return OPERATIONS[node.op](node, self.frame, *values)

    def _divided(self, node: Node, arguments: tuple[Node, ...]) -> torch.Tensor:
        """float64 [L]: integers or labels for the layers."""
        static = [self.frame.bound.static.needs(x) is not None for x in arguments]
        if node.op != "cluster" and static == [True, False, True][: len(arguments)]:
            known = [self._numbers(x) for i, x in enumerate(arguments) if i != 1]
            divided = torch_layers.divided(node, self.frame, self._all(arguments[1]), *known)
            if divided is not None:
                return divided
        numbers = [self._numbers(x) for x in arguments]
        if node.op != "cluster":
            maxima = numbers[2] if len(numbers) == 3 else None
            cascade = node.op == "cascade"
            made = counts.split(numbers[0][0], numbers[1], maxima, cascade=cascade)
        else:
            number = counts.whole(float(numbers[1][0]), len(self.evaluations))
            made = counts.cluster([float(x) for x in numbers[0]], number)
        return sent(torch.tensor(made, dtype=torch.float64, device=HOST), self.frame.device)

    def _numbers(self, node: Node) -> list:
        """A scalar of every layer as the host's number; it waits for the device at most once."""
        evaluations = self.evaluations
        if self.frame.bound.static.needs(node) is not None:
            return [each.number(node) for each in evaluations]
        values = [each.value(node).data for each in evaluations]
        tensors = [x for x in values if isinstance(x, torch.Tensor)]
        if len(tensors) < len(values):
            return [each.number(node) for each in evaluations]
        return torch.stack(tensors).tolist()

    def _all(self, node: Node) -> Value:
        """A node's values at all layers, the axis `layer` first."""
        values = [widened(each.value(node), each.frame, self.prompt) for each in self.evaluations]
        return stacked(values, self.frame.device)

    def _look(self, node: Node, evaluation: Evaluation) -> Value:
        """`past`, a reduction of it, and `at` where every layer is there."""
        frame, layers = evaluation.frame, len(self.evaluations)
        if node.op != "at":
            x, number = (node if node.op == "past" else node.args[0]).args
            size = counts.whole(evaluation.number(number), layers)
            before = [max(0, frame.here - i) for i in reversed(range(size))]
            return _past(node, [self._at(x, each, frame) for each in before], frame)
        wanted, x = node.args
        at = _named(wanted, evaluation, frame.here + 1 if node.when <= When.LAYER else layers)
        return nowhere(evaluation.value(x), frame) if at is None else self._at(x, at, frame)

    def _at(self, x: Node, layer: int, frame: Frame) -> Value:
        """Another layer's value at this layer's tokens."""
        other = self.evaluations[layer]
        value = other.value(x)
        if layer == frame.layer or "token" not in value.axes:
            return value
        if frame.positions is None and other.frame.positions is None:
            return value
        return narrowed(widened(value, other.frame, self.prompt), frame.places)
