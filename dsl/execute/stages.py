"""Rules of `keep` that take entries one after the other, as `A then B then C` does.

Of lists that are decided at once every further stage is one kernel, which needs what is taken so
far, a score and a number: "then", see `execute/kernels.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.bind.ends import MOST, end_of
from kvpolicy.dsl.bind.kept import filling, heads_differ
from kvpolicy.dsl.ir.counts import whole
from kvpolicy.dsl.ir.nodes import Node

_TOKEN = ("token",)


@dataclass(frozen=True)
class Stage:
    """What stays, and of the rest of each list the best.

    Attributes:
        taken: stays in any case; score: by which the rest competes; number: of how many.
        in_all: so many together with those that are taken, and all, if the rest are no more.
    """

    taken: Node
    score: Node
    number: Node
    in_all: bool

    @classmethod
    def of(cls, node: Node) -> Stage | None:
        """The stage that a node is, if it is one."""
        found = None
        if node.op == "fill" and node.axes == _TOKEN:
            found = cls._filled(node)
        elif node.op == "or":
            found = cls._further(*node.args)
        wide = found is None or set(found.number.type.axes) - {"kv"} or found.number.type.absent
        return None if wide else found

    def competing(self, bound: Bound, prompts: Sequence[int]) -> tuple[int, int] | None:
        """Among how many of the last entries it chooses, and which of these, the last, it does not.

        None where KV heads may hold different entries, or how many is not known before a prefill.

        Args:
            prompts: of requests, in tokens.
        """
        if heads_differ(bound.lowered):
            return None
        others = self.taken.args[0] if self.taken.op == "not" else None
        holds = self.score.args[1] if self.score.op == "mask" else None
        spans = [_span(x, bound, prompts) for x in (others, holds) if x is not None]
        far, near = min((x for x, _ in spans), default=MOST), max((x for _, x in spans), default=0)
        return (far, near) if far < MOST else None

    @classmethod
    def _filled(cls, node: Node) -> Stage | None:
        score, taken, budget = filling(node)
        if node.args[2].axes != _TOKEN:
            return None
        return cls(taken, score, budget, in_all=True)

    @classmethod
    def _further(cls, taken: Node, top: Node) -> Stage | None:
        if top.op != "top" or top.axes != _TOKEN:
            return None
        by, number = top.args
        if not by.left_over or by.args[1].op != "not":
            return None
        (others,) = by.args[1].args
        return cls(taken, by.args[0], number, in_all=False) if others == taken else None


def _span(node: Node, bound: Bound, prompts: Sequence[int]) -> tuple[int, int]:
    """Within how many of a list's last entries a set lies, and how many of them, the last, not."""
    if node.op == "and":
        parts = [_span(each, bound, prompts) for each in node.args]
        return min(far for far, _ in parts), max(near for _, near in parts)
    turned = node.op == "not"
    ends = end_of(bound, node.args[0] if turned else node)
    if ends is None or ends.last is None or "layer" in (bound.static.needs(ends.last) or ()):
        return MOST, 0
    numbers = [whole(bound.number(ends.last, prompt), MOST) for prompt in prompts]
    return (MOST, min(numbers)) if turned else (max(numbers), 0)
