"""How many entries lists keep where numbers alone decide it: of a prompt, and while decoding.

Of a prompt they do if everything stays, or by a rule of `ends.py`. While decoding, if a rule takes
some entries and fills up to a budget with the best of the rest: a list that was cut to its budget
once is cut to it each time again. Memory can then be taken, or freed, before a device has chosen.
"""

from __future__ import annotations

from collections.abc import Callable

from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.bind.ends import WHOLE_LIST, ends_of
from kvpolicy.dsl.bind.kept import filling, keep_of, present_outside, sized_terms
from kvpolicy.dsl.ir.counts import whole
from kvpolicy.dsl.ir.nodes import Node, Rules
from kvpolicy.dsl.ops.host import Number


def deciding_numbers(keep: Node) -> list[Node] | None:
    """Numbers and conditions that decide how many entries lists keep; None: these alone do not."""
    if keep.op == "all":
        return []
    if keep.op == "choose":
        first, second = (deciding_numbers(branch) for branch in keep.args[::2])
        return None if first is None or second is None else [keep.args[1], *first, *second]
    ends = ends_of(keep)
    if ends is None:
        return None
    if ends.score is not None and not present_outside(ends.score, keep.args[1]):
        return None
    return [number for number in ends.numbers if number is not None]


def entries_kept(keep: Node, prompt: int, number: Callable[[Node], Number]) -> int:
    """Number of entries that each list of a layer keeps of a prompt, if tensors are finite.

    Args:
        keep: a selection for which `deciding_numbers` is not None.
        prompt: N tokens.
        number: gives the layer's value of a node of `deciding_numbers(keep)`.

    Raises:
        TypeError: numbers alone do not decide it.
    """

    def count(node: Node | None) -> int:
        return 0 if node is None else whole(number(node), WHOLE_LIST)

    while keep.op == "choose":
        keep = keep.args[0 if number(keep.args[1]) else 2]
    if keep.op == "all":
        return prompt
    ends = ends_of(keep)
    if ends is None:
        raise TypeError(f"no numbers say how many entries `{keep.op}` keeps")
    return min(prompt, max(count(ends.first) + count(ends.last), count(ends.budget)))


def known_counts(bound: Bound, prompt: int) -> list[int] | None:
    """[L] number of entries that each list of a layer keeps of a prompt of N tokens.

    Valid if the model's tensors are finite; else everything stays. None if data decide, and for
    policies that propagate or share.
    """
    keep = keep_of(bound.lowered.prefill)
    numbers = deciding_numbers(keep)
    if bound.propagates or bound.program.share is not None or numbers is None:
        return None
    if not all(bound.static.follows(node, "prompt", "layer") for node in numbers):
        return None

    def of_layer(layer: int) -> int:
        return entries_kept(keep, prompt, lambda node: bound.number(node, prompt, layer))

    return [of_layer(layer) for layer in range(bound.shape.layers)]


def entries_taken(bound: Bound, rules: Rules, prompt: int, layer: int) -> int | None:
    """Most entries that a list takes at a decode step before it is filled up to a lasting budget.

    A list that keeps more was filled up, and will be again. None if the number is not known.

    Args:
        rules: the lowered rules of decode steps.
    """

    def same(number: Node) -> bool:
        """Whether the host knows a number, and it is the same at every step of a request."""
        return bound.static.follows(number, "prompt", "layer")

    keep = keep_of(rules)
    while keep.op == "choose" and same(keep.args[1]):
        keep = keep.args[0 if bound.number(keep.args[1], prompt, layer) else 2]
    if keep.op != "fill" or keep.axes != ("token",):
        return None
    score, taken_set, budget = filling(keep)
    terms = sized_terms(taken_set)
    if terms is None or not present_outside(score, taken_set):
        return None
    counts = [term.args[1] for term in terms]
    if not all(map(same, counts)) or not (budget.op == "budget" or same(budget)):
        return None
    return sum(whole(bound.number(count, prompt, layer), WHOLE_LIST) for count in counts)
