"""Policies by which every list keeps the same number of entries each time that entries leave.

If a rule takes some entries and fills up to a budget with the best of the rest, and no data decide
these numbers, then a list that was cut to its budget once is cut to it each time again. Memory can
then be freed by these numbers before a device has computed them.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.bind.kept import filling, keep_of, present_outside
from kvpolicy.dsl.ir.counts import whole
from kvpolicy.dsl.ir.nodes import Node, Rules
from kvpolicy.dsl.ir.once import PROMPTS, once_at_most
from kvpolicy.dsl.ir.split import MOST

_TOKEN = ("token",)


class FixedSize:
    """Tells when the decode steps of a bound policy have cut every list to a budget that lasts.

    Args:
        bound: the policy.
        rules: its lowered rules of decode steps.
    """

    def __init__(self, bound: Bound, rules: Rules) -> None:
        self._bound, self._keep = bound, keep_of(rules)

    def holds(self, prompt: int, counts: Sequence[Sequence[int]]) -> bool:
        """Whether every list keeps the same number of entries whenever entries leave from now on.

        Valid if the model's tensors are finite.

        Args:
            counts: [L][G] entries that each list kept at a step at which all lists lost some.
        """
        pairs = zip(self._taken(prompt, len(counts)), counts, strict=True)
        return all(
            number is not None and number < min(layer_counts) for number, layer_counts in pairs
        )

    @once_at_most(PROMPTS)
    def _taken(self, prompt: int, layers: int) -> list[int | None]:
        return [self.taken(prompt, layer) for layer in range(layers)]

    def taken(self, prompt: int, layer: int) -> int | None:
        """Most entries that a list takes before it is filled up to a budget that lasts.

        A list that keeps more was filled up, and will be again. None if the number is not known.
        """
        keep = self._keep
        while keep.op == "choose" and self._same(keep.args[1]):
            keep = keep.args[0 if self._bound.number(keep.args[1], prompt, layer) else 2]
        if keep.op != "fill" or keep.axes != _TOKEN:
            return None
        score, taken_set, budget = filling(keep)
        lasts = budget.op == "budget" or self._same(budget)
        numbers = self._numbers(taken_set)
        if not lasts or numbers is None or not present_outside(score, taken_set):
            return None
        return sum(whole(self._bound.number(number, prompt, layer), MOST) for number in numbers)

    def _numbers(self, taken_set: Node) -> list[Node] | None:
        """Counts of the selections in a union; None if data decide one of them."""
        if taken_set.op == "truth" and taken_set.value is False:
            return []
        if taken_set.op == "or":
            parts = [self._numbers(arg) for arg in taken_set.args]
            numbers = [number for part in parts if part is not None for number in part]
            return None if None in parts else numbers
        number = taken_set.args[1] if taken_set.op == "top" and taken_set.axes == _TOKEN else None
        return [number] if number is not None and self._same(number) else None

    def _same(self, number: Node) -> bool:
        """Whether the host knows a number, and it is the same at every step of a request."""
        return self._bound.static.follows(number, "prompt", "layer")
