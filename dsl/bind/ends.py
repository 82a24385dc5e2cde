"""Rules of `keep` that take the ends of each list, and of the rest the best, up to a budget.

Most policies that go on while they decode keep so: what a list keeps then depends on its own
entries alone, so that the lists of many layers and requests can be decided in one operation.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.ir.counts import whole
from kvpolicy.dsl.ir.nodes import Node

MOST = 2**31  # entries; more are everything
_TOKEN = ("token",)


@dataclass(frozen=True)
class Ends:
    """A rule.

    Attributes:
        first, last: how many first and last entries stay; None: none do because of their place.
        score: by which the rest competes; None: only the ends stay.
        budget: entries in all; None where there is no score, or the prefill's numbers decide.
    """

    first: Node | None
    last: Node | None
    score: Node | None = None
    budget: Node | None = None

    @classmethod
    def of(cls, bound: Bound, prompt: int) -> Ends | None:
        """The rule of a policy's decode steps after a prompt of so many tokens.

        None where `keep` is another one, or its numbers change from step to step.
        """
        keep = None if bound.lowered.decode is None else bound.lowered.decode.keep
        if keep is None:
            return None
        while keep.op == "choose" and bound.static.follows(keep.args[1], "prompt"):
            keep = keep.args[0 if bound.number(keep.args[1], prompt) else 2]
        if keep.op != "fill":
            made = _ends(keep)
            return made if made is not None and made._lasts(bound) else None
        score, taken, missing, remaining = keep.args
        own = _ends(taken)
        if own is None or keep.axes != _TOKEN or missing.op != "missing":
            return None
        budget, held = missing.args
        if held != taken or remaining.args != (taken,):
            return None
        made = cls(own.first, own.last, score, None if budget.op == "budget" else budget)
        return made if made._lasts(bound) else None

    def _lasts(self, bound: Bound) -> bool:
        """Whether its numbers are the same at every layer and step of a request."""
        numbers = (self.first, self.last, self.budget)
        return all(node is None or bound.static.follows(node, "prompt") for node in numbers)

    def numbers(self, bound: Bound, prompt: int) -> tuple[int, int, int]:
        """First entries, last entries and entries in all; of a budget that data decide 0."""
        nodes = (self.first, self.last, self.budget)
        first, last, budget = (
            0 if node is None else whole(bound.number(node, prompt), MOST) for node in nodes
        )
        return first, last, budget


def _ends(taken: Node) -> Ends | None:
    """A union of first and last entries, each at most once."""
    if taken.op == "truth" and taken.value is False:
        return Ends(None, None)
    if taken.op == "or" and len(taken.args) == 2:
        one, other = (_ends(each) for each in taken.args)
        if one is None or other is None:
            return None
        if (one.first and other.first) or (one.last and other.last):
            return None
        return Ends(one.first or other.first, one.last or other.last)
    if taken.op != "top" or taken.axes != _TOKEN:
        return None
    by, count = taken.args
    if by.op == "mask" and by.value == "rest" and _ends_of_rest(by.args[1]):
        by = by.args[0]  # entries that are not at the one end, from the other
    if by.op == "position":
        return Ends(None, count)
    if by.op == "negate" and by.args[0].op == "position":
        return Ends(count, None)
    return None


def _ends_of_rest(condition: Node) -> bool:
    return condition.op == "not" and _ends(condition.args[0]) is not None
