"""Rules of `keep` that take both ends of each list and the best of the rest, up to a budget.

A list holds the entries of one KV head of a layer. Most policies with `decode` have such a rule.
What a list keeps then depends on its own entries alone, so that the lists of many layers and
requests can be decided in one operation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.bind.kept import filling, sized_terms
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
    fills = keep.op == "fill"
    score, taken_set, budget = filling(keep) if fills else (None, keep, None)
    terms = sized_terms(taken_set)
    if terms is None or (fills and keep.axes != _TOKEN):
        return None
    ends = [_end(term) for term in terms]
    counts = dict(end for end in ends if end is not None)
    if len(counts) < len(ends):  # other entries, or an end twice
        return None
    return Ends(counts.get("first"), counts.get("last"), score, budget)


def _is_constant(bound: Bound, node: Node) -> bool:
    """Whether a number is the same at every step of a request."""
    if bound.static.needs(node) is not None:
        return bound.static.follows(node, *_BEFORE)
    if node.op in ("budget", "decided"):
        return set(node.type.axes) <= {"kv"} and not node.type.absent
    return node.operation.elementwise and all(_is_constant(bound, arg) for arg in node.args)


def end_of(bound: Bound, node: Node) -> Ends | None:
    """The rule of a node that takes the first or last n entries, n static; None: another node."""
    if node.op != "top" or node.args[0].left_over:
        return None
    return ends_of(node) if bound.static.follows(node.args[1], *_BEFORE) else None


def _end(top: Node) -> tuple[str, Node] | None:
    """Which end a term takes, perhaps of what others leave over, and how many entries of it."""
    score, count = top.args
    score = score.args[0] if score.left_over else score
    if score.op == "position":
        return "last", count
    takes_first = score.op == "negate" and score.args[0].op == "position"
    return ("first", count) if takes_first else None
