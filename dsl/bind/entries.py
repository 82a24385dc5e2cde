"""How many entries each list of a layer keeps of a prompt, where numbers alone say it.

That is so where everything stays, or the ends of each list and of the rest the best, up to a
budget. Who takes memory for what is kept need not wait then until a device has chosen it.
"""

from __future__ import annotations

from collections.abc import Callable

from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.bind.ends import MOST, ends_of
from kvpolicy.dsl.bind.kept import keep_of, present_outside
from kvpolicy.dsl.ir.counts import whole
from kvpolicy.dsl.ir.nodes import Node
from kvpolicy.dsl.ops.host import Number


def counting(keep: Node) -> list[Node] | None:
    """The numbers that say how many entries a layer keeps; None: numbers alone do not."""
    if keep.op == "all":
        return []
    if keep.op == "choose":
        one, other = (counting(each) for each in keep.args[::2])
        return None if one is None or other is None else [keep.args[1], *one, *other]
    ends = ends_of(keep)
    if ends is None:
        return None
    if ends.score is not None and not present_outside(ends.score, keep.args[1]):
        return None
    return [number for number in ends.numbers if number is not None]


def entries_kept(keep: Node, prompt: int, number: Callable[[Node], Number]) -> int:
    """Entries that each list of a layer keeps of a prompt of N tokens, if tensors are finite.

    Args:
        number: the layer's value of a node that `counting` gives.

    Raises:
        TypeError: numbers alone do not say it.
    """

    def count(node: Node | None) -> int:
        return 0 if node is None else whole(number(node), MOST)

    while keep.op == "choose":
        keep = keep.args[0 if number(keep.args[1]) else 2]
    if keep.op == "all":
        return prompt
    ends = ends_of(keep)
    if ends is None:
        raise TypeError(f"no numbers say how many entries `{keep.op}` keeps")
    return min(prompt, max(count(ends.first) + count(ends.last), count(ends.budget)))


def foreseen(bound: Bound, prompt: int) -> list[int] | None:
    """[L] entries that each list of a layer keeps of a prompt of N tokens; None: data decide.

    Only if the model's tensors are finite; else everything stays.
    """
    keep = keep_of(bound.lowered.prefill)
    numbers = counting(keep)
    if bound.propagates or bound.program.share is not None or numbers is None:
        return None
    if not all(bound.static.follows(node, "prompt", "layer") for node in numbers):
        return None

    def of_layer(layer: int) -> int:
        return entries_kept(keep, prompt, lambda node: bound.number(node, prompt, layer))

    return [of_layer(layer) for layer in range(bound.shape.layers)]
