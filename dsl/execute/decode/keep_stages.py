"""Stages of `keep`, which take further entries one after the other, as in `A then B then C`.

For lists that are decided at once, every stage is one call of the kernel "then" (`kernels.py`) with
the entries taken so far, a score and a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.bind.ends import WHOLE_LIST, end_of
from kvpolicy.dsl.bind.kept import filling, heads_differ
from kvpolicy.dsl.ir.counts import whole
from kvpolicy.dsl.ir.nodes import Node

_TOKEN = ("token",)


@dataclass(frozen=True)
class KeepStage:
    """Entries that are taken already, and the best of the rest of each list.

    Attributes:
        taken: the set that stays in any case; score: by which the rest competes.
        number: how many of the rest stay.
        in_all: whether `number` counts those taken too; then all stay if they are no more.
    """

    taken: Node
    score: Node
    number: Node
    in_all: bool

    @classmethod
    def of(cls, node: Node) -> KeepStage | None:
        """The stage that a node stands for; None if it is no stage."""
        stage = None
        if node.op == "fill" and node.axes == _TOKEN:
            stage = cls._filled(node)
        elif node.op == "or":
            stage = cls._further(*node.args)
        unfit = stage is None or set(stage.number.type.axes) - {"kv"} or stage.number.type.absent
        return None if unfit else stage

    def competing(self, bound: Bound, prompts: Sequence[int]) -> tuple[int, int] | None:
        """(far, near): the stage chooses among a list's last `far` entries, not the last `near`.

        None if KV heads may hold different entries, or no such `far` is known before the prefill.

        Args:
            prompts: lengths of the requests' prompts, in tokens.
        """
        if heads_differ(bound.lowered):
            return None
        candidates = self.taken.args[0] if self.taken.op == "not" else None
        condition = self.score.args[1] if self.score.op == "mask" else None
        spans = [_span(x, bound, prompts) for x in (candidates, condition) if x is not None]
        far, near = (
            min((x for x, _ in spans), default=WHOLE_LIST),
            max((x for _, x in spans), default=0),
        )
        return (far, near) if far < WHOLE_LIST else None

    @classmethod
    def _filled(cls, node: Node) -> KeepStage | None:
        score, selected, budget = filling(node)
        if node.args[2].axes != _TOKEN:
            return None
        return cls(selected, score, budget, in_all=True)

    @classmethod
    def _further(cls, selected: Node, top: Node) -> KeepStage | None:
        if top.op != "top" or top.axes != _TOKEN:
            return None
        masked, number = top.args
        if not masked.left_over or masked.args[1].op != "not":
            return None
        (excluded,) = masked.args[1].args
        return cls(selected, masked.args[0], number, in_all=False) if excluded == selected else None


def _span(node: Node, bound: Bound, prompts: Sequence[int]) -> tuple[int, int]:
    """(far, near): a set lies within a list's last `far` entries, without the last `near`."""
    if node.op == "and":
        spans = [_span(argument, bound, prompts) for argument in node.args]
        return min(far for far, _ in spans), max(near for _, near in spans)
    negated = node.op == "not"
    ends = end_of(bound, node.args[0] if negated else node)
    if ends is None or ends.last is None or "layer" in (bound.static.needs(ends.last) or ()):
        return WHOLE_LIST, 0
    numbers = [whole(bound.number(ends.last, prompt), WHOLE_LIST) for prompt in prompts]
    return (WHOLE_LIST, min(numbers)) if negated else (max(numbers), 0)
