"""How many entries each list of a layer keeps of a prompt, where numbers alone decide it.

They do if everything stays, or by a rule of `ends.py`. Memory for the kept entries can then be
taken before a device has chosen them.
"""

from __future__ import annotations

from collections.abc import Callable

from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.bind.ends import WHOLE_LIST, ends_of
from kvpolicy.dsl.bind.kept import keep_of, present_outside
from kvpolicy.dsl.ir.counts import whole
from kvpolicy.dsl.ir.nodes import Node
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
