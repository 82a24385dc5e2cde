"""Rules of `keep` that take both ends of each list and the best of the rest, up to a budget.

A list holds the entries of one KV head of a layer. Most policies with `decode` have such a rule.
What a list keeps then depends on its own entries alone, so that the lists of many layers and
requests can be decided in one operation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.bind.kept import filling
from kvpolicy.dsl.ir.counts import whole
from kvpolicy.dsl.ir.nodes import Node

WHOLE_LIST = 2**31  # entries; more than any list has
_TOKEN = ("token",)
_BEFORE = ("prompt", "layer")  # known before the prefill


@dataclass(frozen=True)
class Ends:
    """A rule: the first and last entries of a list, and the best of the rest.

    Attributes:
        first, last: number of first and of last entries that stay; None: 0.
        score: score by which the rest competes; None: only the ends stay.
        budget: number of entries that stay in all; None without `score`.
        where: condition for layers with this rule, all others keep everything; None: all layers.
    """

    first: Node | None
    last: Node | None
    score: Node | None = None
    budget: Node | None = None
    where: Node | None = None

    @classmethod
    def of(cls, bound: Bound, prompt: int) -> Ends | None:
        """The rule of a policy's decode steps after a prompt of N tokens.

        None if `keep` has another form, or if its numbers change from step to step.
        """
        keep = None if bound.lowered.decode is None else bound.lowered.decode.keep
        if keep is None:
            return None
        while keep.op == "choose" and bound.static.follows(keep.args[1], "prompt"):
            keep = keep.args[0 if bound.number(keep.args[1], prompt) else 2]
        where = None
        if keep.op == "choose" and keep.args[2].op == "all":
            if not bound.static.follows(keep.args[1], *_BEFORE):
                return None
            keep, where, _ = keep.args
        ends = ends_of(keep)
        if ends is None or not all(_is_constant(bound, node) for node in ends.numbers if node):
            return None
        return replace(ends, where=where)

    @property
    def numbers(self) -> tuple[Node | None, Node | None, Node | None]:
        """Number of first entries, of last entries, and of entries in all."""
        return self.first, self.last, self.budget

    def of_data(self, bound: Bound) -> dict[int, Node]:
        """Those of `numbers` that the prefill's data decide, by their index."""
        pairs = enumerate(self.numbers)
        return {i: node for i, node in pairs if node and bound.static.needs(node) is None}

    def rows(self, bound: Bound, prompt: int, layers: range) -> list[tuple[int, int, int]]:
        """`numbers` of each of `layers`, or one row if all are alike; 0 for what data decide."""
        data = self.of_data(bound).values()
        known_numbers = [node for node in (self.where, *self.numbers) if node and node not in data]
        layers_differ = any("layer" in (bound.static.needs(node) or ()) for node in known_numbers)
        return [self._row(bound, prompt, i) for i in (layers if layers_differ else layers[:1])]

    def _row(self, bound: Bound, prompt: int, layer: int) -> tuple[int, int, int]:
        if self.where is not None and not bound.number(self.where, prompt, layer):
            return WHOLE_LIST, WHOLE_LIST, WHOLE_LIST
        data = self.of_data(bound)
        first, last, budget = (
            0 if node is None or i in data else whole(bound.number(node, prompt, layer), WHOLE_LIST)
            for i, node in enumerate(self.numbers)
        )
        return first, last, budget


def ends_of(keep: Node) -> Ends | None:
    """The rule of a token set: ends and, in a `fill`, the best of the rest; None: it has none."""
    if keep.op != "fill":
        return _ends_alone(keep)
    score, taken_set, budget = filling(keep)
    ends = _ends_alone(taken_set) if keep.axes == _TOKEN else None
    return None if ends is None else Ends(ends.first, ends.last, score, budget)


def _is_constant(bound: Bound, node: Node) -> bool:
    """Whether a number is the same at every step of a request."""
    if bound.static.needs(node) is not None:
        return bound.static.follows(node, *_BEFORE)
    if node.op in ("budget", "decided"):
        return set(node.type.axes) <= {"kv"} and not node.type.absent
    return node.operation.elementwise and all(_is_constant(bound, arg) for arg in node.args)


def _ends_alone(token_set: Node) -> Ends | None:
    """The rule of a union of first and last entries, each at most once; None: another set."""
    if token_set.op == "truth" and token_set.value is False:
        return Ends(None, None)
    if token_set.op == "or" and len(token_set.args) == 2:
        left, right = (_ends_alone(part) for part in token_set.args)
        if left is None or right is None:
            return None
        if (left.first and right.first) or (left.last and right.last):
            return None
        return Ends(left.first or right.first, left.last or right.last)
    if token_set.op != "top" or token_set.axes != _TOKEN:
        return None
    score, count = token_set.args
    if score.left_over and _ends_of_rest(score.args[1]):
        score = score.args[0]  # one end, of what the other end leaves over
    return _end(score, count)


def end_of(bound: Bound, node: Node) -> Ends | None:
    """The rule of a node that takes the first or last n entries, n static; None: another node."""
    if node.op != "top" or node.axes != _TOKEN or not bound.static.follows(node.args[1], *_BEFORE):
        return None
    return _end(*node.args)


def _end(score: Node, count: Node) -> Ends | None:
    if score.op == "position":
        return Ends(None, count)
    if score.op == "negate" and score.args[0].op == "position":
        return Ends(count, None)
    return None


def _ends_of_rest(condition: Node) -> bool:
    return condition.op == "not" and _ends_alone(condition.args[0]) is not None
