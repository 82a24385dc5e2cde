"""Values of other layers: of the layers computed so far, and of all layers after the last one.

A layer's values are held at the tokens that reached it. Where these differ between layers,
operations that compare layers see all values at the prompt's N positions, absent where a token did
not reach the layer; each layer reads its part of the result at its own tokens.

With several stages (`--pp-size`), only numbers are known of other stages' layers.

Dimensions: L layers of the model, l layers here, N tokens of the prompt.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Set
from dataclasses import dataclass, field, replace

import torch
from kvpolicy.dsl.execute.layer.evaluate import Evaluation, reduces_past
from kvpolicy.dsl.execute.operations.table import TORCH_FORMS
from kvpolicy.dsl.execute.tensors.values import (
    HOST,
    Frame,
    Value,
    aligned,
    as_tensor,
    of_layer,
    of_one_shape,
    over_layers,
    sent,
    stacked,
    union,
)
from kvpolicy.dsl.ir import counts
from kvpolicy.dsl.ir.heads import across_heads
from kvpolicy.dsl.ir.nodes import Node, When
from kvpolicy.dsl.ir.split import MOST
from kvpolicy.dsl.ops.host import Number
from kvpolicy.dsl.ops.operations import Kind

# Kernels that reduce a list of layers' values without stacking them.
OF_LAYERS = {"var": "var_of_layers", "any": "any_of_layers"}


def widened(x: Value, frame: Frame, prompt: int) -> Value:
    """A layer's value at all `prompt` positions; absent (a set: false) where it has no token."""
    if frame.positions is None or "token" not in x.axes:
        return x
    dim = x.axes.index("token")
    shape = list(x.tensor.shape)
    shape[dim] = prompt
    data = x.tensor.new_zeros(shape).index_copy(dim, frame.positions, x.tensor)
    if data.dtype == torch.bool and x.mask is None:
        return Value(data, x.axes, finite=True)
    present = torch.ones((), dtype=torch.bool, device=frame.device) if x.mask is None else x.mask
    present = aligned(present, x.mask_axes, x.axes).expand(x.tensor.shape)
    mask = present.new_zeros(shape).index_copy(dim, frame.positions, present)
    return Value(data, x.axes, mask, x.axes, finite=x.finite)


def narrowed(x: Value, places: torch.Tensor) -> Value:
    """The value at the tokens with the indices `places`, int64."""
    return x.along("token", lambda data, dim: data.index_select(dim, places))


def nowhere(x: Value, frame: Frame) -> Value:
    """A value of the same shape, absent everywhere."""
    data = as_tensor(x.data, frame.device)
    return Value(data, x.axes, torch.zeros_like(data, dtype=torch.bool), x.axes, finite=True)


@dataclass
class PastValues:
    """Values of the layers computed so far, for `past` and `at`.

    Attributes:
        values: node -> layer -> its value, and positions of the layer's tokens (None: all tokens).
    """

    values: dict[Node, dict[int, tuple[Value, torch.Tensor | None]]] = field(default_factory=dict)

    def record(self, node: Node, evaluation: Evaluation, layers: int | None) -> None:
        """Stores a node's value; of the newest `layers` layers only, or of all if None."""
        frame = evaluation.frame
        by_layer = self.values.setdefault(node, {})
        by_layer[frame.layer] = (evaluation.value(node), frame.positions)
        if layers is not None:
            by_layer.pop(frame.layer - layers, None)

    def read(self, node: Node, layer: int, frame: Frame) -> Value:
        """The value at an earlier layer, at the tokens that reached the frame's layer."""
        x, positions = self.values[node][layer]
        if "token" not in x.axes or frame.positions is None:
            return x
        places = frame.positions
        if positions is not None:
            places = torch.searchsorted(positions, places)
        return narrowed(x, places)


def look_back(node: Node, evaluation: Evaluation, history: PastValues) -> Value:
    """`past`, a reduction of it, or `at`, over the layers computed so far."""
    return _look(
        node,
        evaluation,
        evaluation.frame.layer + 1,
        lambda x, layer: (
            evaluation.value(x)
            if layer == evaluation.frame.layer
            else history.read(x, layer, evaluation.frame)
        ),
    )


def _look(
    node: Node, evaluation: Evaluation, layers: int, read: Callable[[Node, int], Value]
) -> Value:
    """`past`, a reduction of it, or `at`, at the evaluation's layer.

    Args:
        layers: number of layers, from 0, that `at` may name; at others it is absent.
        read: gives a node's value at a layer, at this layer's tokens.
    """
    frame = evaluation.frame
    if node.op != "at":
        x, number = (node if node.op == "past" else node.args[0]).args
        size = counts.whole(evaluation.number(number), frame.bound.shape.layers)
        past_layers = (max(0, frame.layer - i) for i in reversed(range(size)))
        return _past(node, [read(x, past_layer) for past_layer in past_layers], frame)
    layer_node, x = node.args
    mask = evaluation.value(layer_node).mask
    layer = None
    if mask is None or mask.all():
        layer = counts.index(evaluation.number(layer_node), layers)
    return nowhere(evaluation.value(x), frame) if layer is None else read(x, layer)


def _past(node: Node, values: list[Value], frame: Frame) -> Value:
    """This layer's value and earlier ones along the axis `past`, or their reduction."""
    if node.op == "past":
        return _along_past(values, frame)
    name = OF_LAYERS.get(node.op)
    if name is None:
        return TORCH_FORMS[node.op](node, frame, _along_past(values, frame))
    axes = union(*(x.axes for x in values))
    first = max(0, len(values) - 1 - frame.layer)
    result = frame.kernels[name](*of_one_shape(values, axes, frame.device), first)
    return Value(result, axes, finite=all(x.finite for x in values))


def _along_past(values: list[Value], frame: Frame) -> Value:
    size = len(values)
    x = over_layers(stacked(values, frame.device), size, frame.device)
    present = torch.arange(size, device=frame.device) >= size - 1 - frame.layer
    axes = ("past", *x.axes[1:])
    if x.mask is None:
        return Value(x.data, axes, present, ("past",), finite=x.finite)
    mask = x.mask if x.mask_axes[:1] == ("layer",) else x.mask[None]
    mask_axes = ("past", *(axis for axis in x.mask_axes if axis != "layer"))
    return Value(x.data, axes, mask & aligned(present, ("past",), mask_axes), mask_axes)


def known_before(node: Node, evaluation: Evaluation) -> Value:
    """A node that looks at other layers but needs no data, at the evaluation's layer."""
    frame = evaluation.frame
    layers = range(frame.bound.shape.layers)
    evaluations = [replace(evaluation, frame=replace(frame, layer=i), known={}) for i in layers]
    return Layers(evaluations, frame.prompt).part(node, evaluations[frame.layer])


class Layers(Evaluation):
    """All layers at once: values have the axis `layer` in front where layers differ.

    Args:
        evaluations: [l], by layer here. The attribute has copies, which find values of other layers
            through this object, as long as it is held.
        prompt: N.
        later: nodes known only after the last layer. Where every layer has all tokens, each is
            computed for all layers at once.
        unheld_nodes: nodes whose values are not held, see `Evaluation`.
        model: all L layers, with numbers only, where some are on other stages; nodes that look at
            other layers are found there.
    """

    def __init__(
        self,
        evaluations: list[Evaluation],
        prompt: int,
        later: Set[Node] = frozenset(),
        unheld_nodes: Set[Node] = frozenset(),
        model: Layers | None = None,
    ) -> None:
        first = evaluations[0].frame
        alike = all(x.frame.positions is None for x in evaluations)
        frame = Frame(
            first.bound, prompt, first.device, first.kv, prompt, kernels=first.kernels,
            heads=first.heads, finite_checks=first.finite_checks,
        )  # fmt: skip
        if not alike:
            token_counts = [x.frame.tokens for x in evaluations]
            frame.held_counts = Value(
                sent(torch.tensor(token_counts, device=HOST), first.device), ("layer",)
            )
        super().__init__(frame, unheld_nodes=unheld_nodes if alike else frozenset(), in_block=True)
        # No reference cycle: tensors are freed with the run that holds this object.
        proxy = weakref.proxy(self)

        def across(node: Node, evaluation: Evaluation) -> Value:
            value: Value = proxy.part(node, evaluation)
            return value

        self.evaluations = [replace(x, across_layers=across) for x in evaluations]
        self.model = model
        self._first = first.layer
        self._together = later if alike else frozenset()

    def of_each(self, node: Node) -> list[Value]:
        """A node's value at every layer."""
        if node not in self._together:
            return [evaluation.value(node) for evaluation in self.evaluations]
        x = self.value(node)
        return [of_layer(x, layer) for layer in range(len(self.evaluations))]

    def part(self, node: Node, evaluation: Evaluation) -> Value:
        """A node that looks at other layers, at the evaluation's layer."""
        frame, layers = evaluation.frame, len(self.evaluations)
        if self.model is not None:
            return self.model.part(node, self.model.evaluations[frame.layer])
        if not _compares(node):
            limit = frame.layer + 1 if node.when <= When.LAYER else layers
            return _look(node, evaluation, limit, lambda x, layer: self._at(x, layer, frame))
        x = of_layer(self.value(node), frame.layer)
        return x if frame.positions is None else narrowed(x, frame.positions)

    def _find(self, node: Node) -> Value:
        if _compares(node):
            return self._compared(node) if self.model is None else self._cut(self.model.value(node))
        if self._is_found_here(node):
            return super()._find(node)
        evaluations = self.evaluations
        result = stacked(
            [widened(x.value(node), x.frame, self.frame.tokens) for x in evaluations],
            self.frame.device,
        )
        if self._together:  # layers hold views, so that values are held once
            for layer, evaluation in enumerate(evaluations):
                evaluation.known[node] = of_layer(result, layer)
        return result

    def _cut(self, x: Value) -> Value:
        """A value of all layers of the model, cut to the layers here."""
        number = len(self.evaluations)
        return x.along("layer", lambda data, dim: data.narrow(dim, self._first, number))

    def _compared(self, node: Node) -> Value:
        if node.operation.kind is Kind.PARTITION:
            return Value(self._divided(node), ("layer",), finite=True)
        if self.frame.heads.divided and across_heads(node):
            return self.of_ranks(node)
        return TORCH_FORMS[node.op](node, self.frame, *self.given(node))

    def given(self, node: Node) -> list[Value]:
        values = super().given(node)
        if _compares(node):
            values[0] = over_layers(values[0], len(self.evaluations), self.frame.device)
        return values

    def reaches(self, node: Node) -> bool:
        return across_heads(node) and self._is_found_here(node)

    def ask_below(self, node: Node, done: dict[Node, bool]) -> bool:
        # Other nodes are found layer by layer.
        return not self._is_found_here(node) or super().ask_below(node, done)

    def _is_found_here(self, node: Node) -> bool:
        """Whether a node is computed for all layers at once."""
        if node.operation.kind is Kind.LOOK or reduces_past(node):
            return False
        return _compares(node) or node in self._together

    def _divided(self, node: Node) -> torch.Tensor:
        """float64 [L]: whole shares (`split`, `cascade`) or labels (`cluster`) of layers."""
        static = [self.frame.bound.static.needs(x) is not None for x in node.args]
        if node.op != "cluster" and static == [True, False, True][: len(static)]:
            return self._by_kernel(node)
        numbers = [self.numbers(x) for x in node.args]
        if node.op != "cluster":
            maxima = numbers[2] if len(numbers) == 3 else None
            parts = counts.split(numbers[0][0], numbers[1], maxima, cascade=node.op == "cascade")
        else:
            number = counts.whole(float(numbers[1][0]), len(self.evaluations))
            parts = counts.cluster([float(x) for x in numbers[0]], number)
        return sent(torch.tensor(parts, dtype=torch.float64, device=HOST), self.frame.device)

    def _by_kernel(self, node: Node) -> torch.Tensor:
        """`split` or `cascade` by computed weights, without waiting for the device."""
        device, layers = self.frame.device, len(self.evaluations)
        total = counts.whole(self.numbers(node.args[0])[0], MOST)
        weights = over_layers(self.value(node.args[1]), layers, device).tensor.double()
        maxima: torch.Tensor | int | None = None
        if len(node.args) == 3:
            limits = [counts.whole(x, MOST) for x in self.numbers(node.args[2])]
            maxima = limits[0]
            if any(x != maxima for x in limits):
                maxima = sent(torch.tensor(limits, device=HOST), device)
        kernel = self.frame.kernels["split"]
        parts: torch.Tensor = kernel(total, weights, maxima, cascade=node.op == "cascade")
        return parts

    def numbers(self, node: Node) -> list[Number]:
        """A scalar of every layer as the host's number; waits for the device at most once."""
        if self.frame.bound.static.needs(node) is not None:
            return [evaluation.number(node) for evaluation in self.evaluations]
        data = self.value(node).data
        listed = data.tolist() if isinstance(data, torch.Tensor) else data
        return listed if isinstance(listed, list) else [listed] * len(self.evaluations)

    def _at(self, x: Node, layer: int, frame: Frame) -> Value:
        """A node's value at `layer`, at the tokens of the frame's layer."""
        other = self.evaluations[layer]
        value = other.value(x)
        if layer == frame.layer or "token" not in value.axes:
            return value
        if frame.positions is None and other.frame.positions is None:
            return value
        return narrowed(widened(value, other.frame, self.frame.tokens), frame.places)


def _compares(node: Node) -> bool:
    return "layer" in node.axes or node.operation.kind is Kind.PARTITION
