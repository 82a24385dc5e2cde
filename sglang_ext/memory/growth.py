"""How much memory a request may come to need while it decodes under a policy that goes on.

SGLang admits requests as if the output of every one stayed in memory. Where a policy holds the
cache at a size, that is far too much, and long generations would run one after the other.
"""

from __future__ import annotations

from functools import lru_cache

from kvpolicy.dsl.bind.bind import Bound
from kvpolicy.dsl.bind.bounds import max_entries
from kvpolicy.dsl.bind.steady import is_steady
from kvpolicy.sglang_ext.memory.arena import Arena


class Growth:
    """Slots that the requests of a policy may hold.

    Args:
        page_size: slots that SGLang's allocator hands out at once.
    """

    def __init__(self, bound: Bound, arena: Arena, page_size: int) -> None:
        self._bound, self._arena = bound, arena
        # A tail until the next fold, and a page of which only a part is used for each of both.
        self._between = bound.fold_interval + 2 * page_size + arena.kv_heads
        self._steady = is_steady(bound)
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
        slots = (self._most_of(layers, prompt, output) for layers in self._arena.spans)
        return max(slots) + self._between

    def _most_of(self, layers: range, prompt: int, output: int) -> int:
        """What the lists of one stage's layers take."""
        entries = max_entries(self._bound, prompt, layers)
        if entries >= len(layers) * self._bound.shape.kv_heads * prompt:
            # The cache has not reached its size yet: it may become as for a prompt that long.
            entries = max_entries(self._bound, prompt + output, layers)
        share = share_of_rank(entries, self._bound, self._arena, prompt + output)
        return self._arena.most_slots(share, len(layers))


def share_of_rank(entries: int, bound: Bound, arena: Arena, tokens: int) -> int:
    """How many of so many entries of a request one of several ranks is reckoned to hold.

    An even share. Where KV heads compete, a rank may come to hold more; then it takes the slots
    when that is known, or the request is served in full. Where tokens leave the prefill it cannot
    be, and all that may come is reckoned with.

    Args:
        tokens: of the request.
    """
    total = bound.shape.kv_heads
    share = -(-entries * arena.kv_heads // total)
    if arena.kv_heads < total and bound.propagates:
        return min(entries, arena.layers * arena.kv_heads * tokens)
    return share
