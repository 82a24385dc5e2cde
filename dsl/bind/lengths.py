"""How many tokens reach each layer, bounded before any tensor is seen.

Dimensions: L layers, N tokens of the prompt.
"""

from __future__ import annotations

from functools import partial

from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.bind.intervals import Intervals
from kvpolicy.dsl.bind.kept import chooses_after, filling, present_outside
from kvpolicy.dsl.ir.counts import whole
from kvpolicy.dsl.ir.host import truth
from kvpolicy.dsl.ir.nodes import Node, Propagate
from kvpolicy.dsl.ops.host import Number

Range = tuple[int, int]


def lengths(bound: Bound, prompt: int) -> list[Range]:
    """[L] least and largest number of tokens at each layer, in the pass whose entries are kept."""
    layers = range(bound.shape.layers)
    if bound.lowered.propagate is None:
        return [(prompt, prompt) for _ in layers]
    layer_lengths = _Lengths(bound, bound.lowered.propagate, prompt)
    if bound.restarts:
        return [layer_lengths.restarted()] * len(layers)
    for layer in layers[1:]:
        layer_lengths.ranges[layer] = layer_lengths.after(layer - 1)
    return layer_lengths.ranges


def computed(bound: Bound, prompt: int) -> list[int]:
    """Largest number of tokens that each layer computes, in the order of computation.

    With a restart the layers of the first pass come first, then those of the second.
    """
    layer_tokens = [high for _, high in lengths(bound, prompt)]
    layer = bound.propagation_layer(prompt)
    if not bound.restarts or layer == len(layer_tokens):  # the second pass never begins
        return layer_tokens
    return [prompt] * (len(layer_tokens) if layer is None else layer + 1) + layer_tokens


class _Lengths:
    """Ranges of the layers done so far; deeper ones still have the prompt's length."""

    def __init__(self, bound: Bound, rules: Propagate, prompt: int) -> None:
        self.rules = rules
        self.ranges: list[Range] = [(prompt, prompt)] * bound.shape.layers
        self.numbers = Intervals(bound, prompt, self.ranges)
        self.done: bool | None = False  # whether `first` held at an earlier layer; None: perhaps

    def restarted(self) -> Range:
        """Number of tokens of the second pass, or of the first if it may be the only one."""
        ranges: list[Range] = []
        for layer in range(len(self.ranges)):
            acts = self._acts(layer)
            if acts is not False:
                ranges.append(self._chosen(layer))
            if acts:
                break
        else:
            ranges.append(self.ranges[0])
        return _hull(ranges)

    def after(self, layer: int) -> Range:
        """Number of tokens that a layer hands on."""
        acts = False if self.done else self._acts(layer)
        input_range = self.ranges[layer]
        if acts is False:
            return input_range
        certain = acts and self.done is False
        if not self.rules.repeats:
            self.done = True if acts else None
        chosen = self._chosen(layer)
        return chosen if certain else _hull([chosen, input_range])

    def _acts(self, layer: int) -> bool | None:
        """Whether tokens are chosen at a layer; None: data decide."""
        return truth(self.rules.moment, partial(self._known, layer))

    def _known(self, layer: int, node: Node) -> Number | None:
        return self.numbers.value(node, layer) if self.numbers.is_static(node, layer) else None

    def _chosen(self, layer: int) -> Range:
        low, high = self._size(self.rules.tokens, layer)
        input_range = self.ranges[layer]
        # Where no token is chosen, all go on.
        return (low, high) if low else _hull([(min(1, input_range[0]), high), input_range])

    def _size(self, node: Node, layer: int) -> Range:
        """Least and largest number of tokens in a set, which has no axis but `token`."""
        low, high = self.ranges[layer]
        if node.op == "top":
            fewest, most = self.numbers.of(node.args[1], layer)
            minimum = whole(fewest, low) if not node.args[0].type.absent else 0
            return minimum, whole(most, high)
        if node.op == "fill":
            score, taken_set, budget = filling(node)
            least, largest = self._size(taken_set, layer)
            fewest, most = self.numbers.of(budget, layer)
            rest = whole(fewest, low) if present_outside(score, taken_set) else 0
            return max(least, rest), max(largest, whole(most, high))
        if node.op == "or":
            (a, b), (c, d) = (self._size(x, layer) for x in node.args)
            minimum = max(a, c)
            if chooses_after(*node.args):
                # The right side chooses among what the left one left over.
                fewest = whole(self.numbers.of(node.args[1].args[1], layer)[0], low)
                x = node.args[1].args[0].args[0]
                minimum = min(low, a + fewest) if present_outside(x, node.args[0]) else a
            return minimum, min(high, b + d)
        if node.op == "choose":
            if self.numbers.is_static(node.args[1], layer):
                chosen = self.numbers.value(node.args[1], layer)
                return self._size(node.args[0 if chosen else 2], layer)
            sizes = [self._size(x, layer) for x in node.args[::2]]
            if "token" in node.args[1].type.axes:  # tokens choose by themselves
                return 0, min(high, sum(most for _, most in sizes))
            return _hull(sizes)
        if node.op == "all" or (node.op == "truth" and node.value):
            return low, high
        return 0, 0 if node.op == "truth" else high


def _hull(ranges: list[Range]) -> Range:
    return min(low for low, _ in ranges), max(high for _, high in ranges)
