"""How much memory a request may come to need while it decodes under a policy that goes on.

SGLang admits requests as if the output of every one stayed in memory. Where a policy holds the
cache at a size, that is far too much, and long generations would run one after the other.
"""

from __future__ import annotations

from functools import lru_cache

from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.bind.bounds import max_entries
from kvpolicy.dsl.ir.nodes import Node
from kvpolicy.sglang_ext.memory.arena import Arena

ENDLESS = 1 << 62  # a prompt of which every policy that holds a size drops something


class Growth:
    """Slots that the requests of a policy may hold.

    Args:
        page_size: slots that SGLang's allocator hands out at once.
    """

    def __init__(self, bound: Bound, arena: Arena, page_size: int) -> None:
        self._bound, self._arena = bound, arena
        # A tail until the next fold, and a page of which only a part is used for each of both.
        self._between = bound.fold_interval + 2 * page_size + arena.kv_heads
        self._steady = _is_steady(bound)
        self.most = lru_cache(maxsize=4096)(self._most)

    def _most(self, prompt: int, output: int) -> int | None:
        """Slots that a request holds at most beside a prompt in the radix cache.

        Args:
            output: tokens that it generates at most.

        Returns:
            None where that grows with the output, as in stock SGLang.
        """
        if not self._steady:
            return None
        entries, shape = max_entries(self._bound, prompt), self._bound.shape
        if entries >= shape.layers * shape.kv_heads * prompt:
            # The cache has not reached its size yet: it may become as for a prompt that long.
            entries = max_entries(self._bound, prompt + output)
        return self._arena.most_slots(entries) + self._between


def _is_steady(bound: Bound) -> bool:
    """Whether every fold leaves no more entries than the prefill may."""
    decode, rules, shape = bound.folded.decode, bound.folded.prefill, bound.shape
    if decode is None or decode.when is not None or bound.propagates:
        return False
    if decode.budget is not None and _size(decode.budget) != _size(rules.budget):
        return False
    everything = shape.layers * shape.kv_heads * ENDLESS
    return max_entries(bound, ENDLESS) < everything and _size(decode.keep) == _size(rules.keep)


def _size(node: Node | None) -> tuple[object, ...] | None:
    """What decides how many entries a token set holds: all but what is compared."""
    if node is None:
        return None
    arguments = node.args[1:] if node.op == "top" else node.args
    return node.op, str(node.value), node.axes, tuple(_size(each) for each in arguments)
